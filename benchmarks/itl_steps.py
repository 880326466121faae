"""What a recording of Twostep says of the steps in which streams ran while a prompt was computed."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from twostep.core.loop import Abort
from twostep.core.plan import Plan, StepResult
from twostep.core.scheduler import STARVED_PART
from twostep.recording.reader import Recording


@dataclass(frozen=True)
class Steps:
    """Counts of steps that computed a part of a prompt beside streams."""

    steps: int
    late: int
    """Longer than their budget, from the end of the step before to their own; 0 without a budget."""
    late_disturbed: int
    """Of these, steps in which the kernels were kept from the cores for more than a 5th of the time."""
    disturbed: int
    impossible: int
    """Known before to exceed the budget: not even one token of the prompt fitted."""
    budget_ms: float | None
    """Mean."""
    host_ms: float
    """Mean time outside the kernels."""


@dataclass(frozen=True)
class _Step:
    plan: Plan
    result: StepResult
    took_ns: int
    """From the end of the step before."""


def read(path: Path) -> dict[tuple[int, int], Steps]:
    """By number of streams and tokens of the newcomers' prompts, as `benchmarks.itl` asks for them."""
    found = dict[tuple[int, int], list[_Step]]()
    prompts, before_ns = dict[int, int](), 0
    for turn in Recording(path).turns():
        for request in (*turn.before, *turn.during):
            if not isinstance(request, Abort):
                prompts[len(prompts) + 1] = request.prompt_tokens
        if turn.step is None:
            continue
        plan, ended_ns = turn.step.plan, turn.times_ns[-1]
        longest = max((prompts[chunk.number] for chunk in plan.chunks if chunk.number in prompts), default=0)
        if plan.decoding and longest > SHORT:
            streams = min(COUNTS, key=lambda count: abs(count - plan.decoding))
            found.setdefault((streams, longest), []).append(_Step(plan, turn.step.result, ended_ns - before_ns))
        before_ns = ended_ns
    return {key: _counted(steps) for key, steps in found.items()}


SHORT = 32
"""Tokens of a stream's prompt."""
COUNTS = (4, 16)
"""Of the streams; while one is asked for again there are fewer."""


def _counted(steps: list[_Step]) -> Steps:
    late, disturbed = list(_late(steps)), [step for step in steps if _disturbed(step)]
    budgets = [step.plan.promise.budget_ns for step in steps if step.plan.promise]
    return Steps(
        steps=len(steps),
        late=len(late),
        late_disturbed=sum(map(_disturbed, late)),
        disturbed=len(disturbed),
        impossible=sum(step.plan.over_budget for step in steps),
        budget_ms=sum(budgets) / len(budgets) / 1e6 if budgets else None,
        host_ms=sum(step.took_ns - step.result.step_ns for step in steps) / len(steps) / 1e6,
    )


def _late(steps: list[_Step]) -> Iterator[_Step]:
    yield from (step for step in steps if step.plan.promise and step.took_ns > step.plan.promise.budget_ns)


def _disturbed(step: _Step) -> bool:
    return step.result.starved_ns * STARVED_PART > step.result.step_ns
