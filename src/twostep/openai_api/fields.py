"""One request's body, field by field, and what of it is not supported."""

from collections.abc import Mapping
from typing import Any

from twostep.engine.refusals import shown
from twostep.openai_api.errors import ApiError

UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "documents": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_whitespace_pattern": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_logprobs": (),
    "reasoning_effort": ("none",),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}
"""Known fields that would change the answer, with the values at which they do not (null never does)."""

WITHOUT_EFFECT = {
    "metadata", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
    "service_tier", "store", "user",
}  # fmt: skip
"""Known fields that do not change the answer; whatever they say is accepted."""


class Fields:
    """The fields of a body; null counts as absent. What is taken is not left over for `rest`."""

    def __init__(self, body: object) -> None:
        if not isinstance(body, Mapping):
            raise ApiError(f"the body is {shown(body)}; it has to be a JSON object")
        self._left = {name: value for name, value in body.items() if value is not None}

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def take(self, name: str, default: Any = None) -> Any:
        return self._left.pop(name, default)

    def take_all(self, names: tuple[str, ...]) -> dict[str, Any]:
        """Those of `names` that are there."""
        return {name: self._left.pop(name) for name in names if name in self._left}

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise ApiError(f"{name} is {shown(value)}; it has to be true or false", param=name)
        return value

    def rest(self) -> tuple[str, ...]:
        """Names of fields that nobody knows. Raises `ApiError` if one is left that would change the answer."""
        for name, neutral in UNSUPPORTED.items():
            value = self.take(name)
            if value is not None and value not in neutral:
                raise ApiError(f"{name} is {shown(value)}; {name} is not supported here", param=name)
        return tuple(sorted(self._left.keys() - WITHOUT_EFFECT))
