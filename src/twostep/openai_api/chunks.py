"""Streamed replies as server-sent events, each made ready to be sent: bytes of which only what is new is encoded."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twostep.engine.outputs import Delta, RequestOutput
from twostep.model.tokenizer import Tokenizer
from twostep.openai_api.errors import ApiError
from twostep.openai_api.json_text import encode, plain
from twostep.openai_api.logprobs import PlacedToken, ShownTokens, chat_logprobs, completion_logprobs
from twostep.openai_api.requests import ApiRequest, StreamedUsage
from twostep.openai_api.responses import ID_PREFIX, usage
from twostep.openai_api.timings import timings
from twostep.openai_api.tool_calls import ToolStream, call_prefix, finish_reason

FAILED = ("error", "abort")
"""Reasons for which an answer has no end."""
DONE = b"data: [DONE]\n\n"
"""The last event of every stream."""

_OBJECT = {"chat": "chat.completion.chunk", "completion": "text_completion"}


@dataclass
class _Choice:
    """One choice as far as it has been sent."""

    tokens: ShownTokens
    begun: bool = False
    ended: bool = False
    calls: ToolStream | None = None
    """Where answers may call tools."""

    def pieces(self, text: str) -> list[dict[str, Any]]:
        """What the message gains by this text, by chunk; at least one piece, perhaps with nothing in it."""
        return [{"content": text}] if self.calls is None else self.calls.push(text) or [{}]


class Chunks:
    """Makes the events of one reply. All chunks have one id and one time of creation.

    A chunk of a choice has its `finish_reason` once, in its last chunk, and null before. `timings` are in the last
    chunk of all, which is that of the usage if it was asked for.
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
        """`unique` makes the reply's id. `received_ns` as in `timings`."""
        self._received_ns = received_ns
        self._request, self._tokenizer, self._unique = request, tokenizer, unique
        self._choices: dict[int, _Choice] = {}
        self._outputs: dict[int, RequestOutput] = {}
        self._sent_tokens = 0
        head = {
            "id": ID_PREFIX[request.kind] + unique,
            "object": _OBJECT[request.kind],
            "created": created_s,
            "model": request.model,
        }
        self._head = f'data: {encode(head)[:-1]},"choices":['

    def delta(self, prompt: int, delta: Delta) -> bytes:
        """What is new of a choice of this prompt, by number; nothing where there is nothing to see. The first chunk of
        a choice always comes, with its first token."""
        if delta.ended:
            return b"".join(map(self._chunk, self._end(prompt, delta.index, *delta.ended)))
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
        """A prompt's answers are whole. Raises `ApiError` with status 500 if one did not come to its end."""
        self._outputs[prompt] = output
        for choice in output.choices:
            if choice.finish_reason in FAILED:
                raise ApiError(choice.error or "the request was aborted", status=500)
        is_last = len(self._outputs) == len(self._request.prompts) and self._request.usage is StreamedUsage.NO
        ends = (self._end(prompt, one.index, one.finish_reason, one.stop_reason) for one in output.choices)
        *early, last = [chunk for end in ends for chunk in end]
        return b"".join(map(self._chunk, early)) + self._chunk(last, self._timings() if is_last else {})

    def end(self) -> bytes:
        """Usage, if asked for, and the last event."""
        if self._request.usage is StreamedUsage.NO:
            return DONE
        counted = {"usage": usage([*self._outputs.values()]), **self._timings()}
        return f"{self._head}],{encode(counted)[1:]}\n\n".encode() + DONE

    # --- chunks ---------------------------------------------------------------------------------------------------

    def _choice(self, prompt: int, index: int) -> _Choice:
        number = self._number(prompt, index)
        if number not in self._choices:
            tokens = ShownTokens(self._tokenizer, self._request.params.skip_special_tokens)
            functions = self._request.functions
            calls = ToolStream(call_prefix(self._unique, number), functions) if functions else None
            self._choices[number] = _Choice(tokens, calls=calls)
        return self._choices[number]

    def _number(self, prompt: int, index: int) -> int:
        return prompt * self._request.params.n + index

    def _chunk(self, choice: Mapping[str, Any], more: Mapping[str, Any] | None = None) -> bytes:
        tail = {**self._usage(), **(more or {})}
        rest = f",{encode(tail)[1:]}" if tail else "}"
        return f"{self._head}{encode(choice)}]{rest}\n\n".encode()

    def _chat(self, choice: _Choice, piece: Mapping[str, Any]) -> dict[str, Any]:
        role = {} if choice.begun else {"role": "assistant"}
        return {"delta": {**role, **piece}}

    def _completion(self, choice: _Choice, prompt: int, text: str) -> dict[str, Any]:
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

    def _token_ids(self, choice: _Choice, prompt: int, delta: Delta) -> dict[str, Any]:
        first = {} if choice.begun else {"prompt_token_ids": self._request.prompts[prompt]}
        return {**first, "token_ids": delta.token_ids}

    def _end(self, prompt: int, index: int, reason: str, stop: str | int | None) -> Iterator[dict[str, Any]]:
        """The last chunks of a choice, unless they were sent. One that failed has none: see `finished`."""
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
        """Of a chunk that is not the usage's own."""
        if self._request.usage is not StreamedUsage.EACH:
            return {} if self._request.usage is StreamedUsage.NO else {"usage": None}
        asked, given = sum(map(len, self._request.prompts)), self._sent_tokens
        return {"usage": {"prompt_tokens": asked, "completion_tokens": given, "total_tokens": asked + given}}

    def _timings(self) -> dict[str, Any]:
        return {"timings": timings([*self._outputs.values()], self._received_ns)}


def _chat_piece(index: int, piece: Mapping[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": piece, "logprobs": None, "finish_reason": None}


def error_event(error: ApiError) -> bytes:
    """What went wrong in mid-stream."""
    return f"data: {encode(error.body())}\n\n".encode()
