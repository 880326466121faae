"""The loop that serves, simulates and replays: one scheduler, one executor, and a host that decides how to wait.

A host drives it with calls that never block:

    while True:
        if loop.begin():        # a step is under way
            ...                 # wait until the executor has its result: a thread, a file descriptor, a virtual clock
            loop.poll()         # True: the step has ended, and the observer knows
        else:
            ...                 # wait for input, but not beyond loop.next_wake_ns

`turn` does both for executors that need no waiting.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from twostep.core.kv_cache import BlockGroup
from twostep.core.plan import Finished, Resolved, Step, StepResult
from twostep.core.request import Request
from twostep.core.scheduler import NeverFitsError, Scheduler


class Abort(NamedTuple):
    """End a request early, or only one of its choices."""

    request_id: str
    choice: int | None = None


Command = Request | Abort


class MissingCapabilityError(ValueError):
    """The scheduler is set to use what the executor cannot do: names both."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a step executor can do. `EngineLoop` refuses a scheduler, or a request, that needs more."""

    groups: tuple[BlockGroup, ...] | None = None
    """Its KV memory: blocks and window by group. None: it has none, and can carry out plans for any."""
    drafts: bool = False
    """It verifies drafted tokens, see `Chunk.drafts`."""
    arrived_kv: bool = False
    """It takes KV that was computed elsewhere, see `Request.arrived_tokens`."""

    def check_groups(self, groups: Sequence[BlockGroup]) -> None:
        """Raises `MissingCapabilityError` unless the executor's KV memory holds the blocks that will be planned."""
        if self.groups is None:
            return
        planned, own = (tuple(group.window for group in which) for which in (groups, self.groups))
        if planned != own:
            raise MissingCapabilityError(f"the scheduler has KV groups with windows {planned}, the executor {own}")
        for number, (group, memory) in enumerate(zip(groups, self.groups, strict=True)):
            if group.blocks > memory.blocks:
                have = f"the executor has {memory.blocks}"
                raise MissingCapabilityError(f"the scheduler plans {group.blocks} KV blocks in group {number}; {have}")


class StepExecutor(Protocol):
    """Computes steps, one at a time.

    How to wait for the end of a step is between the executor and its host: an executor offers a blocking wait, the time
    at which the step ends, or a call-back; the loop needs none of them.
    """

    @property
    def capabilities(self) -> Capabilities:
        """What it can do; does not change."""

    def start(self, step: Step) -> None:
        """Begins to compute `step`. Does not wait for its end."""

    def poll(self) -> StepResult | None:
        """The result of the step that was started, once it has ended; None while it runs. Does not wait, unless the
        executor computes in the thread of its caller.

        A call that raised may be repeated; a result is returned once.
        """


class Clock(Protocol):
    """Where time comes from."""

    def now(self) -> int:
        """Nanoseconds from any origin. Never decreases."""


class Inbox(Protocol):
    """Where requests and aborts come from."""

    def receive(self) -> Iterable[Command]:
        """The commands that arrived since the last call, in order. Does not wait."""


class Observer(Protocol):
    """Learns what happens. Each call returns soon: the executor may be idle meanwhile."""

    def added(self, request: Request, numbers: tuple[int, ...], now: int) -> None:
        """A request is queued; its choices have these sequence numbers."""

    def refused(self, request: Request, why: str, now: int) -> None:
        """A request was not queued."""

    def began(self, step: Step, now: int) -> None:
        """A step was handed to the executor."""

    def ended(self, step: Step, result: StepResult, resolved: Resolved, now: int) -> None:
        """A step has ended, and the scheduler has applied its result."""

    def aborted(self, finished: tuple[Finished, ...], now: int) -> None:
        """Sequences ended because an abort asked for it."""

    def catch_up(self) -> None:
        """Time for slow work, such as making text: a step is running, or there is nothing to do."""


class EngineLoop:
    """One scheduler and one executor. Methods never wait, and after an exception may be called again."""

    def __init__(
        self, scheduler: Scheduler, executor: StepExecutor, *, clock: Clock, inbox: Inbox, observer: Observer
    ) -> None:
        """Raises `MissingCapabilityError` for a scheduler that uses what the executor lacks."""
        self._capabilities = executor.capabilities
        self._capabilities.check_groups(scheduler.config.groups)
        self.scheduler = scheduler
        self._executor = executor
        self._clock, self._inbox, self._observer = clock, inbox, observer
        self._early = scheduler.plan(clock.now())
        self._step: Step | None = None
        self._next_wake_ns: int | None = None

    @property
    def next_wake_ns(self) -> int | None:
        """After `begin` returned False: the time at which there may be a step even if nothing arrives; None if only
        input can change that."""
        return self._next_wake_ns

    @property
    def computing(self) -> bool:
        """Whether a step is under way."""
        return self._step is not None

    def turn(self) -> bool:
        """`begin`, then `poll`: a whole step, if the executor has its result at once. False if there was none."""
        began = self.begin()
        self.poll()
        return began

    def begin(self) -> bool:
        """Hands the next step to the executor, or continues with the one under way; False if there is none.

        While that runs, the observer catches up on the step before and the next plan is made.
        """
        self._step = self._step or self._next_step()
        self._observer.catch_up()
        if self._step is not None:
            self._receive()
            self._early = self.scheduler.plan(self._clock.now())
        return self._step is not None

    def poll(self) -> bool:
        """Applies the result of the step under way, if the executor has it. False if it runs, or there is none."""
        if self._step is None or (result := self._executor.poll()) is None:
            return False
        now = self._clock.now()
        resolved = self.scheduler.resolve(result, now)
        step, self._step = self._step, None
        self._observer.ended(step, result, resolved, now)
        return True

    def _next_step(self) -> Step | None:
        """The plan made early holds unless what it was made from has changed; one that does nothing may have waited for
        time to pass."""
        self._receive()
        now = self._clock.now()
        holds = self._early.changes == self.scheduler.changes and not self._early.empty
        plan = self._early if holds else self.scheduler.plan(now)
        self._next_wake_ns = plan.next_wake_ns
        if plan.empty:
            return None
        step = self.scheduler.advance(plan)
        self._executor.start(step)
        self._observer.began(step, now)
        return step

    def _receive(self) -> None:
        for command in self._inbox.receive():
            now = self._clock.now()
            if isinstance(command, Abort):
                self._observer.aborted(self.scheduler.abort(*command), now)
            else:
                self._add(command, now)

    def _add(self, request: Request, now: int) -> None:
        if request.arrived_tokens and not self._capabilities.arrived_kv:
            self._observer.refused(request, "this engine cannot take KV that was computed elsewhere", now)
            return
        try:
            numbers = self.scheduler.add(request, now)
        except NeverFitsError as error:
            self._observer.refused(request, str(error), now)
        else:
            self._observer.added(request, numbers, now)
