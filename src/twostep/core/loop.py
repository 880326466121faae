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

    def finish(self) -> StepResult:
        """Waits for the end of the step that was started, and reports it."""


class Surroundings(Protocol):
    """Where time comes from, what is asked, and who wants to know."""

    def now(self) -> int:
        """Nanoseconds, never going back."""

    def hear(self) -> Iterable[Command]:
        """What was asked since the last call, in order. Does not wait."""

    def added(self, request: Request, numbers: tuple[int, ...], now: int) -> None:
        """A request is queued; its choices have these numbers from now on."""

    def refused(self, request: Request, why: str, now: int) -> None:
        """A request was not queued."""

    def began(self, step: Step, now: int) -> None:
        """A step has been handed to the executor."""

    def ended(self, step: Step, result: StepResult, resolved: Resolved, now: int) -> None:
        """A step has ended and its outcome is in the books."""

    def aborted(self, finished: tuple[Finished, ...], now: int) -> None:
        """Sequences ended because somebody asked for it."""

    def catch_up(self) -> None:
        """A good moment for slow work, such as text: a step is running, or there is nothing to do."""


class EngineLoop:
    """One scheduler, one executor. The host calls `turn` again and again, and waits where that had nothing to do."""

    def __init__(self, scheduler: Scheduler, executor: StepExecutor, around: Surroundings) -> None:
        self.scheduler = scheduler
        self._executor = executor
        self._around = around
        self._early = scheduler.plan(around.now())
        self._step: Step | None = None

    @property
    def computing(self) -> bool:
        """Whether a step is under way."""
        return self._step is not None

    def turn(self) -> bool:
        """Serves one step, or says False if there is none to serve. After an exception it takes up where it was."""
        served = self.begin()
        self.end()
        return served

    def begin(self) -> bool:
        """Hands the next step to the executor; False if there is none.

        While that computes, what came of the step before is passed on and the next plan is made. A host that has more
        to do meanwhile calls `end` when it has done it.
        """
        self._step = self._step or self._next_step()
        self._around.catch_up()
        if self._step is not None:
            self._hear()
            self._early = self.scheduler.plan(self._around.now())
        return self._step is not None

    def end(self) -> None:
        """Waits for the step under way, if there is one, and takes in what it gave."""
        if self._step is None:
            return
        result = self._executor.finish()
        resolved = self.scheduler.resolve(result)
        step, self._step = self._step, None
        self._around.ended(step, result, resolved, self._around.now())

    def _next_step(self) -> Step | None:
        """The plan made early holds unless what it was made from has changed; one that does nothing may have waited for
        time to pass."""
        self._hear()
        now = self._around.now()
        holds = self._early.changes == self.scheduler.changes and not self._early.empty
        plan = self._early if holds else self.scheduler.plan(now)
        if plan.empty:
            return None
        step = self.scheduler.advance(plan)
        self._executor.start(step)
        self._around.began(step, now)
        return step

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
