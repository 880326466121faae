"""The fitted step-time model: finds true costs, keeps its margin, and stays right when nothing new is to be learnt."""

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twostep.core.cost import StepShape, largest_slice
from twostep.perf.linear import LinearCostModel

FIXED, TOKEN, PAIR, SAMPLED = 4e6, 7e5, 25.0, 3e5


def true_ns(shape: StepShape) -> float:
    return FIXED + TOKEN * shape.tokens + PAIR * shape.pairs + SAMPLED * shape.logit_rows


def serving(rng: random.Random) -> Iterator[StepShape]:
    """Some decodes, and a chunk in every other step."""
    while True:
        shape = decoding(rng, rng.randrange(1, 8))
        if rng.random() < 0.5:
            shape = shape.with_slice(rng.randrange(2000), rng.randrange(1, 256), rng.randrange(2))
        yield shape


def decoding(rng: random.Random, count: int) -> StepShape:
    shape = StepShape()
    for _ in range(count):
        shape = shape.with_slice(rng.randrange(2000), 1, 1)
    return shape


def fitted(steps: int, noise: float, rng: random.Random) -> LinearCostModel:
    model = LinearCostModel()
    for _, shape in zip(range(steps), serving(rng), strict=False):
        model.observe(shape, int(true_ns(shape) * (1 + rng.gauss(0, noise))))
    return model


def errors(model: LinearCostModel, rng: random.Random) -> list[float]:
    """Relative, over a hundred steps; the margin makes them positive."""
    return [model.estimate(s).bound_ns / true_ns(s) - 1 for _, s in zip(range(100), serving(rng), strict=False)]


def test_it_finds_true_costs_within_a_hundred_steps() -> None:
    assert max(map(abs, errors(fitted(100, 0.0, random.Random(1)), random.Random(2)))) < 0.01


@pytest.mark.parametrize("noise", [0.02, 0.1])
def test_its_margin_is_about_the_size_of_the_noise(noise: float) -> None:
    found = errors(fitted(400, noise, random.Random(3)), random.Random(4))
    assert 0 < sum(found) / len(found) < 2 * noise
    assert max(map(abs, found)) < 3 * noise


def test_the_margin_is_at_most_a_quarter_however_wild_the_measurements() -> None:
    rng = random.Random(5)
    model = LinearCostModel()
    shape = StepShape().with_slice(0, 64, 1)
    for _ in range(300):
        model.observe(shape, rng.choice([1, 100]) * 10_000_000)
    assert model._error > LinearCostModel.WIDEST_MARGIN
    expected = sum(max(0.0, cost) * x for cost, x in zip(model._fit.costs, (1, 64, shape.pairs, 1), strict=True))
    assert model.estimate(shape).bound_ns == pytest.approx(1.25 * expected, rel=1e-6)


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_hours_of_mere_decoding_do_not_spoil_what_a_prompt_costs(noise: float) -> None:
    """Forgetting without bound, the prediction for a prompt was off by a factor of five after 10 000 such steps."""
    rng = random.Random(6)
    model = fitted(300, noise, rng)
    for _ in range(20_000):
        shape = decoding(rng, 4)
        model.observe(shape, int(true_ns(shape) * (1 + rng.gauss(0, noise))))
    prompt = StepShape().with_slice(0, 256, 1)
    assert model.estimate(prompt).bound_ns == pytest.approx(true_ns(prompt), rel=0.2)
    model.observe(prompt, int(true_ns(prompt)))
    assert model.estimate(prompt).bound_ns == pytest.approx(true_ns(prompt), rel=0.2)
    assert model.estimate(shape).bound_ns == pytest.approx(true_ns(shape), rel=0.2)


def test_it_follows_a_machine_that_becomes_slower() -> None:
    rng = random.Random(7)
    model = fitted(1000, 0.02, rng)
    for _, shape in zip(range(300), serving(rng), strict=False):
        model.observe(shape, int(2 * true_ns(shape)))
    found = [error / 2 - 0.5 for error in errors(model, rng)]
    assert max(map(abs, found)) < 0.15


@settings(max_examples=60, deadline=None)
@given(
    decodes=st.integers(0, 16),
    start=st.integers(0, 4000),
    most=st.integers(0, 1000),
    budget_ns=st.integers(0, 1_000_000_000),
)
def test_the_largest_slice_is_the_inverse_of_the_prediction(
    decodes: int, start: int, most: int, budget_ns: int
) -> None:
    model = fitted(50, 0.05, random.Random(8))
    load = decoding(random.Random(9), decodes)
    tokens = largest_slice(model, load, start, most, budget_ns)
    assert 0 <= tokens <= most
    assert tokens == 0 or model.estimate(load.with_slice(start, tokens, 1)).bound_ns <= budget_ns
    assert tokens == most or model.estimate(load.with_slice(start, tokens + 1, 1)).bound_ns > budget_ns


@pytest.mark.parametrize(("shape", "measured_ns"), [(StepShape(), 5_000_000), (StepShape().with_slice(0, 1, 1), 0)])
def test_steps_that_tell_nothing_are_passed_over(shape: StepShape, measured_ns: int) -> None:
    model, untouched = LinearCostModel(), LinearCostModel()
    model.observe(shape, measured_ns)
    probe = StepShape(100, 5000, logit_rows=1, prefills=1)
    assert model.estimate(probe) == untouched.estimate(probe)
