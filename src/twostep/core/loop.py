"""Who calls the scheduler: the loop that serves, that rehearses and that replays, with different surroundings."""

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from twostep.core.plan import Finished, Resolved, Step, StepResult
from twostep.core.request import Request
from twostep.core.scheduler import NeverFitsError, Scheduler


class Abort(NamedTuple):
    """End a request early, or only one of its choices."""

    request_id: str
    choice: int | None = None


Command = Request | Abort


class StepExecutor(Protocol):
    """Computes steps, one at a time."""

    def start(self, step: Step) -> None:
        """Begins to compute `step`; need not wait for its end."""
        ...

    def finish(self) -> StepResult:
        """Waits for the end of the step that was started, and reports it."""
        ...


class Surroundings(Protocol):
    """Where time comes from, what is asked, and who wants to know."""

    def now(self) -> int:
        """Nanoseconds, never going back."""
        ...

    def hear(self) -> Iterable[Command]:
        """What was asked since the last call, in order. Does not wait."""
        ...

    def added(self, request: Request, numbers: tuple[int, ...], now: int) -> None:
        """A request is queued; its choices have these numbers from now on."""
        ...

    def refused(self, request: Request, why: str, now: int) -> None:
        """A request was not queued."""
        ...

    def began(self, step: Step, now: int) -> None:
        """A step has been handed to the executor."""
        ...

    def ended(self, step: Step, result: StepResult, resolved: Resolved, now: int) -> None:
        """A step has ended and its outcome is in the books."""
        ...

    def aborted(self, finished: tuple[Finished, ...], now: int) -> None:
        """Sequences ended because somebody asked for it."""
        ...

    def catch_up(self) -> None:
        """A good moment for slow work, such as text: a step is running, or there is nothing to do."""
        ...


class EngineLoop:
    """One scheduler, one executor. The host calls `turn` again and again, and waits where that had nothing to do."""

    def __init__(self, scheduler: Scheduler, executor: StepExecutor, around: Surroundings) -> None:
        self.scheduler = scheduler
        self._executor = executor
        self._around = around
        self._early = scheduler.plan(around.now())

    def turn(self) -> bool:
        """Serves one step, or says False if there is none to serve.

        While the executor computes, what came of the step before is passed on and the next plan is made. It holds
        unless this step's end, an arrival or an abort changes what it was made from; then a new one is.
        """
        around, scheduler = self._around, self.scheduler
        self._hear()
        began = around.now()
        plan = self._early if self._early.changes == scheduler.changes else scheduler.plan(began)
        if plan.empty:
            around.catch_up()
            return False
        step = scheduler.advance(plan)
        self._executor.start(step)
        around.began(step, began)
        around.catch_up()
        self._hear()
        self._early = scheduler.plan(around.now())
        result = self._executor.finish()
        around.ended(step, result, scheduler.resolve(result), around.now())
        return True

    def _hear(self) -> None:
        for command in self._around.hear():
            now = self._around.now()
            if isinstance(command, Abort):
                self._around.aborted(self.scheduler.abort(*command), now)
            else:
                self._add(command, now)

    def _add(self, request: Request, now: int) -> None:
        try:
            numbers = self.scheduler.add(request, now)
        except NeverFitsError as error:
            self._around.refused(request, str(error), now)
        else:
            self._around.added(request, numbers, now)
