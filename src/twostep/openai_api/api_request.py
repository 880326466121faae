"""Reads the bodies of `/v1/chat/completions` and `/v1/completions` into requests for the engine."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Literal

from twostep.engine.params import SamplingParams
from twostep.engine.refusals import shown
from twostep.errors import TwostepError
from twostep.kernels.sampling import MAX_LOGPROBS, check_integer, check_real
from twostep.model.loaded import LoadedModel
from twostep.openai_api.api_error import ApiError, refusal
from twostep.openai_api.fields import Fields
from twostep.openai_api.prompt_tokens import PromptBounds, Tokens, chat_prompt, completion_prompts
from twostep.openai_api.response_format import read_structured
from twostep.openai_api.tools import read_tools

COMPLETION_MAX_TOKENS = 16
"""Default of `/v1/completions`, as in OpenAI's API and in vLLM."""


class StreamedUsage(Enum):
    """Which chunks of a stream have token counts."""

    NO = "none"
    LAST = "a chunk of its own after the answers"
    EACH = "every chunk, so far, and a chunk after the answers"


LONGEST_TIMEOUT_S = 86400
REPETITION_PENALTIES = 0.01, 100.0
"""Minimum and maximum."""

_PASSED_ON = (
    "frequency_penalty", "ignore_eos", "include_stop_str_in_output", "min_p", "min_tokens", "n", "presence_penalty",
    "seed", "skip_special_tokens", "stop", "stop_token_ids", "temperature", "top_k", "top_p",
)  # fmt: skip
"""Fields with the same meaning in `SamplingParams`, which checks them."""


@dataclass(frozen=True)
class ApiRequest:
    """One request, parsed. The engine gets each prompt with `params`; the other fields shape the reply."""

    kind: Literal["chat", "completion"]
    model: str
    """The name in the body."""
    prompts: tuple[Tokens, ...]
    params: SamplingParams
    priority: int
    stream: bool
    echo: bool
    """Whether the answer's text begins with the prompt."""
    return_token_ids: bool
    unknown: tuple[str, ...]
    """Names of unknown fields, which were ignored; for the log."""
    usage: StreamedUsage = StreamedUsage.NO
    cache_salt: str = ""
    """Requests share prefix-cache entries only if they have the same salt."""
    functions: tuple[str, ...] = ()
    """Names of functions that the answer may call: see `tool_calls.ToolStream`."""
    timeout_s: float | None = None
    """Time limit for the whole answer, from the request's arrival."""
    form_field: str = ""
    """The field of the body that constrains the answer's form, if one does."""


def read_request(
    endpoint: str, body: object, model: LoadedModel, names: Sequence[str], bounds: PromptBounds | None = None
) -> ApiRequest:
    """Parses `body`, a decoded JSON value, as a request to an endpoint in `ENDPOINTS`.

    `names` are the names of the served model; the first is the default. The engine checks whether the prompt fits the
    context; prompts beyond `bounds`, which cannot fit, are refused before they are tokenized. Raises `ApiError`, which
    names the field, its value and what is allowed.
    """
    try:
        fields = Fields(body)
        name = model_name(fields, names)
        return ENDPOINTS[endpoint](fields, model, name, bounds)
    except TwostepError as error:
        raise refusal(error) from None
    except RecursionError:
        raise ApiError("the body is nested too deeply") from None


def _chat(fields: Fields, model: LoadedModel, name: str, bounds: PromptBounds | None) -> ApiRequest:
    _refuse_misplaced(fields, "prompt", "/v1/completions")
    tools, wanted = read_tools(fields), read_structured(fields)
    prompt = chat_prompt(fields, model, tools, bounds.check_text if bounds else None)
    extent = {
        "max_tokens": _max_tokens(fields, None),
        "logprobs": _logprobs(fields, _chat_logprobs),
        "structured": tools.form(wanted.form) if tools else wanted.form,
    }
    request = _request("chat", fields, name, (prompt,), extent, echo=False)
    return replace(request, functions=tools.names if tools else (), form_field=wanted.field or "tools")


