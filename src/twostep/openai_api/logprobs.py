"""Log-probabilities of output tokens in the forms of the two endpoints."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from twostep.engine.logprobs import TokenLogprobs
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


class TextOffsets:
    """Characters of one answer's text before each of its tokens, as they come."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special)
        self._length = 0

    def push(self, ids: Iterable[int]) -> Iterator[int]:
        """Offsets of the next tokens, which count once they are read."""
        for id_ in ids:
            yield self._length
            self._length += len(self._detokenizer.push(id_))


def completion_logprobs(entries: Sequence[TokenLogprobs], tokenizer: Tokenizer, offsets: TextOffsets) -> dict[str, Any]:
    """Lists (each a `Many`) with an entry for each token, the next ones of `offsets`.

    The alternatives include the chosen token, so that there may be one more than asked for.
    """
    return {
        "tokens": Many(_name(entry.token_id, tokenizer) for entry in entries),
        "token_logprobs": Many(max(entry.logprob, LOWEST) for entry in entries),
        "top_logprobs": Many(_alternatives(entry, tokenizer) for entry in entries),
        "text_offset": Many(offsets.push(entry.token_id for entry in entries)),
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
