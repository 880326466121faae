"""A whole workload on the real engine, and simulated: the same plans, whatever the steps took."""

import argparse
import asyncio
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from support.engines import STORIES

from twostep.cli.bench_offline import Offline
from twostep.core.cost import Cost, StepShape, Terms
from twostep.core.plan import Plan
from twostep.recording.reader import Recording
from twostep.recording.writer import Recorder
from twostep.sim.simulation import ReplicaSpec, recorded_by, simulate
from twostep.workload.definition import Workload, WorkloadRequest
from twostep.workload.schedule import Closed, Mode, Open


class AnyTime:
    """Plans by tokens do not depend on it."""

    def estimate(self, shape: StepShape) -> Cost:
        ns = 1_000_000 + 1000 * shape.tokens
        return Cost(ns, ns, Terms(linear=ns))

    def observe(self, shape: StepShape, measured_ns: int) -> None:
        pass


def shared_prompts(seed: int) -> Workload:
    """Requests that all arrive at once; some begin with the same blocks."""
    rng, requests = Random(seed), list[WorkloadRequest]()
    for number in range(30):
        document = rng.randrange(3)
        shared = tuple(range(document * 10, document * 10 + rng.randrange(8)))
        blocks = (*shared, *(1000 + number * 100 + i for i in range(rng.randrange(3))))
        requests.append(WorkloadRequest(0.0, 16 * len(blocks) + rng.randrange(1, 60), rng.randrange(1, 70), blocks))
    return Workload(requests)


def served(made: Workload, mode: Mode, path: Path, **settings: object) -> Recording:
    """Runs it on the engine with the tiny model."""
    options = argparse.Namespace(model=str(STORIES), salt="same", warmup=0, time_limit_s=None)
    offline = Offline(options, {**settings, "record": path, "threads": 1, "skip_tokenizer_init": True})
    try:
        record, _ = asyncio.run(offline.run(made, mode, asyncio.Event()))
    finally:
        offline.close()
    assert all(one.failure is None for one in record.outcomes)
    return Recording(path)


def simulated(made: Workload, mode: Mode, path: Path, like: Recording) -> Recording:
    """With the settings that the engine had."""
    settings = like.header.settings
    with Recorder(path, settings, {}) as recorder:
        simulate(made, mode, [ReplicaSpec(settings, AnyTime())], recorded=recorded_by(recorder))
    return Recording(path)


def plans(recording: Recording) -> list[Plan]:
    """All, without the count of changes: an answer whose end the scheduler knows before changes one time more."""
    return [replace(turn.step.plan, changes=0) for turn in recording.turns() if turn.step]


@pytest.mark.parametrize("mode", [Open(), Closed(1), Closed(4)])
@pytest.mark.parametrize("blocks", [40, 400])
def test_the_simulator_plans_as_the_engine_did(tmp_path: Path, mode: Mode, blocks: int) -> None:
    """Prefix hits, evictions, preemptions and all. The engine knows how long answers may become, the simulated one does
    not; hashes have other names."""
    made = shared_prompts(blocks)
    real = served(made, mode, tmp_path / "real", kv_memory=f"{blocks} blocks", max_num_seqs=8, chunking="tokens=40")
    ours, theirs = plans(simulated(made, mode, tmp_path / "simulated", real)), plans(real)
    assert len(theirs) > 50
    assert ours == theirs
    admitted = [admission for plan in theirs for admission in plan.admissions]
    assert sum(admission.cached for admission in admitted) > 0
    if blocks == 40 and mode == Open():
        assert any(plan.preemptions for plan in theirs)
