"""The text of one answer as its tokens arrive: whole characters, without a stop string or text after it."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from twostep.engine.params import SamplingParams
from twostep.model.detokenizer import IncrementalDetokenizer
from twostep.model.tokenizer import Tokenizer


class Found(NamedTuple):
    """Text that may be shown, and the stop string that ended it, which is not in the text."""

    text: str
    stop: str | None


class StopSearch:
    """Finds stop strings in a text that arrives in pieces. A character costs the same on average, however many stops.

    Holds back the longest end of the text that is a proper prefix of a stop, as it may become one. Of several stops
    that end in one piece the one that starts first counts; if several start there, the shortest.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._prefixes = _prefixes(tuple(stops))
        self._node = 0
        self._held = ""

    def push(self, piece: str, armed: bool = True) -> Found:
        """Returns the text that is final with `piece`. Stops that end in it are ignored unless `armed`.

        The search is over after a stop.
        """
        text = self._held + piece
        match = self._first(piece)
        if armed and match is not None:
            self._held = ""
            return Found(text[: match.start], text[match])
        given = len(text) - self._prefixes.pending[self._node]
        self._held = text[given:]
        return Found(text[:given], None)

    def flush(self) -> str:
        """Returns the text held back: at the end of the text it can no longer become a stop."""
        return self._held

    def _first(self, piece: str) -> slice | None:
        """The winning stop among those that end in `piece`, as a slice of the text held back and `piece`."""
        first: slice | None = None
        for end, character in enumerate(piece, len(self._held) + 1):
            self._node = self._prefixes.step(self._node, character)
            stop_length = self._prefixes.stop_length[self._node]
            if stop_length and (first is None or end - stop_length < first.start):
                first = slice(end - stop_length, end)
        return first


@lru_cache(64)
def _prefixes(stops: tuple[str, ...]) -> "_Prefixes":
    """Shared by all requests with the same stops, as it does not change."""
    return _Prefixes(stops)


class _Prefixes:
    """The automaton of Aho and Corasick (1975). A node is a prefix of a stop: the longest that ends the text so far.

    For each node, `stop_length` is the length of the longest stop that it ends with, 0 if none; `pending` is that of
    its longest end that is a proper prefix of a stop.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._children: list[dict[str, int]] = [{}]
        self._shorter = [0]  # the node's longest proper suffix that is a node
        self._depth = [0]
        self.stop_length = [0]
        for stop in stops:
            self._insert(stop)
        self.pending = [0] * len(self._children)
        self._link()

    def step(self, node: int, character: str) -> int:
        while node and character not in self._children[node]:
            node = self._shorter[node]
        return self._children[node].get(character, 0)

    def _insert(self, stop: str) -> None:
        node = 0
        for depth, character in enumerate(stop, 1):
            child = self._children[node].setdefault(character, len(self._children))
            if child == len(self._children):
                self._children.append({})
                self._shorter.append(0)
                self._depth.append(depth)
                self.stop_length.append(0)
            node = child
        self.stop_length[node] = len(stop)

    def _link(self) -> None:
        """Breadth first, as a node's links are made from those of shorter ones."""
        nodes = list(self._children[0].values())
        for node in nodes:
            shorter = self._shorter[node]
            self.stop_length[node] = self.stop_length[node] or self.stop_length[shorter]
            self.pending[node] = self._depth[node] if self._children[node] else self.pending[shorter]
            for character, child in self._children[node].items():
                self._shorter[child] = self.step(shorter, character)
                nodes.append(child)


class TextDelta(NamedTuple):
    """Text to append, which may be empty; the stop string that ended the answer; how many of the tokens belong to
    it."""

    text: str
    stop: str | None
    tokens: int


class TextStream:
    """Text of one choice: what `push` and `flush` return, however the tokens are divided among calls.

    A stop string ends the answer with the token that completes it. If one token completes several, the one that starts
    first counts. None counts before `min_tokens`, as in vLLM, except one that a later token completes. A stop token
    has no text, unless `include_stop_str_in_output`.
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
        """Returns the text that is final with these tokens, up to a stop string. Raises `ValueError` for an unknown
        id."""
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
        """Returns the text held back, for an answer that ended without a stop string. An incomplete character is
        U+FFFD."""
        return "" if self._ended else self._search.flush() + self._detokenizer.flush()

    def _token(self, id_: int) -> tuple[str, str | None]:
        self._tokens += 1
        if id_ in self._silent_ids:
            return "", None
        piece = self._detokenizer.push(id_)
        text, stop = self._search.push(piece, armed=self._tokens > self._min_tokens)
        return (text + stop if stop and self._shows_stop else text), stop


def text_stream(tokenizer: Tokenizer | None, params: SamplingParams) -> "TextStream | NoText":
    """The text of a new choice; there is none without a tokenizer."""
    return TextStream(tokenizer, params) if tokenizer else NoText()


class NoText:
    """Replaces `TextStream` without a tokenizer: there is no text."""

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        return TextDelta("", None, len(token_ids))

    def flush(self) -> str:
        return ""
