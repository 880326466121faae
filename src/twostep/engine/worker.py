"""One thread that computes while its owner goes on."""

from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import Generic, TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")


class Worker(Generic[Task, Result]):
    """Runs `compute` on one task at a time: beside its owner if `overlap`, else when the result is asked for.

    `compute` may be run again on a task that it failed on, or was interrupted in.
    """

    def __init__(self, compute: Callable[[Task], Result], *, overlap: bool) -> None:
        self._compute = compute
        self._task: Task | None = None
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._results: list[Result | BaseException] = []
        self._done: SimpleQueue[None] = SimpleQueue()
        self._thread = Thread(target=self._work, name="twostep-step", daemon=True) if overlap else None
        if self._thread:
            self._thread.start()

    def start(self, task: Task) -> None:
        """Returns at once."""
        self._results.clear()
        self._task = task
        if self._thread:
            self._tasks.put(task)

    def result(self) -> Result:
        """Of the task started last; waits for it. Raises what `compute` raised; asked again, it computes again."""
        assert self._task is not None, "no task was started"
        if self._thread is None:
            return self._compute(self._task)
        while not self._results:  # not the queue: an exception in here may take its entry
            self._done.get()
        result = self._results[0]
        if isinstance(result, BaseException):
            self.start(self._task)
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
                self._results.append(self._compute(task))
            except BaseException as error:
                self._results.append(error)
            self._done.put(None)
