"""Steps that fail: whoever is to blame gets an error, the others their answers, and the engine goes on."""

import signal
import threading
import time
from typing import Any

import pytest
from support.engines import (
    Asked,
    SpoiltSampler,
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
    watching,
)

from twostep.engine.engine import Engine
from twostep.engine.outputs import RequestOutput
from twostep.engine.params import SamplingParams
from twostep.kernels.step import StepArrays, StepCancelledError

CROWD = mixed_requests(30, seed=11)
BOTH = pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])


def answers(made: Engine, crowd: list[Asked] = CROWD) -> dict[str, Any]:
    for asked in crowd:
        submit(made, asked)
    outputs = run(made)
    assert_no_residue(made)
    return outputs


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Any]:
    with engine() as made:
        return {id_: said(output) for id_, output in answers(made).items()}


def failed_choices(outputs: dict[str, RequestOutput]) -> list[tuple[str, int, str | None]]:
    return [
        (id_, choice.index, choice.error)
        for id_, output in outputs.items()
        for choice in output.choices
        if choice.finish_reason == "error"
    ]


def assert_others_are_undisturbed(
    outputs: dict[str, RequestOutput], undisturbed: dict[str, Any], failed: list[tuple[str, int, str | None]]
) -> None:
    gone = {(id_, index) for id_, index, _ in failed}
    for id_, output in outputs.items():
        for mine, theirs in zip(said(output), undisturbed[id_], strict=True):
            assert (id_, mine[0]) in gone or mine == theirs


# --- out of memory (CASES 20) -------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("step", [1, 5, 20])
@pytest.mark.parametrize("settings", [{}, {"max_num_seqs": 4}, {"kv_memory": "48 blocks", "chunking": "tokens=64"}])
def test_running_out_of_memory_ends_one_request(
    undisturbed: dict[str, Any], step: int, settings: dict[str, Any], overlap: bool
) -> None:
    """Small caches and few seats: those that begin again meet those that wait."""
    with engine(failing({step: MemoryError()}), overlap=overlap, **settings) as made:
        outputs = answers(made)
        failed = failed_choices(outputs)
        assert len(failed) == 1
        assert failed[0][2] == "there was no memory for a step of this request"
        assert_others_are_undisturbed(outputs, undisturbed, failed)
        assert {id_: said(output) for id_, output in answers(made).items()} == undisturbed


def test_the_widest_slice_is_to_blame() -> None:
    with engine(failing({3: MemoryError()})) as made:
        made.submit(prompt(10), SamplingParams(max_tokens=20, temperature=0), id="decodes")
        made.turn()
        made.turn()
        made.submit(prompt(300), SamplingParams(max_tokens=5), id="long")
        made.submit(prompt(30, seed=1), SamplingParams(max_tokens=5), id="short")
        assert [id_ for id_, *_ in failed_choices(run(made))] == ["long"]


def test_where_all_decode_one_of_them_is_to_blame() -> None:
    with engine(failing({4: MemoryError()})) as made:
        for i in range(3):
            made.submit(prompt(10, seed=i), SamplingParams(max_tokens=20), id=str(i))
        outputs = run(made)
        [(id_, _, _)] = failed_choices(outputs)
        assert len(outputs[id_].choices[0].token_ids) == 3, "what it had is kept"


def test_a_failed_step_is_reported_as_a_preemption_of_those_that_go_on() -> None:
    with engine(failing({4: MemoryError()})) as made:
        for i in range(3):
            made.submit(prompt(10, seed=i), SamplingParams(max_tokens=20), id=str(i))
        lost = [output.choices[0].timeline.tokens_lost for output in run(made).values()]
        assert sorted(lost) == [0, 13, 13]


@BOTH
def test_memory_that_never_comes_ends_all_without_a_livelock(overlap: bool) -> None:
    with engine(failing({step: MemoryError() for step in range(1, 10_000)}), overlap=overlap) as made:
        outputs = answers(made)
        assert len(failed_choices(outputs)) == sum(asked.params.n for asked in CROWD)


