"""The profile of steps: every operation of the network is in it, and its columns add up."""

from pathlib import Path

import pytest

from benchmarks import profile_steps, profile_tables
from benchmarks.profile_steps import PointError, Shape, name_of, read_points
from twostep.kernels.lowering import lower
from twostep.kernels.native import STAGES, NativeExecutor
from twostep.kernels.step import Slice
from twostep.model.loaded import open_model
from twostep.model.network import Network

STORIES = Path(__file__).parents[1] / "data" / "stories260k.gguf"


@pytest.fixture(scope="module")
def stories() -> Network:
    return open_model(STORIES).network


def test_every_instruction_and_thread_has_time_and_steps_outside_of_a_profile_have_none(stories: Network) -> None:
    executor = NativeExecutor(stories, 4, threads=2)
    step = [Slice(0, list(range(1, 40)), [0, 1, 2], [38])]
    executor.forward(step)
    executor.start_profile()
    for _ in range(3):
        executor.forward(step)
    profile = executor.stop_profile()
    executor.forward(step)

    assert profile.steps == 3
    assert profile.ns.shape == (2, len(list(lower(stories.ops))) + 1, len(STAGES), 2)
    assert (profile.ns >= 0).all()
    assert (profile.ns[0].sum(axis=(1, 2)) > 0).all()
    again = executor.stop_profile()
    assert (again.steps, again.ns.tolist()) == (3, profile.ns.tolist())


def test_a_profile_starts_from_zero_and_does_not_change_bits(stories: Network) -> None:
    executor = NativeExecutor(stories, 4, threads=1)
    step = [Slice(0, [1, 2, 3], [0], [2])]
    before = executor.forward(step).tobytes()
    for _ in range(2):
        executor.start_profile()
        assert executor.forward(step).tobytes() == before
        assert executor.stop_profile().steps == 1


def test_an_executor_that_was_never_profiled_has_an_empty_profile(stories: Network) -> None:
    profile = NativeExecutor(stories, 1, threads=1).stop_profile()

    assert (profile.steps, profile.ns.size) == (0, 0)


def test_each_operation_of_a_layer_has_a_name(stories: Network) -> None:
    names = list(dict.fromkeys(map(name_of, lower(stories.ops))))

    assert names == ["embedding", "q, k, v", "attention", "output", "gate, up", "down", "head"]


def test_points() -> None:
    assert list(read_points("4x1024,p512")) == [Shape(4, 1024), Shape(0, 512)]
    assert Shape(0, 2048).steps == 4


@pytest.mark.parametrize("text", ["", "4", "4x", "x4", "0x4", "p", "p0", "4x-1", "four x 4"])
def test_points_that_cannot_be_read(text: str) -> None:
    with pytest.raises(PointError, match="neither STREAMSxTOKENS"):
        list(read_points(text))


def test_an_operation_over_its_limit_is_work_and_wait_without_the_greater_limit() -> None:
    stages = {"prepare": [1.0, 3.0], "compute": [10.0, 20.0], "finish": [0.0, 0.0]}
    operation = {"name": "down", "arithmetic_us": 4.0, "traffic_us": 9.0, "stages_us": stages, "wait_us": [12.0, 0.0]}
    point = {"streams": 4, "context": 128, "step_us": 30.0, "sampling_us": 1.0, "outside_us": 2.0}

    text = profile_tables.points({"points": [point | {"read": {"bytes_per_s": 3e10}, "operations": [operation]}]})

    assert "| down | 4 | 9 | 2 | 15 | 0 | 6 | 11 + 12, 23 + 0 | 14 |" in text


def test_matrices_that_are_multiplied_with_16_bits_count_twice(stories: Network) -> None:
    works = profile_steps.operations_of(stories, rows=1, logit_rows=1)
    vocab, width = stories.shape.vocab, stories.shape.width

    assert works["head"].integer_ops == 2 * (2 * vocab * width)
