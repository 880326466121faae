"""Bodies of replies: whole, or streamed as server-sent events of which each encodes only what is new."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twostep.engine.outputs import ChoiceOutput, Delta, RequestOutput, Timeline
from twostep.engine.text.packed_logprobs import PackedLogprobs, TokenLogprobs
from twostep.model.tokenizer import Tokenizer
from twostep.openai_api.api_error import ApiError
from twostep.openai_api.api_request import ApiRequest, StreamedUsage
from twostep.openai_api.json_text import Many, encode, plain
from twostep.openai_api.logprobs_format import (
    PlacedToken,
    ShownTokens,
    chat_logprobs,
    completion_logprobs,
    text_offsets,
)
from twostep.openai_api.tool_calls import ToolStream, call_prefix, finish_reason, parse_tool_calls

ID_PREFIX = {"chat": "chatcmpl-", "completion": "cmpl-"}
OBJECT = {"chat": "chat.completion", "completion": "text_completion"}
CHUNK_OBJECT = {"chat": "chat.completion.chunk", "completion": "text_completion"}
FAILED = ("error", "abort")
"""Finish reasons of choices that did not complete."""
DONE = b"data: [DONE]\n\n"
"""The last event of every stream."""

# --- whole replies ----------------------------------------------------------------------------------------------------


def response_body(
    request: ApiRequest,
    outputs: Sequence[RequestOutput],
    tokenizer: Tokenizer,
    *,
    unique: str,
    created_s: int,
    received_ns: int | None = None,
) -> dict[str, Any]:
    """`sliced_body` with a list in place of each `Many`. Raises `ApiError`."""
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
    """The reply to `request`, its long lists as `Many`. `outputs` are those of its prompts, in order; `unique`
    completes the reply's id; `received_ns`: see `timings`.

    Raises `ApiError` with status 500 if a choice did not complete.
    """
    for choice in (choice for output in outputs for choice in output.choices):
        if choice.finish_reason in FAILED:
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
    """Token counts of a reply. A prompt counts once, whatever its number of choices."""
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
    """Log-probabilities of the tokens visible in the text: none that begins in a stop string or after it, as in
    `ShownTokens`. None if they were not requested."""
    entries = choice.logprobs
    if entries is None or not isinstance(choice.stop_reason, str):
        return entries
    offsets = text_offsets(entries, tokenizer, request.params.skip_special_tokens)
    count = sum(offset < len(choice.text) for offset in offsets)
    return entries.truncated(count) if isinstance(entries, PackedLogprobs) else entries[:count]


# --- timings ----------------------------------------------------------------------------------------------------------


def timings(outputs: Sequence[RequestOutput], received_ns: int | None = None) -> dict[str, Any]:
    """The times of a reply. Several choices count as one interval: from the first arrival, the first step and the
    first token of any choice to the last token of any choice.

    `received_ns`: when the server received the request, before its prompts arrived at the engine.

    `predicted_*` rates exclude the first token, which prefill computes; they are null if there is no other token.
    """
    lines = [choice.timeline for output in outputs for choice in output.choices]
    whole = _whole(lines, received_ns)
    prompt_n = sum(len(output.prompt_token_ids) for output in outputs)
    cached_n = sum(output.cached_tokens for output in outputs)
    return {
        "cache_n": cached_n,
        "cached_n": cached_n,
        **_prefill(whole, prompt_n - cached_n),
        **_decode(whole, sum(len(line.token_ns) for line in lines), sum(output.output_tokens for output in outputs)),
        "prefill_chunks": len({chunk.step for line in lines for chunk in line.chunks}),
        "preemptions": sum(len(line.preemptions) for line in lines),
    }


def _whole(lines: Sequence[Timeline], received_ns: int | None) -> Timeline:
    """One interval over all choices, with only its first and last token. It does not sort the tokens: 100 choices of
    2 500 tokens each would block the event loop."""
    scheduled = [line.first_scheduled_ns for line in lines if line.first_scheduled_ns is not None]
    begun = [line.token_ns for line in lines if line.token_ns]
    ends = (min(token_ns[0] for token_ns in begun), max(token_ns[-1] for token_ns in begun)) if begun else ()
    return Timeline(
        arrival_ns=min(line.arrival_ns for line in lines) if received_ns is None else received_ns,
        first_scheduled_ns=None if any(line.began_elsewhere for line in lines) else min(scheduled, default=None),
        token_ns=ends,
    )


def _prefill(line: Timeline, prompt_n: int) -> dict[str, Any]:
    return {
        "prompt_n": prompt_n,
        "prompt_ms": _ms(line.prefill_s),
        "prompt_per_token_ms": None if line.prefill_s is None or not prompt_n else 1000 * line.prefill_s / prompt_n,
        "prompt_per_second": prompt_n / line.prefill_s if line.prefill_s else None,
        "queue_ms": _ms(line.queue_s),
        "ttft_ms": _ms(line.ttft_s),
    }


def _decode(line: Timeline, token_n: int, predicted_n: int) -> dict[str, Any]:
    """`token_n`: tokens with a time stamp; the first one belongs to prefill."""
    span_s = (line.token_ns[-1] - line.token_ns[0]) / 1e9 if line.token_ns else None
    tpot_s = None if span_s is None or token_n < 2 else span_s / (token_n - 1)
    return {
        "predicted_n": predicted_n,
        "predicted_ms": _ms(span_s),
        "predicted_per_token_ms": _ms(tpot_s),
        "predicted_per_second": 1 / tpot_s if tpot_s else None,
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


# --- streams ----------------------------------------------------------------------------------------------------------


@dataclass
class _StreamedChoice:
    """What has been sent of one choice."""

    tokens: ShownTokens
    begun: bool = False
    ended: bool = False
    calls: ToolStream | None = None
    """Set when the request offers tools."""

    def pieces(self, text: str) -> list[dict[str, Any]]:
        """The message deltas for this text, one per chunk: at least one, which may be empty."""
        return [{"content": text}] if self.calls is None else self.calls.push(text) or [{}]


class Chunks:
    """Encodes the events of one reply. All chunks share one id and one creation time.

    `finish_reason` is set in the last chunk of each choice and null before. `timings` are in the last chunk of the
    stream: the usage chunk if usage was requested.
    """

    def __init__(
        self,
        request: ApiRequest,
        tokenizer: Tokenizer,
        *,
        unique: str,
        created_s: int,
        received_ns: int | None = None,
    ) -> None:
        """`unique` completes the reply's id. `received_ns`: see `timings`."""
        self._received_ns = received_ns
        self._request, self._tokenizer, self._unique = request, tokenizer, unique
        self._choices: dict[int, _StreamedChoice] = {}
        self._outputs: dict[int, RequestOutput] = {}
        self._sent_tokens = 0
        head = {
            "id": ID_PREFIX[request.kind] + unique,
            "object": CHUNK_OBJECT[request.kind],
            "created": created_s,
            "model": request.model,
        }
        self._head = f'data: {encode(head)[:-1]},"choices":['

    def delta(self, prompt: int, delta: Delta) -> bytes:
        """Returns the chunks for new output of a choice; empty if there is nothing to show. `prompt` is the index of
        the prompt. The first token of a choice always yields a chunk."""
        if delta.ended:
            return b"".join(map(self._chunk, self._end(prompt, delta.index, *delta.ended[:2])))
        choice = self._choice(prompt, delta.index)
        self._sent_tokens += len(delta.token_ids)
        piece, *more = choice.pieces(delta.text)
        tokens = choice.tokens.push(delta.logprobs, delta.text)
        shows_ids = delta.token_ids and self._request.return_token_ids
        if choice.begun and not (any(piece.values()) or tokens or shows_ids):
            return b""
        is_chat = self._request.kind == "chat"
        shown = self._chat(choice, piece) if is_chat else self._completion(choice, prompt, delta.text)
        shown["logprobs"] = self._logprobs(tokens)
        if self._request.return_token_ids:
            shown |= self._token_ids(choice, prompt, delta)
        choice.begun = True
        number = self._number(prompt, delta.index)
        first = self._chunk({"index": number, **shown, "finish_reason": None})
        return first + b"".join(self._chunk(_chat_piece(number, one)) for one in more)

    def finished(self, prompt: int, output: RequestOutput) -> bytes:
        """Returns the last chunks of a prompt's choices. Raises `ApiError` with status 500 if one did not complete."""
        self._outputs[prompt] = output
        for choice in output.choices:
            if choice.finish_reason in FAILED:
                raise ApiError(choice.error or "the request was aborted", status=500)
        is_last = len(self._outputs) == len(self._request.prompts) and self._request.usage is StreamedUsage.NO
        ends = (self._end(prompt, one.index, one.finish_reason, one.stop_reason) for one in output.choices)
        *early, last = [chunk for end in ends for chunk in end]
        return b"".join(map(self._chunk, early)) + self._chunk(last, self._timings() if is_last else {})

    def end(self) -> bytes:
        """Returns the usage chunk, if usage was requested, and the final `[DONE]` event."""
        if self._request.usage is StreamedUsage.NO:
            return DONE
        counted = {"usage": usage([*self._outputs.values()]), **self._timings()}
        return f"{self._head}],{encode(counted)[1:]}\n\n".encode() + DONE

    # --- chunks ---------------------------------------------------------------------------------------------------

    def _choice(self, prompt: int, index: int) -> _StreamedChoice:
        number = self._number(prompt, index)
        if number not in self._choices:
            tokens = ShownTokens(self._tokenizer, self._request.params.skip_special_tokens)
            functions = self._request.functions
            calls = ToolStream(call_prefix(self._unique, number), functions) if functions else None
            self._choices[number] = _StreamedChoice(tokens, calls=calls)
        return self._choices[number]

    def _number(self, prompt: int, index: int) -> int:
        return prompt * self._request.params.n + index

    def _chunk(self, choice: Mapping[str, Any], more: Mapping[str, Any] | None = None) -> bytes:
        tail = {**self._usage(), **(more or {})}
        rest = f",{encode(tail)[1:]}" if tail else "}"
        return f"{self._head}{encode(choice)}]{rest}\n\n".encode()

    def _chat(self, choice: _StreamedChoice, piece: Mapping[str, Any]) -> dict[str, Any]:
        role = {} if choice.begun else {"role": "assistant"}
        return {"delta": {**role, **piece}}

    def _completion(self, choice: _StreamedChoice, prompt: int, text: str) -> dict[str, Any]:
        echoed = self._prompt_text(prompt) if self._request.echo and not choice.begun else ""
        return {"text": echoed + text}

    def _logprobs(self, tokens: Sequence[PlacedToken]) -> dict[str, Any] | None:
        if not tokens:
            return None
        entries = [token.entry for token in tokens]
        if self._request.kind == "chat":
            made = chat_logprobs(entries, self._tokenizer)
        else:
            made = completion_logprobs(entries, (token.offset for token in tokens), self._tokenizer)
        shown: dict[str, Any] = plain(made)
        return shown

    def _token_ids(self, choice: _StreamedChoice, prompt: int, delta: Delta) -> dict[str, Any]:
        first = {} if choice.begun else {"prompt_token_ids": self._request.prompts[prompt]}
        return {**first, "token_ids": delta.token_ids}

    def _end(self, prompt: int, index: int, reason: str, stop: str | int | None) -> Iterator[dict[str, Any]]:
        """The last chunks of a choice, unless they were sent. A failed choice has none: see `finished`."""
        choice, number = self._choice(prompt, index), self._number(prompt, index)
        if choice.ended or reason in FAILED:
            return
        choice.ended = True
        nothing: dict[str, Any] = {"delta": {}} if self._request.kind == "chat" else {"text": ""}
        if calls := choice.calls:
            yield from (_chat_piece(number, piece) for piece in calls.finish())
            reason = finish_reason(reason, calls.calls)
        logprobs = self._logprobs(choice.tokens.end(stop))
        yield {"index": number, **nothing, "logprobs": logprobs, "finish_reason": reason, "stop_reason": stop}

    def _prompt_text(self, prompt: int) -> str:
        skip_special = self._request.params.skip_special_tokens
        return self._tokenizer.decode(self._request.prompts[prompt], skip_special=skip_special)

    def _usage(self) -> dict[str, Any]:
        """The usage field of a chunk that is not the usage chunk."""
        if self._request.usage is not StreamedUsage.EACH:
            return {} if self._request.usage is StreamedUsage.NO else {"usage": None}
        prompt_tokens, completion_tokens = sum(map(len, self._request.prompts)), self._sent_tokens
        total = {"total_tokens": prompt_tokens + completion_tokens}
        return {"usage": {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, **total}}

    def _timings(self) -> dict[str, Any]:
        return {"timings": timings([*self._outputs.values()], self._received_ns)}


def _chat_piece(index: int, piece: Mapping[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": piece, "logprobs": None, "finish_reason": None}


def error_event(error: ApiError) -> bytes:
    """The event that reports an error after the stream has begun."""
    return f"data: {encode(error.body())}\n\n".encode()
