"""The sequences that wait for a seat, in the order of admission."""

from bisect import bisect_left, insort
from collections.abc import Iterator

from twostep.core.policies import MOST_PASSES, Order
from twostep.core.request import Sequence, Stage


class WaitingQueue:
    """Sorted by the admission policy's key, which does not change while a sequence waits."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._entries: list[tuple[tuple[int, ...], int, Sequence]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        """First the next one to admit."""
        return (seq for _, _, seq in self._entries)

    def put(self, seq: Sequence) -> None:
        seq.stage = Stage.WAITING
        insort(self._entries, self._entry(seq))

    def remove(self, seq: Sequence) -> None:
        del self._entries[bisect_left(self._entries, self._entry(seq))]

    def _entry(self, seq: Sequence) -> tuple[tuple[int, ...], int, Sequence]:
        return self._order(seq), seq.number, seq


def may_pass(later: Sequence, earlier: Sequence) -> bool:
    """Whether `later` may be admitted while `earlier`, before it in the queue, is not ready.

    Only the next 64 arrivals may, so that no more than 64 of its priority ever do.
    """
    equals = later.request.priority == earlier.request.priority
    return not equals or later.number - earlier.number <= MOST_PASSES
