"""How long the kernels had no core: other programs used the cores, or a limit of CPU time was reached."""

from collections.abc import Callable
from typing import TypeVar

Asked = TypeVar("Asked")
Result = TypeVar("Result")


class Cores:
    """Watches kernels that keep `threads` threads busy; 0: the number is unknown, and nothing is estimated.

    `lacked_ns`: how long those threads had no core inside steps so far, added up over all threads.
    """

    def __init__(self, threads: int, lacked_ns: Callable[[], int]) -> None:
        self._threads, self._lacked_ns = threads, lacked_ns

    def watched(self, compute: Callable[[Asked], Result], asked: Asked) -> tuple[Result, int]:
        """The result of `compute`, and how long its threads had no core on average, in ns.

        A thread that does not take part since others use its core (`native/attendance.h`) has none. It is tried again
        every two seconds or more often, so for so long this may say more than the cores lack at the moment.
        """
        if not self._threads:
            return compute(asked), 0
        before_ns = self._lacked_ns()
        result = compute(asked)
        return result, (self._lacked_ns() - before_ns) // self._threads
