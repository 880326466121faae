"""Finished requests to the bodies of replies that are not streamed."""

from collections.abc import Sequence
from typing import Any

from twostep.engine.outputs import ChoiceOutput, RequestOutput
from twostep.engine.text.packed_logprobs import PackedLogprobs, TokenLogprobs
from twostep.model.tokenizer import Tokenizer
from twostep.openai_api.errors import ApiError
from twostep.openai_api.json_text import Many, plain
from twostep.openai_api.logprobs import chat_logprobs, completion_logprobs, text_offsets
from twostep.openai_api.requests import ApiRequest
from twostep.openai_api.timings import timings
from twostep.openai_api.tool_calls import call_prefix, finish_reason, parse_tool_calls

ID_PREFIX = {"chat": "chatcmpl-", "completion": "cmpl-"}
OBJECT = {"chat": "chat.completion", "completion": "text_completion"}


def response_body(
    request: ApiRequest,
    outputs: Sequence[RequestOutput],
    tokenizer: Tokenizer,
    *,
    unique: str,
    created_s: int,
    received_ns: int | None = None,
) -> dict[str, Any]:
    """`sliced_body` with lists in place of each `Many`. Raises `ApiError`."""
    body = sliced_body(request, outputs, tokenizer, unique=unique, created_s=created_s, received_ns=received_ns)
    made: dict[str, Any] = plain(body)
    return made


def sliced_body(
    request: ApiRequest,
    outputs: Sequence[RequestOutput],
    tokenizer: Tokenizer,
    *,
    unique: str,
    created_s: int,
    received_ns: int | None = None,
) -> dict[str, Any]:
    """The reply to `request`, its long lists as `Many`; `outputs` are those of its prompts, in their order. `unique`
    makes the reply's id. `received_ns` as in `timings`.

    Raises `ApiError` with status 500 if an answer did not come to its end.
    """
    for choice in (choice for output in outputs for choice in output.choices):
        if choice.finish_reason in ("error", "abort"):
            raise ApiError(choice.error or "the request was aborted", status=500)
    return {
        "id": ID_PREFIX[request.kind] + unique,
        "object": OBJECT[request.kind],
        "created": created_s,
        "model": request.model,
        "choices": Many(
            _choice(request, output, choice, tokenizer, unique, number * request.params.n + choice.index)
            for number, output in enumerate(outputs)
            for choice in output.choices
        ),
        "usage": usage(outputs),
        "timings": timings(outputs, received_ns),
    }


def usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Tokens of a reply. A prompt counts once, however many answers it got."""
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    completion_tokens = sum(output.output_tokens for output in outputs)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(output.cached_tokens for output in outputs)},
    }


def _choice(
    request: ApiRequest, output: RequestOutput, choice: ChoiceOutput, tokenizer: Tokenizer, unique: str, index: int
) -> dict[str, Any]:
    if request.kind == "chat":
        form = _chat_choice(request, choice, tokenizer, call_prefix(unique, index))
    else:
        form = _completion_choice(request, output, choice, tokenizer)
    body = {"index": index, "finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason, **form}
    if request.return_token_ids:
        body |= {"prompt_token_ids": list(output.prompt_token_ids), "token_ids": list(choice.token_ids)}
    return body


def _chat_choice(request: ApiRequest, choice: ChoiceOutput, tokenizer: Tokenizer, id_prefix: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
    reason: str = choice.finish_reason
    if request.functions:
        parsed = parse_tool_calls(choice.text, id_prefix, request.functions)
        message |= {"content": parsed.content} | ({"tool_calls": parsed.tool_calls} if parsed.tool_calls else {})
        reason = finish_reason(reason, len(parsed.tool_calls))
    entries = _shown(request, choice, tokenizer)
    logprobs = None if entries is None else chat_logprobs(entries, tokenizer)
    return {"message": message, "logprobs": logprobs, "finish_reason": reason}


def _completion_choice(
    request: ApiRequest, output: RequestOutput, choice: ChoiceOutput, tokenizer: Tokenizer
) -> dict[str, Any]:
    skip_special = request.params.skip_special_tokens
    prompt = tokenizer.decode(output.prompt_token_ids, skip_special=skip_special) if request.echo else ""
    entries, logprobs = _shown(request, choice, tokenizer), None
    if entries is not None:
        logprobs = completion_logprobs(entries, text_offsets(entries, tokenizer, skip_special), tokenizer)
    return {"text": prompt + choice.text, "logprobs": logprobs}


def _shown(request: ApiRequest, choice: ChoiceOutput, tokenizer: Tokenizer) -> Sequence[TokenLogprobs] | None:
    """The log-probabilities of those tokens that the text has: none that begins in a stop string or after it, as in
    `ShownTokens`. None where none were asked for."""
    entries = choice.logprobs
    if entries is None or not isinstance(choice.stop_reason, str):
        return entries
    offsets = text_offsets(entries, tokenizer, request.params.skip_special_tokens)
    count = sum(offset < len(choice.text) for offset in offsets)
    return entries.truncated(count) if isinstance(entries, PackedLogprobs) else entries[:count]
