"""One thread that computes while its owner goes on."""

from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import Generic, TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")


class Worker(Generic[Task, Result]):
    """Runs `compute` on one task at a time: beside its owner if `overlap`, else when the result is asked for."""

    def __init__(self, compute: Callable[[Task], Result], *, overlap: bool) -> None:
        self._compute = compute
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._results: SimpleQueue[Result | BaseException] = SimpleQueue()
        self._thread = Thread(target=self._work, name="twostep-step", daemon=True) if overlap else None
        if self._thread:
            self._thread.start()

    def start(self, task: Task) -> None:
        """Returns at once."""
        self._tasks.put(task)

    def result(self) -> Result:
        """Of the task started last; waits for it. Raises what `compute` raised."""
        if self._thread is None:
            task = self._tasks.get()
            assert task is not None
            return self._compute(task)
        result = self._results.get()
        if isinstance(result, BaseException):
            raise result
        return result

    def close(self) -> None:
        """Ends the thread when its task is done."""
        if self._thread:
            self._tasks.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                self._results.put(self._compute(task))
            except BaseException as error:
                self._results.put(error)
