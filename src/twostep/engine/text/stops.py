"""Finds stop strings in a text that comes in pieces, and holds back only what may still become one."""

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple


class Found(NamedTuple):
    """What a piece gives: text that may be shown, and the stop string that ended it, which that text does not have."""

    text: str
    stop: str | None


class StopSearch:
    """One search over one text. Whatever the pieces, a character costs the same on average, however many stops.

    Holds back the longest end of the text that is a proper prefix of a stop: there a stop may be on its way, before it
    none can. Of several stops that end in one piece the one that starts first wins, of those with one start the
    shortest.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._prefixes = _prefixes(tuple(stops))
        self._node = 0
        self._held = ""

    def push(self, piece: str, armed: bool = True) -> Found:
        """The text that `piece` sets free. Stops that end in it are passed over unless `armed`.

        After a stop nothing of the text is left; the search is over.
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
        """What is held back: at the end of the text it can no longer become a stop."""
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
    """One for all choices of a request, and for all requests with the same stops: it does not change."""
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
