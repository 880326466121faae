"""The fields of a request body, and the fields of other APIs that are not supported: refused or ignored.

OpenAI's, vLLM's, llama.cpp's and Ollama's fields are in the tables below, from which docs/server.md is generated;
supported fields are described in `server.api.openapi`. All other fields are unknown: ignored, and named in the log.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from twostep.engine.refusals import shown
from twostep.openai_api.api_error import ApiError


@dataclass(frozen=True)
class Refused:
    """The field would change the form or the meaning of the answer; a request with it gets status 400."""

    allowed: tuple[object, ...] = ()
    """Values that change nothing and are accepted; null always is."""
    instead: str = ""
    """What to send or do instead, if there is an alternative."""


@dataclass(frozen=True)
class Hint:
    """The field does not change the form or the meaning of the answer; any value is accepted."""

    why: str


_OTHERS_OFF = "only used by a field that is refused"
_NO_REASONING = "the models served here produce no reasoning"
_SCHEDULING = "the scheduler and the prefix cache decide; answers do not change"
_NOTHING_KEPT = "nothing is stored or reported"

OPENAI: dict[str, Refused | Hint] = {
    "audio": Refused(),
    "best_of": Refused((1,), "use n for several answers"),
    "function_call": Refused(("none", "auto"), "use tool_choice"),
    "functions": Refused(([],), "use tools"),
    "metadata": Hint(_NOTHING_KEPT),
    "modalities": Refused((["text"],)),
    "parallel_tool_calls": Hint("completions have no tools"),
    "prediction": Hint("only a performance hint"),
    "prompt_cache_key": Hint(_SCHEDULING),
    "prompt_cache_retention": Hint(_SCHEDULING),
    "reasoning_effort": Hint("only used by chat templates, which completions do not have"),
    "safety_identifier": Hint(_NOTHING_KEPT),
    "service_tier": Hint("there is one tier; priority orders requests"),
    "store": Hint(_NOTHING_KEPT),
    "suffix": Refused(("",), "write the model's fill-in-the-middle tokens into prompt"),
    "user": Hint(_NOTHING_KEPT),
    "verbosity": Hint("only affects models trained on it"),
    "web_search_options": Refused(),
    # served for chats; completions do not take them
    "tool_choice": Refused(("none", "auto"), "use /v1/chat/completions"),
    "tools": Refused(([],), "use /v1/chat/completions"),
    "top_logprobs": Refused((0,), "for completions, logprobs is the number"),
}
VLLM: dict[str, Refused | Hint] = {
    "allowed_token_ids": Refused(([],), "use structured_outputs, or logit_bias"),
    "bad_words": Refused(([],), "use logit_bias"),
    "chat_template": Refused((), "render the conversation and use /v1/completions"),
    "detokenize": Refused((True,), "return_token_ids adds the token ids"),
    "documents": Refused(([],), "write them into a message"),
    "early_stopping": Refused((False,)),
    "ec_transfer_params": Refused(({},)),
    "guided_decoding_backend": Hint("there is one: llguidance"),
    "guided_whitespace_pattern": Refused((), 'put {"whitespace_pattern": ...} under "x-guidance" into the schema'),
    "include_reasoning": Refused((True,)),
    "kv_transfer_params": Refused(({},)),
    "length_penalty": Refused((1,)),
    "logits_processors": Refused(([],), "use logit_bias"),
    "logprob_token_ids": Refused(([],), "use logprobs or top_logprobs"),
    "media_io_kwargs": Hint("messages contain only text"),
    "mm_processor_kwargs": Hint("messages contain only text"),
    "prompt_embeds": Refused(([],)),
    "prompt_logprobs": Refused(),
    "repetition_detection": Refused((), "use repetition_penalty or max_tokens"),
    "request_id": Hint("the server assigns ids, also sent as the header X-Request-Id"),
    "return_mm_kwargs": Hint("messages contain only text"),
    "return_prompt_text": Refused((False,), "use /tokenize with return_token_strs"),
    "return_token_offsets": Refused((False,), "use /tokenize with return_token_strs"),
    "return_tokens_as_token_ids": Refused((False,), "return_token_ids adds the token ids"),
    "routed_experts_prompt_start": Refused((0,)),
    "session_id": Hint(_SCHEDULING),
    "spaces_between_special_tokens": Refused((True,)),
    "stream_interval": Hint("only affects how tokens are split into chunks"),
    "structural_tag": Refused((), "use structured_outputs.grammar"),
    "thinking_token_budget": Hint(_NO_REASONING),
    "truncate_prompt_tokens": Refused((), "truncate the prompt before sending it"),
    "truncation_side": Hint(_OTHERS_OFF),
    "use_beam_search": Refused((False,), "use n for several answers"),
    "vllm_xargs": Refused(({},)),
    "watermarking": Refused((False,)),
}
LLAMA_CPP: dict[str, Refused | Hint] = {
    "adaptive_decay": Hint(_OTHERS_OFF),
    "adaptive_target": Refused((-1,)),
    "backend_sampling": Hint("where sampling runs does not change its result"),
    "cache_prompt": Hint(_SCHEDULING),
    "dry_allowed_length": Hint(_OTHERS_OFF),
    "dry_base": Hint(_OTHERS_OFF),
    "dry_multiplier": Refused((0,), "use repetition_penalty"),
    "dry_penalty_last_n": Hint(_OTHERS_OFF),
    "dry_sequence_breakers": Hint(_OTHERS_OFF),
    "dynatemp_exponent": Hint(_OTHERS_OFF),
    "dynatemp_range": Refused((0,), "use temperature"),
    "grammar_lazy": Refused((False,), "use tools"),
    "grammar_triggers": Refused(([],), "use tools"),
    "id_slot": Hint(_SCHEDULING),
    "image_data": Refused(([],)),
    "lora": Refused(([],)),
    "min_keep": Refused((0,)),
    "mirostat": Refused((0,), "use temperature, top_p or min_p"),
    "mirostat_eta": Hint(_OTHERS_OFF),
    "mirostat_tau": Hint(_OTHERS_OFF),
    "n_cache_reuse": Hint(_SCHEDULING),
    "n_cmpl": Refused((1,), "use n"),
    "n_discard": Hint("requests that exceed the context length are refused, never truncated"),
    "n_indent": Refused((0,), "use structured_outputs.regex"),
    "n_keep": Hint("requests that exceed the context length are refused, never truncated"),
    "parse_tool_calls": Refused((True,), 'tool_choice "none" returns the text unchanged'),
    "penalize_nl": Refused((False,), "use logit_bias"),
    "post_sampling_probs": Refused((False,)),
    "preserved_tokens": Refused(([],), "use skip_special_tokens false to return all tokens"),
    "reasoning_budget_tokens": Hint(_NO_REASONING),
    "reasoning_format": Refused(("none", "auto")),
    "response_fields": Refused(([],)),
    "return_progress": Refused((False,), "timings are in the last chunk"),
    "return_tokens": Refused((False,), "use return_token_ids"),
    "samplers": Refused(),
    "speculative.n_max": Hint("speculation does not change answers"),
    "speculative.n_min": Hint("speculation does not change answers"),
    "speculative.p_min": Hint("speculation does not change answers"),
    "sse_ping_interval": Hint("comments in a stream are not part of the answer"),
    "system_prompt": Refused(("",), "send a message with the role system"),
    "t_max_predict_ms": Refused((-1, 0), "timeout_s limits the whole answer"),
    "t_max_prompt_ms": Refused((-1, 0), "timeout_s limits the whole answer"),
    "tfs_z": Refused((1,), "use top_p or min_p"),
    "thinking_budget_tokens": Hint(_NO_REASONING),
    "timings_per_token": Hint("timings are in the last chunk"),
    "top_n_sigma": Refused((-1, 0), "use top_p or min_p"),
    "typical_p": Refused((1,), "use top_p or min_p"),
    "verbose": Refused((False,), "use GET /v1/requests/ID"),
    "xtc_probability": Refused((0,), "use top_p or min_p"),
    "xtc_threshold": Hint(_OTHERS_OFF),
}
OLLAMA_AND_OTHERS: dict[str, Refused | Hint] = {
    "_debug_render_only": Refused((False,), "use /tokenize"),
    "context": Refused(([],), "send the whole conversation"),
    "ebnf": Refused((), "use grammar or guided_grammar"),
    "enable_thinking": Refused((False,), "use reasoning_effort or chat_template_kwargs"),
    "format": Refused(("",), "use response_format"),
    "images": Refused(([],)),
    "keep_alive": Hint("the model stays loaded until the server stops"),
    "no_stop_trim": Refused((False,), "use include_stop_str_in_output"),
    "num_ctx": Hint("the server's --max-model-len sets the context length; longer requests are refused"),
    "options": Refused(({},), "send each option as a field, by its OpenAI name"),
    "raw": Refused((False,), "use /v1/completions"),
    "reasoning": Hint("only used by chat templates, which completions do not have"),
    "regex": Refused((), "use guided_regex"),
    "stop_regex": Refused(([], ""), "use stop"),
    "system": Refused(("",), "send a message with the role system"),
    "template": Refused(("",), "render the conversation and use /v1/completions"),
    "think": Refused((False,), "use reasoning_effort"),
}
ORIGINS = {"OpenAI": OPENAI, "vLLM": VLLM, "llama.cpp": LLAMA_CPP, "Ollama and others": OLLAMA_AND_OTHERS}
KNOWN = {name: field for fields in ORIGINS.values() for name, field in fields.items()}
"""All of them by name. Endpoints take the fields that they support before looking here."""


class Fields:
    """The fields of a body; null counts as absent. Each field can be taken once; `rest` checks what was not taken."""

    def __init__(self, body: object) -> None:
        if not isinstance(body, Mapping):
            raise ApiError(f"the body is {shown(body)}; it has to be a JSON object")
        self._left = {name: value for name, value in body.items() if value is not None}

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def take(self, name: str, default: Any = None) -> Any:
        return self._left.pop(name, default)

    def take_all(self, names: tuple[str, ...]) -> dict[str, Any]:
        """The fields in `names` that are present."""
        return {name: self._left.pop(name) for name in names if name in self._left}

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise ApiError(f"{name} is {shown(value)}; it has to be true or false", param=name)
        return value

    def add_unknown(self, name: str) -> None:
        """Reports an unknown member of a field, under this name, in `rest`."""
        self._left[name] = True

    def rest(self) -> tuple[str, ...]:
        """Names of unknown fields. Raises `ApiError` if a field is left that would change the answer."""
        for name, value in self._left.items():
            known = KNOWN.get(name)
            if isinstance(known, Refused) and value not in known.allowed:
                raise _refusal(name, value, known)
        return tuple(sorted(self._left.keys() - KNOWN.keys()))


def _refusal(name: str, value: object, known: Refused) -> ApiError:
    allowed = " or ".join(map(shown, known.allowed))
    only = f", only {allowed}" if allowed else ""
    instead = f"; {known.instead}" if known.instead else ""
    return ApiError(f"{name} is {shown(value)}; {name} is not supported here{only}{instead}", param=name)