def _completion(fields: Fields, model: LoadedModel, name: str, bounds: PromptBounds | None) -> ApiRequest:
    _refuse_misplaced(fields, "messages", "/v1/chat/completions")
    prompts, wanted = completion_prompts(fields, model.tokenizer, bounds), read_structured(fields)
    extent = {
        "max_tokens": _max_tokens(fields, COMPLETION_MAX_TOKENS),
        "logprobs": _logprobs(fields, lambda left: left.take("logprobs")),
        "structured": wanted.form,
    }
    echo = fields.flag("echo")
    if echo and extent["logprobs"] is not None:
        raise ApiError("echo and logprobs are both set; prompts have no log-probabilities here", param="echo")
    return replace(_request("completion", fields, name, prompts, extent, echo), form_field=wanted.field)


ENDPOINTS: dict[str, Callable[[Fields, LoadedModel, str, PromptBounds | None], ApiRequest]] = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _completion,
}
"""By path."""


def _request(
    kind: Literal["chat", "completion"],
    fields: Fields,
    name: str,
    prompts: tuple[Tokens, ...],
    extent: Mapping[str, Any],
    echo: bool,
) -> ApiRequest:
    """The part that both endpoints share."""
    bias = _logit_bias(fields.take("logit_bias", {}))
    sampling = {"logit_bias": bias, "repetition_penalty": _repetition_penalty(fields)}
    return ApiRequest(
        kind=kind,
        model=name,
        prompts=prompts,
        params=SamplingParams(**sampling, **extent, **fields.take_all(_PASSED_ON)),
        priority=_priority(fields.take("priority", 0)),
        stream=(stream := fields.flag("stream")),
        echo=echo,
        return_token_ids=fields.flag("return_token_ids"),
        usage=_streamed_usage(fields, stream),
        cache_salt=_cache_salt(fields.take("cache_salt", "")),
        timeout_s=_timeout_s(fields.take("timeout_s")),
        unknown=fields.rest(),
    )


def model_name(fields: Fields, names: Sequence[str]) -> str:
    """The model's name in the body, or its default. Raises `ApiError` with status 404 for an unknown name."""
    name = fields.take("model", names[0])
    if name in names:
        return str(name)
    served = " or ".join(repr(name) for name in names)
    problem = f"the model {shown(name)} is not served here; available: {served}"
    raise ApiError(problem, status=404, param="model", code="model_not_found")


def _refuse_misplaced(fields: Fields, name: str, path: str) -> None:
    if name in fields:
        raise ApiError(f"{name} is not a field of this endpoint; use {path}", param=name)


_MAX_TOKENS = "max_tokens", "max_completion_tokens", "n_predict"
"""Synonyms at both endpoints: OpenAI's older and newer name, and llama.cpp's, where -1 means no limit."""


def _max_tokens(fields: Fields, default: int | None) -> int | None:
    present = list(fields.take_all(_MAX_TOKENS).items())
    if not present:
        return default
    (name, value), *others = present
    for other, differs in others:
        if differs != value:
            problem = f"{name} is {shown(value)} and {other} is {shown(differs)}; they mean the same, send one"
            raise ApiError(problem, param=name)
    if name == "n_predict" and value == -1:
        return None
    check_integer(name, value, 1, None)
    return int(value)


def _logprobs(fields: Fields, read: Callable[[Fields], Any]) -> Any:
    """The value of the endpoint's own fields, which `read` reads, or of llama.cpp's `n_probs`, where 0 means off."""
    number = fields.take("n_probs", 0)
    check_integer("n_probs", number, 0, MAX_LOGPROBS)
    if number and ("logprobs" in fields or "top_logprobs" in fields):
        raise ApiError("n_probs and logprobs are both set; they mean the same, send one", param="n_probs")
    return number or read(fields)


