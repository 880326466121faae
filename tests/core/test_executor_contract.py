"""What the scheduler's tests ask of the checked executor, asked of the kernels too; and settings that need what an
executor lacks, refused at start."""

from collections.abc import Sequence
from functools import partial
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from support.checked_executor import CheckedExecutor
from support.comings import RequestChurn
from support.computing_executor import ComputingExecutor, Make
from support.engines import answer, engine, prompt
from support.scheduling import Session, TrueModel, config, text

from twostep.config.values import MemoryBlocks
from twostep.core.kv_cache import BlockGroup
from twostep.core.loop import Capabilities, EngineLoop, MissingCapabilityError
from twostep.core.policies import TokenBudget
from twostep.core.scheduler import Scheduler
from twostep.errors import UnsupportedError
from twostep.kernels.native import NativeExecutor
from twostep.kernels.reference import ReferenceExecutor
from twostep.kernels.step import Executor
from twostep.model.network import Network


def native(network: Network, blocks: Sequence[int]) -> Executor:
    return NativeExecutor(network, blocks, threads=1)


def shareable(network: Network, blocks: Sequence[int]) -> Executor:
    return NativeExecutor(network, blocks, threads=2, shareable_kv=True)


GROUPS = {
    "full": (BlockGroup(17),),
    "window": (BlockGroup(17), BlockGroup(30, 40)),
    "two windows": (BlockGroup(18), BlockGroup(26, 16), BlockGroup(30, 40)),
}


