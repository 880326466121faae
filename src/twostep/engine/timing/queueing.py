"""How long sequences waited in the queue, by reason: running totals, of which each waiting sequence takes a difference.

A plan says why the first waiting sequence is not admitted; those behind it wait for the same reason, so that a step
costs the same however many wait. Only sequences that wait for a prefix, which others overtake, are counted singly.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from twostep.core.plan import Plan
from twostep.core.reasons import Reason, Why
from twostep.engine.outputs import WaitTime

NO_BUDGET = Reason(Why.NO_BUDGET)
"""The reason if a plan names none: prompts in prefill have used the whole step."""


@dataclass(slots=True, eq=False)
class Wait:
    """A sequence that waits since `since_ns`; totals are compared from the first step that begins then or later."""

    since_ns: int
    ns: Counter[Why] | None = None
    steps: Counter[Why] = field(default_factory=Counter)


class _Totals(NamedTuple):
    ns: Counter[Why]
    steps: Counter[Why]


class QueueWatch:
    """Is told of every step as it begins. Totals are updated when the reason changes, or a sequence starts or stops
    waiting."""

    def __init__(self, wait_of: Callable[[int], Wait | None]) -> None:
        """`wait_of` returns the wait of a sequence by number, None if it does not wait."""
        self._wait_of = wait_of
        self._ns: Counter[Why] = Counter()
        self._steps: Counter[Why] = Counter()
        self._reasons: dict[Why, Reason] = {}
        self._why: Why | None = None
        self._since_ns = 0
        """The time that totals are complete up to."""
        self._steps_since = 0
        self._apart: tuple[int, ...] = ()
        self._began_ns = 0
        """Start of the last step."""
        self._fresh: list[Wait] = []

    def begin(self, since_ns: int) -> Wait:
        """A sequence starts waiting."""
        wait = Wait(since_ns)
        self._fresh.append(wait)
        return wait

    def step(self, plan: Plan, began_ns: int) -> None:
        """A step begins; until the next one, sequences wait for the reasons in its plan."""
        self._track_prefix_waits(began_ns)
        reason = self._reason(plan) if plan.not_admitted else NO_BUDGET
        if reason.why is not self._why or self._fresh:
            self._update(began_ns)
            self._start_waiting(began_ns)
            self._why, self._reasons[reason.why] = reason.why, reason
        self._began_ns = began_ns
        self._steps_since += 1

    def end(self, wait: Wait, at_ns: int) -> tuple[WaitTime, ...]:
        """A sequence stopped waiting, at the start of the last step or later. Returns its times by reason, the longest
        first. The rest of its wait passed before the first step that could have admitted it."""
        if wait.ns is None:
            self._fresh.remove(wait)
            return ()
        ended = self._ended(at_ns)
        took_ns, steps = ended.ns, ended.steps
        took_ns.subtract(wait.ns)
        steps.subtract(wait.steps)
        return tuple(WaitTime(self._reasons[why], ns, steps[why]) for why, ns in took_ns.most_common() if ns)

    def _ended(self, at_ns: int) -> _Totals:
        """Totals at this moment, without a step that begins at it."""
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
        """The last sequence in the plan stops all behind it; others wait for a prefix and are overtaken."""
        reason, apart = NO_BUDGET, []
        for waiting in plan.not_admitted:
            self._reasons[waiting.reason.why] = waiting.reason
            if waiting.reason.why is Why.SHARES_PREFIX:
                apart.append(waiting.number)
            else:
                reason = waiting.reason
        self._apart = tuple(apart)
        return reason

    def _track_prefix_waits(self, now: int) -> None:
        """Corrects the totals of sequences that waited for a prefix since the last step, not for the common reason."""
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
