"""For how long the queue was held up, by reason: running totals, of which each sequence that waits takes a difference.

A plan names why the first sequence that has to wait is not admitted; those behind it wait for the same reason. So a
step costs the same however many wait. Only those that wait for a prefix, and are passed, are counted one by one.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from twostep.core.plan import Plan
from twostep.core.reasons import Reason, Why
from twostep.engine.outputs import Held

NO_BUDGET = Reason(Why.NO_BUDGET)
"""Where a plan names nobody, prompts in prefill have used the step up before the queue's turn came."""


@dataclass(slots=True, eq=False)
class Wait:
    """A sequence waits since `since_ns`; totals are compared from the first step on that begins then or later."""

    since_ns: int
    ns: Counter[Why] | None = None
    steps: Counter[Why] = field(default_factory=Counter)


class QueueWatch:
    """Hears of every step as it begins."""

    def __init__(self, wait_of: Callable[[int], Wait | None]) -> None:
        """`wait_of`: of the sequence of a number, if it waits."""
        self._wait_of = wait_of
        self._ns: Counter[Why] = Counter()
        self._steps: Counter[Why] = Counter()
        self._reasons: dict[Why, Reason] = {}
        self._why: Why | None = None
        self._apart: tuple[int, ...] = ()
        self._began_ns = 0
        self._fresh: list[Wait] = []

    def begin(self, since_ns: int) -> Wait:
        """A sequence waits from now on."""
        wait = Wait(since_ns)
        self._fresh.append(wait)
        return wait

    def step(self, plan: Plan, began_ns: int) -> None:
        """A step begins: until the next one those that wait do so for its reasons."""
        self._close(began_ns)
        waiting = [wait for wait in self._fresh if wait.since_ns <= began_ns]
        if waiting:
            self._fresh = [wait for wait in self._fresh if wait.since_ns > began_ns]
        for wait in waiting:
            wait.ns, wait.steps = Counter(self._ns), Counter(self._steps)
        self._began_ns = began_ns
        self._take_reasons(plan)

    def end(self, wait: Wait, at_ns: int) -> tuple[Held, ...]:
        """It waits no longer: its times by reason, the longest first. What they lack of the whole wait passed before
        a step could begin that might have had it."""
        if wait.ns is None:
            if wait in self._fresh:
                self._fresh.remove(wait)
            return ()
        ns, steps = Counter(self._ns), Counter(self._steps)
        if self._why is not None and at_ns > self._began_ns:
            ns[self._why] += at_ns - self._began_ns
            steps[self._why] += 1
        ns.subtract(wait.ns)
        steps.subtract(wait.steps)
        return tuple(Held(self._reasons[why], took_ns, steps[why]) for why, took_ns in ns.most_common() if took_ns)

    def _close(self, now: int) -> None:
        if self._why is None:
            return
        took_ns = now - self._began_ns
        self._ns[self._why] += took_ns
        self._steps[self._why] += 1
        for number in self._apart:
            if (wait := self._wait_of(number)) and wait.ns is not None:
                _move(wait, self._why, took_ns)

    def _take_reasons(self, plan: Plan) -> None:
        reason, apart = NO_BUDGET, []
        for held in plan.held:
            self._reasons[held.reason.why] = held.reason
            if held.reason.why is Why.SHARES_PREFIX:
                apart.append(held.number)
            else:
                reason = held.reason
        self._reasons[reason.why] = reason
        self._why, self._apart = reason.why, tuple(apart)


def _move(wait: Wait, why: Why, took_ns: int) -> None:
    """This one waited for a prefix meanwhile, not for what held up the others."""
    assert wait.ns is not None
    wait.ns[why] += took_ns
    wait.steps[why] += 1
    wait.ns[Why.SHARES_PREFIX] -= took_ns
    wait.steps[Why.SHARES_PREFIX] -= 1
