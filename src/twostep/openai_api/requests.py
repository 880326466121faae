"""Bodies of `/v1/chat/completions` and `/v1/completions` to what the engine is asked."""

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
from twostep.openai_api.errors import ApiError, refusal
from twostep.openai_api.fields import Fields
from twostep.openai_api.prompts import Tokens, chat_prompt, completion_prompts
from twostep.openai_api.room import Room
from twostep.openai_api.structured import read_structured
from twostep.openai_api.tools import read_tools

COMPLETION_MAX_TOKENS = 16
"""What `/v1/completions` gives if a body does not say, in OpenAI's API and in vLLM."""


class StreamedUsage(Enum):
    """Which chunks of a stream count tokens."""

    NO = "none"
    LAST = "one of its own, after the answers"
    EACH = "that, and so far in every one"


LONGEST_TIMEOUT_S = 86400
REPETITION_PENALTIES = 0.01, 100.0
"""The least and the most."""

_AS_THEY_ARE = (
    "frequency_penalty", "ignore_eos", "include_stop_str_in_output", "min_p", "min_tokens", "n", "presence_penalty",
    "seed", "skip_special_tokens", "stop", "stop_token_ids", "temperature", "top_k", "top_p",
)  # fmt: skip
"""Fields that mean what `SamplingParams` means by them, which checks them."""


@dataclass(frozen=True)
class ApiRequest:
    """One body understood. The engine gets each prompt with `params`; the rest is for the answer."""

    kind: Literal["chat", "completion"]
    model: str
    """As the body named it."""
    prompts: tuple[Tokens, ...]
    params: SamplingParams
    priority: int
    stream: bool
    echo: bool
    """The answer's text begins with the prompt's."""
    return_token_ids: bool
    unknown: tuple[str, ...]
    """Fields that were ignored since nobody knows them, for whoever keeps a log."""
    usage: StreamedUsage = StreamedUsage.NO
    cache_salt: str = ""
    """Requests find KV in the prefix cache only of those that had the same."""
    functions: tuple[str, ...] = ()
    """Names of those that answers may call: see `tool_calls.ToolStream`."""
    timeout_s: float | None = None
    """The answer has to be whole within this time of the request's arrival."""
    form_field: str = ""
    """The body's field that asks for a form of the answer, if one does."""


def read_request(
    endpoint: str, body: object, model: LoadedModel, names: Sequence[str], room: Room | None = None
) -> ApiRequest:
    """The request that `body`, JSON as Python's objects, makes of an endpoint in `ENDPOINTS`.

    `names` are those of the served model, the first for bodies that name none. Whether the prompt fits the context is
    the engine's to say; what is far beyond, as `room` tells, is refused before it is tokenised. Raises `ApiError` that
    names the field, its value and what is allowed.
    """
    try:
        fields = Fields(body)
        name = model_name(fields, names)
        return ENDPOINTS[endpoint](fields, model, name, room)
    except TwostepError as error:
        raise refusal(error) from None
    except RecursionError:
        raise ApiError("the body is nested too deeply") from None


def _chat(fields: Fields, model: LoadedModel, name: str, room: Room | None) -> ApiRequest:
    _refuse_misplaced(fields, "prompt", "/v1/completions")
    tools, asked = read_tools(fields), read_structured(fields)
    prompt = chat_prompt(fields, model, tools, room.check_text if room else None)
    extent = {
        "max_tokens": _max_tokens(fields, None),
        "logprobs": _logprobs(fields, _chat_logprobs),
        "structured": tools.form(asked.form) if tools else asked.form,
    }
    request = _request("chat", fields, name, (prompt,), extent, echo=False)
    return replace(request, functions=tools.names if tools else (), form_field=asked.field or "tools")


def _completion(fields: Fields, model: LoadedModel, name: str, room: Room | None) -> ApiRequest:
    _refuse_misplaced(fields, "messages", "/v1/chat/completions")
    prompts, asked = completion_prompts(fields, model.tokenizer, room), read_structured(fields)
    extent = {
        "max_tokens": _max_tokens(fields, COMPLETION_MAX_TOKENS),
        "logprobs": _logprobs(fields, lambda left: left.take("logprobs")),
        "structured": asked.form,
    }
    echo = fields.flag("echo")
    if echo and extent["logprobs"] is not None:
        raise ApiError("echo is true and logprobs given; log-probabilities of prompts are not supported", param="echo")
    return replace(_request("completion", fields, name, prompts, extent, echo), form_field=asked.field)


