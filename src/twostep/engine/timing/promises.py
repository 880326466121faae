"""How the promise of a time budget was kept: steps that broke it, those that said so before, and what to tell the user
about a budget that is impossible on this machine."""

from dataclasses import dataclass

from twostep.core.cost import CostModel
from twostep.core.plan import Plan
from twostep.core.scheduler import STARVED_PART


@dataclass(frozen=True, slots=True)
class Promised:
    """Totals of steps with a promise since the start, and the last budget, for metrics."""

    budget_ns: int = 0
    """Of the last such step; 0 before the first."""
    steps: int = 0
    late: int = 0
    """Took longer than the budget, though they were not planned to."""
    late_starved: int = 0
    """Of these, steps whose kernels were kept from the cores for more than a fifth of the time."""
    over_decodes: int = 0
    """Known before to take longer: the decodes alone exceed the budget."""
    over_prompts: int = 0
    """Known before to take longer: not one token of a prompt fits beside the decodes."""
    least_ns: int = 0
    """The least budget that was possible for the batch of the last step known to take longer; 0 without one."""


class PromiseMeter:
    """Is told of every step."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._steps = self._late = self._late_starved = self._over_decodes = self._over_prompts = 0
        self._budget_ns = self._least_ns = 0
        self._said: set[tuple[bool, int]] = set()
        self._notes: list[str] = []

    def add(self, plan: Plan, kernel_ns: int, starved_ns: int, took_ns: int) -> None:
        """A step ended, `took_ns` after the one before."""
        if plan.promise is None:
            return
        self._steps += 1
        self._budget_ns = plan.promise.budget_ns
        if plan.over_budget:
            self._over(plan)
        elif took_ns > self._budget_ns:
            self._late += 1
            self._late_starved += starved_ns * STARVED_PART > kernel_ns

    def promised(self) -> Promised:
        return Promised(
            self._budget_ns,
            self._steps,
            self._late,
            self._late_starved,
            self._over_decodes,
            self._over_prompts,
            self._least_ns,
        )

    def take_notes(self) -> list[str]:
        """What a log should say, once for each situation: a budget that cannot be kept, for decodes alone or only with
        prompts, and a batch of about this size (its power of two)."""
        notes, self._notes = self._notes, []
        return notes

    def _over(self, plan: Plan) -> None:
        assert plan.promise is not None
        alone = plan.promise.decodes_exceed
        self._over_decodes += alone
        self._over_prompts += not alone
        situation = alone, plan.decoding.bit_length()
        if situation not in self._said or not self._steps % 64:
            self._least_ns = _least_ns(plan, self._cost)
        if situation not in self._said:
            self._said.add(situation)
            self._notes.append(_note(plan, self._least_ns))


def _least_ns(plan: Plan, cost: CostModel) -> int:
    """The least budget that this batch could keep: its decodes, and one token of the prompt if there is one."""
    assert plan.promise is not None
    shape = plan.shape
    for chunk in plan.chunks:
        sampled = (1 + chunk.drafts) * chunk.samples
        shape = shape.without_slice(chunk.start, chunk.tokens, sampled)
    if plan.chunks:
        shape = shape.with_slice(plan.chunks[0].start, 1, 0)
    return cost.estimate(shape).bound_ns + plan.promise.overhead_ns


def _note(plan: Plan, least_ns: int) -> str:
    assert plan.promise is not None
    promise = plan.promise
    decodes_ms = (promise.decodes_ns + promise.overhead_ns) / 1e6
    alone = f"a step takes up to {decodes_ms:.1f} ms where {plan.decoding} sequences decode"
    why = alone if promise.decodes_exceed else f"{alone}, which leaves no time for a token of a prompt"
    return (
        f"the ITL budget of {promise.budget_ns / 1e6:.1f} ms cannot be kept on this machine: {why}; the least possible "
        f"for this batch is {least_ns / 1e6:.1f} ms. Prompts advance slowly meanwhile"
    )