def test_after_a_failed_step_a_more_urgent_newcomer_finds_room_for_its_table() -> None:
    """Those that begin again wait without seat and without table."""
    with engine(failing({2: StepCancelledError()}), max_num_seqs=2) as made:
        first = [made.submit(prompt(20, seed=i), SamplingParams(max_tokens=9, seed=i), priority=1) for i in range(2)]
        made.turn()
        made.turn()
        urgent = [made.submit(prompt(20, seed=9), SamplingParams(max_tokens=9, seed=3), priority=0) for _ in range(2)]
        assert run(made).keys() == {*first, *urgent}
        assert_no_residue(made)


# --- cancelled ----------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("settings", [{}, {"max_num_seqs": 4}, {"kv_memory": "48 blocks"}])
def test_cancelled_steps_are_computed_again(
    undisturbed: dict[str, Any], settings: dict[str, Any], overlap: bool
) -> None:
    cancelled = {step: StepCancelledError() for step in (1, 2, 9, 20)}
    with engine(failing(cancelled), overlap=overlap, **settings) as made:
        outputs = answers(made)
        assert {id_: said(output) for id_, output in outputs.items()} == undisturbed


# --- logits that are no numbers -----------------------------------------------------------------------------------


def spoilt(seed: int, position: int) -> Any:
    return lambda kernels, sampler: (kernels, SpoiltSampler(sampler, seed, position))


@pytest.mark.parametrize("output_tokens", [0, 1, 4])
def test_nan_in_one_row_ends_its_request_alone(undisturbed: dict[str, Any], output_tokens: int) -> None:
    spoils = next(asked for asked in CROWD if asked.params.n == 1 and len(undisturbed[asked.id][0][2]) > 5)
    position = len(spoils.prompt) + output_tokens
    with engine(spoilt(int(spoils.id), position)) as made:
        outputs = answers(made)
        failed = failed_choices(outputs)
        assert [id_ for id_, *_ in failed] == [spoils.id]
        assert "NaN" in (failed[0][2] or "")
        [choice] = outputs[spoils.id].choices
        assert list(choice.token_ids) == list(undisturbed[spoils.id][0][2][:output_tokens])
        assert_others_are_undisturbed(outputs, undisturbed, failed)


def test_nan_in_a_fork_leaves_no_choice_behind(undisturbed: dict[str, Any]) -> None:
    spoils = next(asked for asked in CROWD if asked.params.n == 3)
    with engine(spoilt(int(spoils.id), len(spoils.prompt))) as made:
        outputs = answers(made)
        assert [(id_, index) for id_, index, _ in failed_choices(outputs)] == [(spoils.id, i) for i in range(3)]


# --- other exceptions ---------------------------------------------------------------------------------------------


@BOTH
def test_an_unforeseen_error_reaches_the_caller_and_the_step_can_be_tried_again(
    undisturbed: dict[str, Any], overlap: bool
) -> None:
    with engine(failing({3: RuntimeError("a wire is loose")}), overlap=overlap) as made:
        for asked in CROWD:
            submit(made, asked)
        with pytest.raises(RuntimeError, match="a wire is loose"):
            run(made)
        outputs = run(made)
        assert_no_residue(made)
        assert len(outputs) > len(CROWD) // 2
        assert all(said(output) == undisturbed[id_] for id_, output in outputs.items())


@BOTH
def test_an_error_that_stays_is_raised_at_every_turn(overlap: bool) -> None:
    with engine(failing({step: RuntimeError(f"step {step}") for step in range(1, 99)}), overlap=overlap) as made:
        made.submit(prompt(5), SamplingParams(max_tokens=3))
        made.begin()
        for _ in range(3):
            with pytest.raises(RuntimeError, match="step"):
                made.turn()
        with pytest.raises(RuntimeError, match="step"):
            made.abort_all()


@BOTH
def test_ctrl_c_while_a_step_runs_leaves_an_engine_that_works(overlap: bool) -> None:
    def interrupt(number: int, step: StepArrays) -> None:
        if number == 3:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            time.sleep(0.05)

    with engine(watching(interrupt), overlap=overlap) as made:
        for i in range(3):
            made.submit(prompt(20, seed=i), SamplingParams(max_tokens=9))
        with pytest.raises(KeyboardInterrupt):
            run(made)
        made.abort_all()
        assert_no_residue(made)
        with engine() as other:
            assert tokens_of(answer(made, prompt(30))) == tokens_of(answer(other, prompt(30)))
