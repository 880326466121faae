"""Requests that end early: wherever they are, their blocks are back and nobody else notices."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.engines import (
    answer,
    assert_no_residue,
    engine,
    failing,
    mixed_requests,
    prompt,
    run,
    said,
    submit,
    tokens_of,
)

from twostep.core.request import Stage
from twostep.engine.engine import Engine
from twostep.engine.outputs import RequestOutput
from twostep.engine.params import SamplingParams
from twostep.errors import InvalidParameterError
from twostep.kernels.step import StepCancelledError

LONG = SamplingParams(max_tokens=100, temperature=0)


@pytest.fixture(params=[True, False], ids=["overlap", "no overlap"])
def made(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Room for two; a long prompt takes several steps."""
    with engine(max_num_seqs=2, chunking="tokens=64", overlap=request.param) as made:
        yield made


def stages(made: Engine) -> list[Stage]:
    return [seq.stage for seq in made.scheduler.live.values()]


def while_a_step_runs(made: Engine, do: Callable[[], None]) -> None:
    """Does it once, when the next step has been handed to the kernels and before its end is looked at."""
    surroundings = made._io
    catch_up = surroundings.catch_up

    def once() -> None:
        del surroundings.catch_up  # type: ignore[method-assign]
        do()
        catch_up()

    surroundings.catch_up = once  # type: ignore[method-assign]


def assert_works(made: Engine) -> None:
    assert_no_residue(made)
    with engine() as fresh:
        assert said(answer(made, prompt(90, seed=77), logprobs=1)) == said(
            answer(fresh, prompt(90, seed=77), logprobs=1)
        )
    assert_no_residue(made)


def assert_aborted(output: RequestOutput, tokens: int) -> None:
    [choice] = output.choices
    assert (choice.finish_reason, len(choice.token_ids), choice.error) == ("abort", tokens, None)
    assert len(choice.timeline.token_ns) == tokens


# --- where it is --------------------------------------------------------------------------------------------------


def test_before_the_engine_has_heard_of_it(made: Engine) -> None:
    id_ = made.submit(prompt(20), LONG)
    made.abort(id_)
    assert_aborted(run(made)[id_], tokens=0)
    assert_works(made)


def test_in_the_queue(made: Engine) -> None:
    others = [made.submit(prompt(10, seed=i), SamplingParams(max_tokens=12, seed=i)) for i in range(2)]
    id_ = made.submit(prompt(20), LONG)
    made.turn()
    assert stages(made) == [Stage.DECODE, Stage.DECODE, Stage.WAITING]
    made.abort(id_)
    outputs = run(made)
    assert_aborted(outputs[id_], tokens=0)
    assert outputs[id_].choices[0].timeline.first_scheduled_ns is None
    assert {outputs[other].choices[0].finish_reason for other in others} == {"length"}
    assert_works(made)


def test_in_prefill(made: Engine) -> None:
    id_ = made.submit(prompt(300), LONG)
    made.turn()
    made.turn()
    assert stages(made) == [Stage.PREFILL]
    made.abort(id_)
    output = run(made)[id_]
    assert_aborted(output, tokens=0)
    assert sum(chunk.tokens for chunk in output.choices[0].timeline.chunks) == 128
    assert_works(made)


def test_in_decode(made: Engine) -> None:
    id_ = made.submit(prompt(20), LONG)
    for _ in range(5):
        made.turn()
    assert stages(made) == [Stage.DECODE]
    made.abort(id_)
    output = run(made)[id_]
    assert_aborted(output, tokens=5)
    assert tokens_of(output) == tokens_of(answer(made, prompt(20), max_tokens=5))
    assert_works(made)


@pytest.mark.parametrize(("turns", "length", "tokens"), [(0, 20, 0), (0, 300, 0), (2, 300, 0), (4, 20, 4)])
def test_while_a_step_computes_it(made: Engine, turns: int, length: int, tokens: int) -> None:
    """What the step gives is dropped; its blocks are given out again only afterwards."""
    id_ = made.submit(prompt(length), LONG)
    for _ in range(turns):
        made.turn()
    while_a_step_runs(made, lambda: made.abort(id_))
    assert_aborted(run(made)[id_], tokens)
    assert_works(made)


def test_while_the_step_of_its_last_token_runs(made: Engine) -> None:
    id_ = made.submit(prompt(20), SamplingParams(max_tokens=3, temperature=0))
    made.turn()
    made.turn()
    while_a_step_runs(made, lambda: made.abort(id_))
    made.turn()
    assert_aborted(run(made)[id_], tokens=2)
    assert_works(made)