def _chat_logprobs(fields: Fields) -> Any:
    """None: off. 0: only the sampled tokens."""
    wanted, top = fields.flag("logprobs"), fields.take("top_logprobs")
    if top is None:
        return 0 if wanted else None
    if not wanted:
        raise ApiError(f"top_logprobs is {shown(top)}; it requires logprobs to be true", param="top_logprobs")
    check_integer("top_logprobs", top, 0, MAX_LOGPROBS)
    return top


def _streamed_usage(body: Fields, stream: bool) -> StreamedUsage:
    options = body.take("stream_options")
    if options is None:
        return StreamedUsage.NO
    if not stream or not isinstance(options, Mapping):
        allowed = "an object" if stream else "absent where stream is not true"
        raise ApiError(f"stream_options is {shown(options)}; it has to be {allowed}", param="stream_options")
    fields = Fields(options)
    last, each = fields.flag("include_usage"), fields.flag("continuous_usage_stats")
    fields.flag("include_obfuscation")  # padding against traffic analysis; OpenAI permits leaving it out
    for unknown in fields.rest():
        body.add_unknown(f"stream_options.{unknown}")
    if each and not last:
        problem = "stream_options has continuous_usage_stats; it requires include_usage to be true"
        raise ApiError(problem, param="stream_options")
    return StreamedUsage.EACH if each else StreamedUsage.LAST if last else StreamedUsage.NO


def _timeout_s(timeout_s: Any) -> float | None:
    if timeout_s is None:
        return None
    check_real("timeout_s", timeout_s, 0, LONGEST_TIMEOUT_S, open_below=True)
    return float(timeout_s)


def _cache_salt(salt: object) -> str:
    if not isinstance(salt, str) or not salt.isprintable():
        raise ApiError(f"cache_salt is {shown(salt)}; it has to be printable text", param="cache_salt")
    return salt


def _repetition_penalty(fields: Fields) -> Any:
    """By vLLM's name or llama.cpp's. The range is smaller than the kernels': outside it logits may overflow float32."""
    own, other = fields.take("repetition_penalty"), _repeat_penalty(fields)
    if own is not None and other is not None and own != other:
        problem = f"repetition_penalty is {shown(own)} and repeat_penalty is {shown(other)}; send one of them"
        raise ApiError(problem, param="repetition_penalty")
    if own is not None:
        check_real("repetition_penalty", own, *REPETITION_PENALTIES)
    return other or 1.0 if own is None else own


def _repeat_penalty(fields: Fields) -> Any:
    """llama.cpp's, which counts only the last tokens: 0 for none and -1 for all, the two supported values."""
    penalty, last = fields.take("repeat_penalty"), fields.take("repeat_last_n")
    if penalty is not None:
        check_real("repeat_penalty", penalty, *REPETITION_PENALTIES)
    if last is not None:
        check_integer("repeat_last_n", last, -1, None)
    if penalty is None or penalty == 1 or last == 0:
        return None
    if last not in (None, -1):
        problem = f"repeat_last_n is {last}; repeat_penalty counts all tokens of prompt and answer here, send -1"
        raise ApiError(problem, param="repeat_last_n")
    return penalty


def _logit_bias(bias: object) -> dict[int, Any]:
    """JSON object keys are strings; they are converted to token ids."""
    if not isinstance(bias, Mapping):
        problem = f"logit_bias is {shown(bias)}; it has to be an object that maps token ids to numbers"
        raise ApiError(problem, param="logit_bias")
    for key in bias:
        if not re.fullmatch("0|[1-9][0-9]{0,9}", key):
            raise ApiError(f"logit_bias has {shown(key)}; keys have to be token ids", param="logit_bias")
    return {int(key): value for key, value in bias.items()}


def _priority(priority: object) -> int:
    check_integer("priority", priority, -(2**31), 2**31 - 1)
    assert isinstance(priority, int)
    return priority
