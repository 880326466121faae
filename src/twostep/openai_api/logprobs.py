"""Log-probabilities of output tokens in the forms of the two endpoints."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from twostep.engine.text.packed_logprobs import TokenLogprobs
from twostep.model.detokenizer import IncrementalDetokenizer
from twostep.model.tokenizer import Tokenizer
from twostep.openai_api.json_text import Many

LOWEST = -9999.0
"""Stands for minus infinity, which JSON lacks; as in OpenAI's API."""


def chat_logprobs(entries: Sequence[TokenLogprobs], tokenizer: Tokenizer) -> dict[str, Any]:
    """Of each token its text, where it is not whole characters with U+FFFD, its bytes and the likeliest tokens.

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
    """One output token with its log-probabilities. `offset`: characters of the answer's text before it."""

    entry: TokenLogprobs
    offset: int


class ShownTokens:
    """Those tokens of one answer that its text has: none that begins in a stop string or behind it.

    A token is shown when text at or after its beginning is, so that a stream shows the same tokens as a whole reply.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special)
        self._held: deque[PlacedToken] = deque()
        self._token_characters = self._text_characters = 0

    def push(self, entries: Iterable[TokenLogprobs], text: str) -> list[PlacedToken]:
        """The tokens that are to be shown with `text`, the next of the answer. `entries` are of its next tokens."""
        for entry in entries:
            self._held.append(PlacedToken(entry, self._token_characters))
            self._token_characters += len(self._detokenizer.push(entry.token_id))
        self._text_characters += len(text)
        shown = []
        while self._held and self._held[0].offset < self._text_characters:
            shown.append(self._held.popleft())
        return shown

    def end(self, stop_reason: str | int | None) -> list[PlacedToken]:
        """The tokens left at the end of the text: such as leave no text, or what a stop string cut off, which is
        dropped."""
        return [] if isinstance(stop_reason, str) else list(self._held)


def text_offsets(entries: Iterable[TokenLogprobs], tokenizer: Tokenizer, skip_special: bool) -> Iterator[int]:
    """Characters of an answer's text before each of its tokens, which `entries` begin with the first of."""
    detokenizer, length = IncrementalDetokenizer(tokenizer, skip_special), 0
    for entry in entries:
        yield length
        length += len(detokenizer.push(entry.token_id))


def completion_logprobs(
    entries: Sequence[TokenLogprobs], offsets: Iterable[int], tokenizer: Tokenizer
) -> dict[str, Any]:
    """Lists (each a `Many`) with an entry for each token; `offsets` are its characters of text before.

    The alternatives include the chosen token, so that there may be one more than asked for.
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
    r"""A token's text, or `bytes:\xe2\x80` as in OpenAI's API where it is no text: names of two tokens differ."""
    raw = tokenizer.token_bytes(id_)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