def test_while_a_step_runs_that_fails() -> None:
    with engine(failing({2: StepCancelledError(), 3: MemoryError()})) as made:
        ids = [made.submit(prompt(20, seed=i), LONG, id=str(i)) for i in range(3)]
        made.turn()
        while_a_step_runs(made, lambda: made.abort(ids[0]))
        made.turn()
        while_a_step_runs(made, lambda: made.abort(ids[1]))
        outputs = run(made)
        assert_aborted(outputs["0"], tokens=1)
        assert outputs["1"].choices[0].finish_reason == "abort"
        assert_works(made)


def test_after_a_preemption() -> None:
    with engine(kv_memory="24 blocks") as made:
        ids = [made.submit(prompt(100, seed=i), LONG) for i in range(3)]
        while not made.scheduler.counters.preemptions:
            made.turn()
        [preempted] = [n for n, seq in made.scheduler.live.items() if seq.stage is Stage.WAITING][-1:]
        made.abort(ids[preempted - 1])
        outputs = run(made)
        assert [outputs[id_].choices[0].finish_reason for id_ in ids].count("abort") == 1
        assert_works(made)


@pytest.mark.parametrize("turns", range(6))
def test_several_choices_leave_together(turns: int) -> None:
    """Two seats: one of three choices waits while the others run."""
    with engine(max_num_seqs=2, chunking="tokens=64") as made:
        id_ = made.submit(prompt(100), SamplingParams(max_tokens=50, n=3))
        for _ in range(turns):
            made.turn()
        made.abort(id_)
        assert [choice.finish_reason for choice in run(made)[id_].choices] == ["abort"] * 3
        assert_works(made)


# --- twice, late, unknown -----------------------------------------------------------------------------------------


def test_aborting_twice_or_somebody_unknown_does_nothing(made: Engine) -> None:
    id_ = made.submit(prompt(20), LONG)
    made.abort("nobody")
    made.turn()
    for _ in range(3):
        made.abort(id_)
    assert list(run(made)) == [id_]
    made.abort(id_)
    made.turn()
    assert_works(made)


def test_an_id_is_free_again_at_once_and_its_late_abort_hits_nobody(made: Engine) -> None:
    made.submit(prompt(20), LONG, id="mine")
    made.turn()
    with pytest.raises(InvalidParameterError, match="id is 'mine'; it has to be text that no unfinished request has"):
        made.submit(prompt(20), LONG, id="mine")
    made.abort("mine")
    made.abort("mine")
    run(made)
    made.submit(prompt(20), SamplingParams(max_tokens=4), id="mine")
    assert run(made)["mine"].choices[0].finish_reason == "length"
    assert_works(made)


def test_what_an_aborted_request_computed_is_found_by_its_retry(made: Engine) -> None:
    """CASES 13."""
    id_ = made.submit(prompt(300), LONG)
    made.turn()
    made.turn()
    made.abort(id_)
    run(made)
    assert answer(made, prompt(300)).cached_tokens == 128


# --- all of them --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("turns", [0, 1, 2, 7, 20])
def test_abort_all_leaves_an_engine_that_works(made: Engine, turns: int) -> None:
    for asked in mixed_requests(20, seed=4):
        submit(made, asked)
    for _ in range(turns):
        made.turn()
    made.abort_all()
    assert_works(made)


@pytest.mark.parametrize("seed", range(3))
def test_fifty_random_aborts_leave_no_residue_and_disturb_nobody(made: Engine, seed: int) -> None:
    """CASES 21. Some between steps, some while one runs, into a cache that is short as well."""
    rng, crowd = random.Random(seed), mixed_requests(80, seed=20 + seed)
    outputs: dict[str, Any] = {}
    with engine(kv_memory="60 blocks", chunking="tokens=64", overlap=made.config.overlap) as busy, engine() as calm:
        for asked in crowd:
            submit(busy, asked)
            submit(calm, asked)
        leaving = [asked.id for asked in rng.sample(crowd, 50)]
        while busy.outstanding:
            if leaving and rng.random() < 0.3:
                id_ = leaving.pop()
                if rng.random() < 0.5:
                    while_a_step_runs(busy, lambda id_=id_: busy.abort(id_))  # type: ignore[misc]
                else:
                    busy.abort(id_)
            outputs |= {event.id: event for event in busy.turn() if isinstance(event, RequestOutput)}
        assert_works(busy)
        for id_, undisturbed in run(calm).items():
            for mine, theirs in zip(said(outputs[id_]), said(undisturbed), strict=True):
                assert mine == theirs or (mine[3] == "abort" and mine[2] == theirs[2][: len(mine[2])])
        reasons = [choice.finish_reason for output in outputs.values() for choice in output.choices]
        assert reasons.count("abort") > 10
        assert reasons.count("length") + reasons.count("stop") > 10
