"""A thread that computes one task while its owner continues."""

import weakref
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread, current_thread
from types import MethodType
from typing import Any, Generic, TypeVar

from twostep.processes import Owner

Task = TypeVar("Task")
Result = TypeVar("Result")


class Worker(Generic[Task, Result]):
    """Runs `compute` on one task at a time: in a thread if `overlap`, otherwise when the result is requested.

    `compute` may run again on a task that failed or was interrupted. The thread ends with its owner or the interpreter,
    after its current task, as a thread that the interpreter stops within native code aborts the process. It keeps
    neither the owner nor `compute` alive.
    """

    def __init__(
        self, compute: Callable[[Task], Result], *, overlap: bool, notify: Callable[[], None] | None = None
    ) -> None:
        """`notify` is called in the thread after each task, so that a host can wait for it beside other things."""
        self._compute: Callable[[], Callable[[Task], Result] | None] = (
            weakref.WeakMethod(compute) if isinstance(compute, MethodType) else lambda: compute
        )
        self._task: Task | None = None
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._results: list[Result | BaseException] = []
        self._done: SimpleQueue[None] = SimpleQueue()
        self._thread: Thread | None = None
        self._owner = Owner("this engine")
        if overlap:
            shared = self._compute, self._tasks, self._results, self._done, notify
            self._thread = Thread(target=_work, args=shared, name="twostep-step", daemon=True)
            self._thread.start()
            self._end = weakref.finalize(self, _end, self._tasks, self._thread, self._owner)

    def start(self, task: Task) -> None:
        """Returns at once. Raises `ForkedError` in a forked child."""
        self._owner.check()
        self._results.clear()
        self._task = task
        if self._thread:
            self._tasks.put(task)

    @property
    def done(self) -> bool:
        """Whether `result` returns without waiting for the thread: there is a result, or no thread."""
        return self._thread is None or bool(self._results) or not self._end.alive  # not alive: the interpreter ends

    def wait(self) -> None:
        """Waits until `done`."""
        while not self.done:  # not the queue: an exception in here may take its entry
            self._done.get()

    def result(self) -> Result:
        """Waits for the result of the task started last. Raises what `compute` raised; another call computes again.

        Raises `ForkedError` in a forked child, which does not have the thread.
        """
        self._owner.check()
        assert self._task is not None, "no task was started"
        self.wait()
        if not self._results:
            return self._compute_here(self._task)
        result = self._results[0]
        if isinstance(result, BaseException):
            self.start(self._task)
            raise result
        return result

    def close(self) -> None:
        """Ends the thread when its task is done."""
        if self._thread:
            self._end()
            self._thread = None

    def _compute_here(self, task: Task) -> Result:
        compute = self._compute()
        assert compute is not None, "the owner of `compute` is gone"
        return compute(task)


def _work(
    method: Callable[[], Callable[[Task], Result] | None],
    tasks: "SimpleQueue[Task | None]",
    results: "list[Result | BaseException]",
    done: "SimpleQueue[None]",
    notify: Callable[[], None] | None,
) -> None:
    while (task := tasks.get()) is not None:
        compute = method()
        if compute is None:
            return
        try:
            results.append(compute(task))
        except BaseException as error:
            results.append(error)
        del compute, task
        done.put(None)
        if notify is not None:
            notify()


def _end(tasks: "SimpleQueue[Any]", thread: Thread, owner: Owner) -> None:
    """Does nothing in a forked child, which does not have the thread."""
    if not owner.here:
        return
    tasks.put(None)
    if thread is not current_thread():  # the thread itself may drop the last reference to the owner
        thread.join()
