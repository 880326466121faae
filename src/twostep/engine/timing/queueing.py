"""For how long the queue was held up, by reason: running totals, of which each sequence that waits takes a difference.

A plan names why the first sequence that has to wait is not admitted; those behind it wait for the same reason. So a
step costs the same however many wait. Only those that wait for a prefix, and are passed, are counted one by one.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from twostep.core.plan import Plan
from twostep.core.reasons import Reason, Why
from twostep.engine.outputs import WaitTime

NO_BUDGET = Reason(Why.NO_BUDGET)
"""Where a plan names nobody, prompts in prefill have used the step up before the queue's turn came."""


@dataclass(slots=True, eq=False)
class Wait:
    """A sequence waits since `since_ns`; totals are compared from the first step on that begins then or later."""

    since_ns: int
    ns: Counter[Why] | None = None
    steps: Counter[Why] = field(default_factory=Counter)


class _Totals(NamedTuple):
    ns: Counter[Why]
    steps: Counter[Why]


class QueueWatch:
    """Hears of every step as it begins. Totals are brought up to date where the reason changes, or somebody begins or
    ends to wait."""

    def __init__(self, wait_of: Callable[[int], Wait | None]) -> None:
        """`wait_of`: of the sequence of a number, if it waits."""
        self._wait_of = wait_of
        self._ns: Counter[Why] = Counter()
        self._steps: Counter[Why] = Counter()
        self._reasons: dict[Why, Reason] = {}
        self._why: Why | None = None
        self._since_ns = 0
        """Up to here totals are up to date."""
        self._steps_since = 0
        self._apart: tuple[int, ...] = ()
        self._began_ns = 0
        """The last step."""
        self._fresh: list[Wait] = []

    def begin(self, since_ns: int) -> Wait:
        """A sequence waits from now on."""
        wait = Wait(since_ns)
        self._fresh.append(wait)
        return wait

    def step(self, plan: Plan, began_ns: int) -> None:
        """A step begins: until the next one those that wait do so for its reasons."""
        self._set_apart(began_ns)
        reason = self._reason(plan) if plan.not_admitted else NO_BUDGET
        if reason.why is not self._why or self._fresh:
            self._update(began_ns)
            self._start_waiting(began_ns)
            self._why, self._reasons[reason.why] = reason.why, reason
        self._began_ns = began_ns
        self._steps_since += 1

    def end(self, wait: Wait, at_ns: int) -> tuple[WaitTime, ...]:
        """It waits no longer, since the last step began or later: its times by reason, the longest first. What they
        lack of the whole wait passed before a step could begin that might have had it."""
        if wait.ns is None:
            self._fresh.remove(wait)
            return ()
        ended = self._ended(at_ns)
        took_ns, steps = ended.ns, ended.steps
        took_ns.subtract(wait.ns)
        steps.subtract(wait.steps)
        return tuple(WaitTime(self._reasons[why], ns, steps[why]) for why, ns in took_ns.most_common() if ns)

    def _ended(self, at_ns: int) -> _Totals:
        """Totals at this moment: a step that begins just then holds nobody up any more."""
        ns, steps = Counter(self._ns), Counter(self._steps)
        if self._why is not None:
            ns[self._why] += at_ns - self._since_ns
            steps[self._why] += self._steps_since - (at_ns <= self._began_ns)
        return _Totals(ns, steps)

    def _update(self, now: int) -> None:
        if self._why is not None:
            self._ns[self._why] += now - self._since_ns
            self._steps[self._why] += self._steps_since
        self._since_ns, self._steps_since = now, 0

    def _start_waiting(self, now: int) -> None:
        waiting = [wait for wait in self._fresh if wait.since_ns <= now]
        self._fresh = [wait for wait in self._fresh if wait.since_ns > now]
        for wait in waiting:
            wait.ns, wait.steps = Counter(self._ns), Counter(self._steps)

    def _reason(self, plan: Plan) -> Reason:
        """The last that is named stops all behind it; those that wait for a prefix are passed."""
        reason, apart = NO_BUDGET, []
        for waiting in plan.not_admitted:
            self._reasons[waiting.reason.why] = waiting.reason
            if waiting.reason.why is Why.SHARES_PREFIX:
                apart.append(waiting.number)
            else:
                reason = waiting.reason
        self._apart = tuple(apart)
        return reason

    def _set_apart(self, now: int) -> None:
        """These waited for a prefix since the last step, not for what held up the others."""
        for number in self._apart:
            wait = self._wait_of(number)
            if wait and wait.ns is not None and self._why is not None:
                _move(wait, self._why, now - self._began_ns)
        self._apart = ()


def _move(wait: Wait, why: Why, took_ns: int) -> None:
    assert wait.ns is not None
    wait.ns[why] += took_ns
    wait.steps[why] += 1
    wait.ns[Why.SHARES_PREFIX] -= took_ns
    wait.steps[Why.SHARES_PREFIX] -= 1
