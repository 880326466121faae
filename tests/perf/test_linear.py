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


def bias(model: LinearCostModel, rng: random.Random, machine: float = 1.0) -> list[float]:
    """Relative errors without the margin, on a machine that takes `machine` times as long."""
    shapes = (s for _, s in zip(range(100), serving(rng), strict=False))
    return [model.estimate(s).expected_ns / (machine * true_ns(s)) - 1 for s in shapes]


def test_it_finds_true_costs_within_a_hundred_steps() -> None:
    assert max(map(abs, bias(fitted(100, 0.0, random.Random(1)), random.Random(2)))) < 0.01


@pytest.mark.parametrize("noise", [0.02, 0.1])
def test_its_margin_is_what_99_of_100_steps_keep(noise: float) -> None:
    """The 99th percentile of the normal distribution is 2.33 standard deviations above its mean."""
    rng = random.Random(3)
    model, over = fitted(600, noise, rng), 0
    found = errors(model, random.Random(4))
    assert 1.2 * noise < sum(found) / len(found) < 4 * noise
    for _, shape in zip(range(2000), serving(rng), strict=False):
        measured_ns = int(true_ns(shape) * (1 + rng.gauss(0, noise)))
        over += model.estimate(shape).bound_ns < measured_ns
        model.observe(shape, measured_ns)
    assert 5 <= over <= 40


def test_steps_with_prompts_have_a_margin_of_their_own_which_is_the_wider_one() -> None:
    rng = random.Random(5)
    model = LinearCostModel()
    for _, shape in zip(range(2000), serving(rng), strict=False):
        noise = 0.1 if shape.prefills else 0.01
        model.observe(shape, int(true_ns(shape) * (1 + rng.gauss(0, noise))))
    margins = [
        model.estimate(shape).bound_ns / model.estimate(shape).expected_ns - 1
        for shape in (decoding(rng, 4), StepShape().with_slice(0, 64, 1))
    ]
    assert margins[0] < 0.06
    assert 0.15 < margins[1] < 0.4


def test_the_margin_is_at_most_a_half_however_wild_the_measurements() -> None:
    rng = random.Random(5)
    model = LinearCostModel()
    shape = StepShape().with_slice(0, 64, 1)
    for _ in range(300):
        model.observe(shape, rng.choice([1, 100]) * 10_000_000)
    cost = model.estimate(shape)
    assert cost.bound_ns == pytest.approx(1.5 * cost.expected_ns, rel=1e-6)


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
    assert max(map(abs, bias(model, rng, 2))) < 0.15


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
