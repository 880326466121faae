"""A scheduler without kernels: steps are planned, advanced and resolved, but not computed."""

from itertools import count
from time import perf_counter_ns
from typing import NamedTuple

from twostep.config.configs import SchedulerSettings
from twostep.core.cost import StepShape
from twostep.core.plan import Plan, Resolved, Step, StepResult
from twostep.core.policies import TimeBudget
from twostep.core.request import BLOCK_TOKENS, Request
from twostep.core.scheduler import Scheduler
from twostep.perf.linear import LinearCostModel


def step_ns(shape: StepShape) -> int:
    """Simulated duration of a step, about SmolLM2 on two cores, so that the cost model has something to fit."""
    return 3_000_000 + 900_000 * shape.tokens + 20 * shape.pairs + 200_000 * shape.logit_rows


class Turn(NamedTuple):
    """One step, and the time that scheduling took."""

    plan: Plan
    resolved: Resolved
    plan_ns: int
    advance_ns: int
    resolve_ns: int

    @property
    def total_ns(self) -> int:
        return self.plan_ns + self.advance_ns + self.resolve_ns


class Rig:
    """A scheduler with a fake executor, which returns a token per sequence and the hash of each full block.

    Requests share no prefixes. With `hashing` off, the prefix cache is unused.
    """

    def __init__(self, settings: SchedulerSettings, *, hashing: bool = True) -> None:
        by_time = isinstance(settings.chunking, TimeBudget)
        self.scheduler = Scheduler(settings.config(), LinearCostModel() if by_time else None)
        self._hashing = hashing
        self._ids, self._names = count(), count()
        self._clock_ns = 0
        self._positions: dict[int, int] = {}

    def arrive(self, prompt_tokens: int, max_tokens: int, *, arrived: bool = False) -> int:
        """Queues a request. Returns the time for that in ns. `arrived`: the KV of all prompt tokens but the last
        arrives with it, so that it decodes after one step."""
        hashes = tuple(self._name() for _ in range(prompt_tokens // BLOCK_TOKENS)) if self._hashing else ()
        here = prompt_tokens - 1 if arrived else 0
        request = Request(str(next(self._ids)), prompt_tokens, max_tokens, hashes, arrived_tokens=here)
        started = perf_counter_ns()
        self.scheduler.add(request, self._clock_ns)
        return perf_counter_ns() - started

    def turn(self) -> Turn:
        """Runs one step. Making the result is not part of the measured time."""
        began = perf_counter_ns()
        plan = self.scheduler.plan(self._clock_ns)
        planned = perf_counter_ns()
        step = self.scheduler.advance(plan)
        advanced = perf_counter_ns()
        result = self._result(step)
        self._clock_ns += result.step_ns
        ended = perf_counter_ns()
        resolved = self.scheduler.resolve(result)
        return Turn(plan, resolved, planned - began, advanced - planned, perf_counter_ns() - ended)

    def _result(self, step: Step) -> StepResult:
        for number in step.left:
            del self._positions[number]
        self._positions.update(step.joined)
        hashes = {}
        for number, position in self._positions.items():
            self._positions[number] = position + 1
            if self._hashing and (position + 1) % BLOCK_TOKENS == 0:
                hashes[number] = (self._name(),)
        return StepResult(step_ns(step.plan.shape), hashes=hashes)

    def _name(self) -> bytes:
        return next(self._names).to_bytes(16, "little")
