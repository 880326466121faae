"""Log-probabilities of an answer's tokens, packed: sending 50 000 small objects to another process takes 100 ms."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import overload

_COUNTS = Struct("=QQ")
"""Tokens, and alternatives of all of them."""


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities for one output token; they are the model's own, see `TokenSampling.logprobs`."""

    token_id: int
    logprob: float
    rank: int
    """1 for the model's most likely token."""
    top: tuple[tuple[int, float], ...]
    """The most likely tokens with their log-probabilities, best first: as many as requested, or as are possible."""


class PackedLogprobs(Sequence[TokenLogprobs]):
    """Grows by `append`. Members are created when they are read; a slice is a tuple. Equal to any sequence of the same
    members."""

    __slots__ = ("_chosen", "_ends", "_top_ids", "_top_logprobs")

    def __init__(self, entries: Iterable[TokenLogprobs] = ()) -> None:
        self._chosen = array("d")
        """For each token its id, log-probability and rank; integers are exact far beyond any vocabulary."""
        self._ends = array("q")
        """For each token where its alternatives end in the two arrays below."""
        self._top_ids = array("q")
        self._top_logprobs = array("d")
        for entry in entries:
            self.append(entry)

    def append(self, entry: TokenLogprobs) -> None:
        self._chosen.extend((entry.token_id, entry.logprob, entry.rank))
        for id_, logprob in entry.top:
            self._top_ids.append(id_)
            self._top_logprobs.append(logprob)
        self._ends.append(len(self._top_ids))

    def truncated(self, length: int) -> "PackedLogprobs":
        """The first `length` members, in the same form; this object itself if it has no more."""
        if length >= len(self):
            return self
        first, top = PackedLogprobs(), self._ends[length - 1] if length else 0
        first._chosen, first._ends = self._chosen[: 3 * length], self._ends[:length]
        first._top_ids, first._top_logprobs = self._top_ids[:top], self._top_logprobs[:top]
        return first

    def to_bytes(self, first: int = 0, end: int | None = None) -> bytes:
        """The members from `first` up to `end`, in the byte order of this machine, as `from_bytes` reads them."""
        end = len(self) if end is None else min(end, len(self))
        top, top_end = (self._ends[at - 1] if at else 0 for at in (first, max(first, end)))
        ends = self._ends[first:end] if not top else array("q", (at - top for at in self._ends[first:end]))
        parts = self._chosen[3 * first : 3 * end], ends, self._top_ids[top:top_end], self._top_logprobs[top:top_end]
        return b"".join((_COUNTS.pack(len(ends), len(parts[2])), *(part.tobytes() for part in parts)))

    @classmethod
    def from_bytes(cls, data: bytes) -> "PackedLogprobs":
        """Raises `ValueError` if `data` are not what `to_bytes` makes."""
        tokens, alternatives = _COUNTS.unpack_from(data) if len(data) >= _COUNTS.size else (0, 0)
        if len(data) != _COUNTS.size + 32 * tokens + 16 * alternatives:
            raise ValueError(f"log-probabilities have {len(data)} bytes, which is not what their header says")
        made, at = cls(), _COUNTS.size
        for part, count in (
            (made._chosen, 3 * tokens),
            (made._ends, tokens),
            (made._top_ids, alternatives),
            (made._top_logprobs, alternatives),
        ):
            part.frombytes(data[at : at + 8 * count])
            at += 8 * count
        if tokens and made._ends[-1] != alternatives:
            raise ValueError("log-probabilities say more or fewer alternatives than they have")
        return made

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> TokenLogprobs: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[TokenLogprobs, ...]: ...
    def __getitem__(self, index: int | slice) -> TokenLogprobs | tuple[TokenLogprobs, ...]:
        if isinstance(index, slice):
            return tuple(self._one(number) for number in range(len(self))[index])
        return self._one(range(len(self))[index])

    def __iter__(self) -> Iterator[TokenLogprobs]:
        return map(self._one, range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(map(TokenLogprobs.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]  # it grows

    def __repr__(self) -> str:
        return f"PackedLogprobs({list(self)!r})"

    def _one(self, number: int) -> TokenLogprobs:
        token_id, logprob, rank = self._chosen[3 * number : 3 * number + 3]
        start, end = self._ends[number - 1] if number else 0, self._ends[number]
        top = tuple(zip(self._top_ids[start:end], self._top_logprobs[start:end], strict=True))
        return TokenLogprobs(int(token_id), logprob, int(rank), top)
