"""A recorded run of real kernels, with everything that can happen to it, is decided the same again, byte for byte."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.engines import assert_no_residue, engine, failing, mixed_requests, submit

from twostep.core.loop import Abort
from twostep.core.plan import Plan, Step
from twostep.core.reasons import Why
from twostep.core.request import FinishReason, Request
from twostep.engine.engine import Engine
from twostep.kernels.step import StepCancelledError
from twostep.recording.codec import encode_plan, to_bytes
from twostep.recording.reader import Recording
from twostep.sim.recorded import replay

EVENTFUL = {"kv_memory": "40 blocks", "max_num_seqs": 12, "priority_preempts": True}


def run_with_aborts(made: Engine) -> list[Plan]:
    """Requests come a few a turn; some leave. Returns the plans as they reached the kernels."""
    rng, coming = random.Random(8), mixed_requests(70, seed=8)
    plans: list[Plan] = []
    start = made._executor.start

    def watched(step: Step) -> None:
        plans.append(step.plan)
        start(step)

    made._executor.start = watched  # type: ignore[method-assign]
    while coming or made.outstanding:
        for _ in range(min(len(coming), rng.randint(0, 3))):
            submit(made, coming.pop())
        if rng.random() < 0.05 and made._open:
            made.abort(rng.choice(sorted(made._open)))
        made.turn()
    return plans


def recorded(path: Path) -> Iterator[Plan]:
    return (turn.step.plan for turn in Recording(path).turns() if turn.step)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"chunking": "tokens=48", "overlap": False},
        {"chunking": "time=20"},
        {"admission": "shortest-prefill"},
        {"batching": "static=6", "priority_preempts": False},
    ],
    ids=["usual", "chunked, no overlap", "by time", "shortest first", "static"],
)
def test_an_eventful_run_replays_to_the_same_plans(tmp_path: Path, settings: dict[str, Any]) -> None:
    path = tmp_path / "run"
    faults = {20: StepCancelledError(), 50: MemoryError()}
    with engine(failing(faults), record=path, **{**EVENTFUL, **settings}) as made:
        plans = run_with_aborts(made)
        assert_no_residue(made)
        counters = made.scheduler.counters
    assert_eventful(made, plans, path)
    assert [to_bytes(encode_plan(plan)) for plan in recorded(path)] == [to_bytes(encode_plan(plan)) for plan in plans]
    replayed = replay(Recording(path))
    assert replayed.difference is None
    assert (replayed.same, replayed.steps) == (len(plans), len(plans))
    assert replayed.counters == counters
    assert replayed.requests == 70


def assert_eventful(made: Engine, plans: list[Plan], path: Path) -> None:
    """What the replay is to be tried on did happen."""
    counters = made.scheduler.counters
    assert counters.prefix_hit_tokens > 0
    assert counters.preemptions > 5
    assert all(counters.finished[reason] for reason in FinishReason), "one ended in every way"
    turns = list(Recording(path).turns())
    commands = [command for turn in turns for command in (*turn.before, *turn.during)]
    assert any(isinstance(command, Abort) for command in commands)
    assert len({command.priority for command in commands if isinstance(command, Request)}) == 3
    assert any(chunk.forks for plan in plans for chunk in plan.chunks)
    if made.config.priority_preempts:
        whys = {preemption.reason.why for plan in plans for preemption in plan.preemptions}
        assert whys == {Why.MORE_URGENT, Why.OUT_OF_BLOCKS}


def test_an_interrupted_run_replays_as_well(tmp_path: Path) -> None:
    path = tmp_path / "run"
    faults = {step: RuntimeError("again") for step in (3, 4, 9)}
    with engine(failing(faults), record=path, **EVENTFUL) as made:
        for asked in mixed_requests(30, seed=9):
            submit(made, asked)
        failures = 0
        while made.outstanding:
            try:
                made.turn()
            except RuntimeError:
                failures += 1
        assert failures == 3
    replayed = replay(Recording(path))
    assert replayed.difference is None
    assert replayed.same == replayed.steps == made.scheduler.counters.steps
