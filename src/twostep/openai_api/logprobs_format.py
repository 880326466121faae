"""Log-probabilities of output tokens in the formats of the chat and completions endpoints."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from twostep.engine.text.packed_logprobs import TokenLogprobs
from twostep.model.detokenizer import IncrementalDetokenizer
from twostep.model.tokenizer import Tokenizer
from twostep.openai_api.json_text import Many

LOWEST = -9999.0
"""Replaces minus infinity, which JSON lacks; the same value as in OpenAI's API."""


def chat_logprobs(entries: Sequence[TokenLogprobs], tokenizer: Tokenizer) -> dict[str, Any]:
    """Each token's text (with U+FFFD where its bytes are not whole characters), bytes and most likely alternatives.

    `content` is a `Many`: an answer of 2 500 tokens with 20 alternatives each is 4 MB of JSON.
    """
    content = (
        {
            **_chat_token(entry.token_id, entry.logprob, tokenizer),
            "top_logprobs": [_chat_token(id_, logprob, tokenizer) for id_, logprob in entry.top],
        }
        for entry in entries
    )
    return {"content": Many(content), "refusal": None}


def _chat_token(id_: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    raw = tokenizer.token_bytes(id_)
    return {"token": raw.decode(errors="replace"), "logprob": max(logprob, LOWEST), "bytes": list(raw)}


@dataclass(frozen=True)
class PlacedToken:
    """An output token with its log-probabilities. `offset`: number of characters of the answer's text before it."""

    entry: TokenLogprobs
    offset: int


class ShownTokens:
    """Selects the tokens that are visible in an answer's text: none that begins in a stop string or after it.

    A token is shown when text at or after its beginning is, so that a stream shows the same tokens as a whole reply.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special)
        self._pending: deque[PlacedToken] = deque()
        self._token_characters = self._text_characters = 0

    def push(self, entries: Iterable[TokenLogprobs], text: str) -> list[PlacedToken]:
        """The tokens to show with `text`, the next text of the answer. `entries` belong to its next tokens."""
        for entry in entries:
            self._pending.append(PlacedToken(entry, self._token_characters))
            self._token_characters += len(self._detokenizer.push(entry.token_id))
        self._text_characters += len(text)
        shown = []
        while self._pending and self._pending[0].offset < self._text_characters:
            shown.append(self._pending.popleft())
        return shown

    def end(self, stop_reason: str | int | None) -> list[PlacedToken]:
        """The remaining tokens at the end of the answer: those without text. After a stop string there are none: what
        is left is the stop string."""
        return [] if isinstance(stop_reason, str) else list(self._pending)


def text_offsets(entries: Iterable[TokenLogprobs], tokenizer: Tokenizer, skip_special: bool) -> Iterator[int]:
    """The number of characters of text before each token of an answer; `entries` start with its first token."""
    detokenizer, length = IncrementalDetokenizer(tokenizer, skip_special), 0
    for entry in entries:
        yield length
        length += len(detokenizer.push(entry.token_id))


def completion_logprobs(
    entries: Sequence[TokenLogprobs], offsets: Iterable[int], tokenizer: Tokenizer
) -> dict[str, Any]:
    """Lists (each a `Many`) with one element per token; `offsets` are the numbers of characters before each.

    The alternatives include the sampled token, so there may be one more than requested.
    """
    return {
        "tokens": Many(_name(entry.token_id, tokenizer) for entry in entries),
        "token_logprobs": Many(max(entry.logprob, LOWEST) for entry in entries),
        "top_logprobs": Many(_alternatives(entry, tokenizer) for entry in entries),
        "text_offset": Many(offsets),
    }


def _alternatives(entry: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, float]:
    likely = [*entry.top, (entry.token_id, entry.logprob)]
    return {_name(id_, tokenizer): max(logprob, LOWEST) for id_, logprob in likely}


def _name(id_: int, tokenizer: Tokenizer) -> str:
    r"""A token's text, or `bytes:\xe2\x80` as in OpenAI's API if it is not valid text, so that names are unique."""
    raw = tokenizer.token_bytes(id_)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
