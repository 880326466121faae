"""The roofline model prepared for simulations gives the estimates of the model itself."""

from random import Random

import pytest

from twostep.core.cost import StepShape
from twostep.perf.hardware import hardware_named
from twostep.perf.model_table import model_named
from twostep.perf.roofline_model import RooflineModel
from twostep.perf.step_times import StepTimes


def shapes(rng: Random, count: int) -> list[StepShape]:
    """Mixed steps: some prompts from some position, and some decodes."""
    made = []
    for _ in range(count):
        shape = StepShape()
        for _ in range(rng.randrange(4)):
            shape = shape.with_slice(rng.randrange(8000), rng.randrange(2, 2048), rng.randrange(2))
        for _ in range(rng.randrange(64)):
            shape = shape.with_slice(rng.randrange(16000), 1, 1)
        made.append(shape)
    return made


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen3-30b-a3b", "mistral-7b-v0.1", "gpt-oss-20b"])
def test_estimates_are_those_of_the_roofline(model: str, devices: int) -> None:
    roofline = RooflineModel(model_named(model), hardware_named("h100"), tensor_parallel=devices)
    fast = StepTimes(roofline)
    for shape in shapes(Random(model), 60):
        ours, theirs = fast.estimate(shape), roofline.estimate(shape)
        assert ours.terms == pytest.approx(theirs.terms, rel=1e-9, abs=1e-3)
        assert abs(ours.expected_ns - theirs.expected_ns) <= 1
        assert abs(ours.bound_ns - theirs.bound_ns) <= 1