ENDPOINTS: dict[str, Callable[[Fields, LoadedModel, str, Room | None], ApiRequest]] = {
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
    """What both endpoints have in common."""
    bias = _logit_bias(fields.take("logit_bias", {}))
    sampling = {"logit_bias": bias, "repetition_penalty": _repetition_penalty(fields)}
    return ApiRequest(
        kind=kind,
        model=name,
        prompts=prompts,
        params=SamplingParams(**sampling, **extent, **fields.take_all(_AS_THEY_ARE)),
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
    """As the body names it; it may name none. Raises `ApiError` with status 404 for another than is served."""
    name = fields.take("model", names[0])
    if name in names:
        return str(name)
    served = " or ".join(repr(name) for name in names)
    problem = f"the model {shown(name)} is not served here; this is {served}"
    raise ApiError(problem, status=404, param="model", code="model_not_found")


def _refuse_misplaced(fields: Fields, name: str, path: str) -> None:
    if name in fields:
        raise ApiError(f"{name} is given; it belongs to {path}", param=name)


_MAX_TOKENS = "max_tokens", "max_completion_tokens", "n_predict"
"""Names of the same, also in completions: OpenAI's older and newer, and llama.cpp's, where -1 is no limit."""


def _max_tokens(fields: Fields, default: int | None) -> int | None:
    given = list(fields.take_all(_MAX_TOKENS).items())
    if not given:
        return default
    (name, value), *others = given
    for other, differs in others:
        if differs != value:
            problem = f"{name} is {shown(value)}, {other} {shown(differs)}; they mean the same, give one"
            raise ApiError(problem, param=name)
    if name == "n_predict" and value == -1:
        return None
    check_integer(name, value, 1, None)
    return int(value)


def _logprobs(fields: Fields, read: Callable[[Fields], Any]) -> Any:
    """What the endpoint's own fields say, which `read` reads, or llama.cpp's `n_probs`, where 0 is off."""
    number = fields.take("n_probs", 0)
    check_integer("n_probs", number, 0, MAX_LOGPROBS)
    if number and ("logprobs" in fields or "top_logprobs" in fields):
        raise ApiError("n_probs and logprobs mean the same, give one", param="n_probs")
    return number or read(fields)


def _chat_logprobs(fields: Fields) -> Any:
    """None is off; 0 is not: it asks for the chosen tokens alone."""
    wanted, top = fields.flag("logprobs"), fields.take("top_logprobs")
    if top is None:
        return 0 if wanted else None
    if not wanted:
        raise ApiError(f"top_logprobs is {shown(top)}; it needs logprobs to be true", param="top_logprobs")
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
    fields.flag("include_obfuscation")  # padding against listeners, which OpenAI allows to be left out
    for unknown in fields.rest():
        body.leave(f"stream_options.{unknown}")
    if each and not last:
        problem = "stream_options has continuous_usage_stats; that needs include_usage to be true"
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
    """By vLLM's name or llama.cpp's. With what the kernels allow beyond it logits may leave the range of float32."""
    own, other = fields.take("repetition_penalty"), _repeat_penalty(fields)
    if own is not None and other is not None and own != other:
        problem = f"repetition_penalty is {shown(own)}, repeat_penalty {shown(other)}; they mean the same, give one"
        raise ApiError(problem, param="repetition_penalty")
    if own is not None:
        check_real("repetition_penalty", own, *REPETITION_PENALTIES)
    return other or 1.0 if own is None else own


def _repeat_penalty(fields: Fields) -> Any:
    """llama.cpp's, which counts the last tokens only: none for 0 and all for -1, as is done here."""
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
    """JSON's keys are strings."""
    if not isinstance(bias, Mapping):
        problem = f"logit_bias is {shown(bias)}; it has to be an object of token ids and numbers"
        raise ApiError(problem, param="logit_bias")
    for key in bias:
        if not re.fullmatch("0|[1-9][0-9]{0,9}", key):
            raise ApiError(f"logit_bias has {shown(key)}; keys have to be token ids", param="logit_bias")
    return {int(key): value for key, value in bias.items()}


def _priority(priority: object) -> int:
    check_integer("priority", priority, -(2**31), 2**31 - 1)
    assert isinstance(priority, int)
    return priority
