"""How long the kernels were kept from the cores: other programs had them, or a limit of CPU time was reached."""

from collections.abc import Callable
from time import perf_counter_ns, process_time_ns
from typing import TypeVar

Asked = TypeVar("Asked")
Result = TypeVar("Result")


class Cores:
    """For kernels that keep `threads` threads busy; 0: it is not known how many, and nothing is estimated.

    `slept_ns`: what those threads have slept together so far, since they waited for each other.
    """

    def __init__(self, threads: int, slept_ns: Callable[[], int]) -> None:
        self._threads, self._slept_ns = threads, slept_ns

    def watched(self, compute: Callable[[Asked], Result], asked: Asked) -> tuple[Result, int]:
        """What `compute` gave, and the estimate: of its time in ns, what its threads on average had no core.

        Kernel threads spin or sleep while they wait for each other, so one that did neither was not let run. What other
        threads of this process used meanwhile counts as the kernels', which makes it an underestimate. A thread that
        stays away since others use its core (`native/attendance.h`) has none.
        """
        if not self._threads:
            return compute(asked), 0
        accounted_ns, began_ns = process_time_ns() + self._slept_ns(), perf_counter_ns()
        result = compute(asked)
        took_ns, accounted_ns = perf_counter_ns() - began_ns, process_time_ns() + self._slept_ns() - accounted_ns
        return result, max(0, took_ns - accounted_ns // self._threads)
