"""The text of one answer as its tokens come: whole characters, and nothing of a stop string or after it."""

from collections.abc import Sequence
from typing import NamedTuple

from twostep.engine.params import SamplingParams
from twostep.engine.text.stops import StopSearch
from twostep.model.detokenizer import IncrementalDetokenizer
from twostep.model.tokenizer import Tokenizer


class TextDelta(NamedTuple):
    """Text to append, perhaps none; the stop string that ended the answer; how many of the tokens are of the answer."""

    text: str
    stop: str | None
    tokens: int


class TextStream:
    """Text of one choice. All that `push` and `flush` give is the answer's text, whatever the pieces.

    A stop string ends the answer with the token that completes it: the earliest such token, and of stops that it
    completes together the one that starts first. Until `min_tokens` are out none counts, as in vLLM; one that they
    began and a later token completes does. A stop token leaves no text, unless `include_stop_str_in_output`.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, params.skip_special_tokens)
        self._search = StopSearch(params.stop_strings)
        self._shows_stop = params.include_stop_str_in_output
        self._silent_ids = frozenset() if self._shows_stop else params.stop_ids(tokenizer.eos_ids)
        self._min_tokens = params.min_tokens
        self._tokens = 0
        self._ended = False

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """The text that these tokens set free, one that ends the answer included; none of those after a stop string.

        Raises `ValueError` for an id that is unknown.
        """
        texts: list[str] = []
        for used, id_ in enumerate(token_ids):
            if self._ended:
                return TextDelta("".join(texts), None, used)
            text, stop = self._token(id_)
            texts.append(text)
            if stop is not None:
                self._ended = True
                return TextDelta("".join(texts), stop, used + 1)
        return TextDelta("".join(texts), None, len(token_ids))

    def flush(self) -> str:
        """What was held back, for an answer that ended without a stop string. A character cut short is U+FFFD."""
        return "" if self._ended else self._search.flush() + self._detokenizer.flush()

    def _token(self, id_: int) -> tuple[str, str | None]:
        self._tokens += 1
        if id_ in self._silent_ids:
            return "", None
        piece = self._detokenizer.push(id_)
        text, stop = self._search.push(piece, armed=self._tokens > self._min_tokens)
        return (text + stop if stop and self._shows_stop else text), stop


class NoText:
    """Stands in for `TextStream` where there is no tokenizer: tokens leave no text."""

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        return TextDelta("", None, len(token_ids))

    def flush(self) -> str:
        return ""