def crowd(session: Session, seed: int, requests: int) -> None:
    """Prompts that share prefixes, several choices, KV that arrives, aborts, at random times."""
    random = Random(seed)
    shared = text(120)
    for _ in range(requests):
        own = random.randint(1, 60)
        asked = shared[: random.choice([0, 0, 32, 100])] + text(own, random.randint(1, 200))
        arrived = random.choice([0, 0, 0, len(asked) // 2, len(asked) - 1])
        name = session.ask(
            asked,
            random.choice([1, 3, 20, 60]),
            at_ns=random.randint(0, 10**9),
            choices=random.choice([1, 1, 3]),
            arrived_tokens=arrived,
        )
        if random.random() < 0.2:
            session.abort(name, random.randint(0, 2 * 10**9))


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("make", [native, shareable])
@pytest.mark.parametrize("drafts", [0, 3])
def test_kernels_in_sessions_of_the_scheduler(groups: tuple[BlockGroup, ...], make: Make, drafts: int) -> None:
    plans = config(
        groups=groups, max_num_seqs=6, max_num_batched_tokens=300, max_model_len=240, chunking=TokenBudget(50)
    )
    proposed = lambda number, known: drafts * (known % 3)  # noqa: E731
    executor = ComputingExecutor(make, groups, stops=False, drafts=proposed)
    session = Session(plans, executor)
    crowd(session, seed=drafts, requests=30)
    session.run()
    session.check_answers()
    assert session.preemptions, "no sequence lost its blocks"
    assert session.scheduler.counters.prefix_hit_tokens > 0
    assert executor.check_logits() > 150


def test_the_reference_in_a_session_of_the_scheduler() -> None:
    """Its matrix products may round another number of rows otherwise, and K and V to other numbers of 16 bits."""
    groups = GROUPS["two windows"]
    executor = ComputingExecutor(ReferenceExecutor, groups, stops=False, tolerance=0.02)
    session = Session(config(groups=groups, max_num_seqs=4, max_num_batched_tokens=300, max_model_len=240), executor)
    crowd(session, seed=1, requests=8)
    session.run()
    assert executor.check_logits() > 30


class ComputedComings(RequestChurn):
    """The scheduler's state machine over real kernels."""

    make_executor = partial(ComputingExecutor, native)  # type: ignore[assignment]

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "executor"):
            self.executor.check_logits()


def test_kernels_in_any_order_of_events() -> None:
    slow = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    run_state_machine_as_test(
        ComputedComings,
        settings=settings(
            max_examples=12, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=slow
        ),
    )


def test_a_mistake_of_the_kernels_is_noticed() -> None:
    """Else all of the above could hold whatever the kernels do."""
    groups = GROUPS["window"]

    class Forgetful(NativeExecutor):
        def copy_block(self, source: int, target: int, group: int = 0) -> None:
            pass

    executor = ComputingExecutor(partial(Forgetful, threads=1), groups, stops=False)
    session = Session(config(groups=groups, max_num_seqs=4, max_num_batched_tokens=300), executor)
    session.ask(text(20), 8, choices=2)
    with pytest.raises(AssertionError, match="other logits"):
        _ = session.run(), executor.check_logits()


# --- settings that need what an executor lacks


class Lacking(CheckedExecutor):
    def __init__(self, groups: Sequence[BlockGroup], capabilities: Capabilities) -> None:
        super().__init__(groups, stops=False)
        self.capabilities = capabilities


FULL, WINDOW = BlockGroup(100), BlockGroup(50, 40)


@pytest.mark.parametrize(
    ("planned", "own", "message"),
    [
        ((FULL, WINDOW), (FULL,), r"KV groups with windows \(None, 40\), the executor \(None,\)"),
        ((FULL,), (FULL, WINDOW), r"KV groups with windows \(None,\), the executor \(None, 40\)"),
        ((FULL, WINDOW), (FULL, BlockGroup(50, 41)), r"windows \(None, 40\), the executor \(None, 41\)"),
        ((WINDOW, FULL), (FULL, WINDOW), r"windows \(40, None\), the executor \(None, 40\)"),
        ((FULL, WINDOW), (FULL, BlockGroup(49, 40)), "plans 50 KV blocks in group 1; the executor has 49"),
    ],
)
def test_a_scheduler_of_other_groups_is_refused(
    planned: tuple[BlockGroup, ...], own: tuple[BlockGroup, ...], message: str
) -> None:
    with pytest.raises(MissingCapabilityError, match=message):
        Session(config(groups=planned), Lacking(planned, Capabilities(own)))


def test_an_executor_without_kv_memory_carries_out_any_plan() -> None:
    session = Session(config(groups=(FULL, WINDOW)), Lacking((FULL, WINDOW), Capabilities()))
    session.ask(text(20), 3)
    assert len(session.run().answer("0")) == 3


def test_kv_that_an_executor_cannot_take_is_refused() -> None:
    """The request, not the loop: others go on."""
    session = Session(config(groups=(FULL,)), Lacking((FULL,), Capabilities((FULL,))))
    refused, served = session.ask(text(20), 3, arrived_tokens=5), session.ask(text(20), 3)
    session.run()
    assert session.refusals == {refused: "this engine cannot take KV that was computed elsewhere"}
    assert len(session.answer(served)) == 3


def test_an_engine_says_at_its_start_what_its_kernels_lack() -> None:
    def smaller(kernels: Any, sampler: Any) -> tuple[Any, Any]:
        return NativeExecutor(kernels._network, 7, threads=1), sampler

    with pytest.raises(UnsupportedError, match="plans 2000 KV blocks in group 0; the executor has 7"), engine(smaller):
        pass


def test_executors_state_their_memory() -> None:
    with engine(kv_memory=MemoryBlocks(30)) as made:
        assert made.kernels.executor.capabilities.blocks == (30,)
        assert made._executor.capabilities == Capabilities((BlockGroup(30),))
        assert len(answer(made, prompt(20)).choices[0].token_ids) == 8


def test_the_loop_asks_before_anything_is_planned() -> None:
    scheduler = Scheduler(config(groups=(FULL, WINDOW)), TrueModel())
    executor = Lacking((FULL,), Capabilities((FULL,)))
    around: Any = None
    with pytest.raises(MissingCapabilityError):
        EngineLoop(scheduler, executor, clock=around, inbox=around, observer=around)
