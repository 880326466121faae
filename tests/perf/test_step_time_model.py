"""The calibrated model: its estimates never fall when a slice grows, it corrects itself, and it is data."""

import json
import random
from dataclasses import replace
from math import isclose

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.calibrated import COSTS

from twostep.core.cost import StepShape, decode_shape, largest_slice
from twostep.perf.step_time_model import REGIONS, Curve, ModelDataError, StepCosts, StepTimeModel, region_of

sizes = st.integers(1, 6000)
costs = st.floats(0, 1e7)


@st.composite
def curves(draw: st.DrawFn) -> Curve:
    at = sorted(draw(st.sets(sizes, min_size=1, max_size=6)))
    rises = draw(st.lists(st.floats(0, 1e9), min_size=len(at), max_size=len(at)))
    ns = [sum(rises[: i + 1]) for i in range(len(at))]
    return Curve(tuple(at), tuple(ns), draw(st.floats(0, 1e6)))


@st.composite
def models(draw: st.DrawFn) -> StepTimeModel:
    """Any costs, with margins as a fit makes them: each region's is nowhere below the one before; any correction."""
    margins, below = {}, Curve((1,), (0.0,), 0.0)
    for region in REGIONS:
        own = draw(curves())
        at = tuple(sorted({*own.at, *below.at}))
        below = Curve(at, tuple(max(own(x), below(x)) for x in at), max(own.slope, below.slope))
        margins[region] = below
    made = StepTimeModel(
        StepCosts(
            draw(costs), draw(curves()), draw(st.integers(1, 16)), draw(costs), draw(costs), draw(costs), draw(costs),
            draw(curves()), draw(curves()), draw(costs), draw(costs), margins,
        )
    )  # fmt: skip
    for share in draw(st.lists(st.floats(0.2, 3), max_size=5)):
        shape = StepShape().with_slice(draw(sizes), draw(st.integers(1, 64)), 1)
        made.observe(shape, int(made.estimate(shape).expected_ns * share) + 1)
    return made


@st.composite
def loads(draw: st.DrawFn) -> StepShape:
    load = StepShape()
    for _ in range(draw(st.integers(0, 4))):
        load = load.with_slice(
            draw(st.integers(0, 3000)), draw(st.sampled_from([1, 1, 1, 2, 30])), draw(st.integers(0, 1))
        )
    return load


@given(models(), loads(), st.integers(0, 6000), st.integers(1, 3000), st.integers(1, 3000), st.integers(0, 1))
def test_the_bound_never_falls_when_a_slice_grows(
    model: StepTimeModel, load: StepShape, start: int, tokens: int, more: int, rows: int
) -> None:
    narrow = model.estimate(load.with_slice(start, tokens, rows))
    wide = model.estimate(load.with_slice(start, tokens + more, rows))
    assert narrow.expected_ns <= wide.expected_ns
    assert narrow.bound_ns <= wide.bound_ns
    assert narrow.bound_ns >= narrow.expected_ns


@given(models(), loads(), st.integers(0, 3000))
def test_a_decode_that_becomes_a_chunk_of_two_costs_no_less(model: StepTimeModel, load: StepShape, start: int) -> None:
    assert (
        model.estimate(load.with_slice(start, 1, 1)).bound_ns <= model.estimate(load.with_slice(start, 2, 1)).bound_ns
    )


@given(models(), loads(), st.integers(0, 3000), st.integers(1, 200_000_000))
def test_the_largest_slice_fits_and_one_more_token_does_not(
    model: StepTimeModel, load: StepShape, start: int, budget_ns: int
) -> None:
    fits = largest_slice(model, load, start, 512, budget_ns)
    if fits:
        assert model.estimate(load.with_slice(start, fits, 1)).bound_ns <= budget_ns
    if fits < 512:
        assert model.estimate(load.with_slice(start, fits + 1, 1)).bound_ns > budget_ns


@given(models(), loads())
def test_terms_add_up(model: StepTimeModel, load: StepShape) -> None:
    cost = model.estimate(load)
    assert isclose(sum(cost.terms), cost.expected_ns, rel_tol=1e-9, abs_tol=2)


@pytest.mark.parametrize(
    ("shape", "region"),
    [
        (decode_shape(3, 100), "decode"),
        (StepShape().with_slice(0, 40, 1), "prefill"),
        (decode_shape(3, 100).with_slice(0, 40, 1), "mixed"),
        (decode_shape(3, 100).with_slice(9, 1, 1), "decode"),
    ],
)
def test_regions(shape: StepShape, region: str) -> None:
    assert region_of(shape) == region


def test_estimates_by_hand() -> None:
    """4 streams of 64 positions, and 20 tokens of a prompt from position 0."""
    shape = decode_shape(4, 256).with_slice(0, 20, 0)
    kv = 3e5 + 20 * ((2e7 - 3e5) / (16384 - 256))
    terms = StepTimeModel(COSTS).estimate(shape).terms
    assert terms.fixed == 4e5
    assert terms.linear == pytest.approx(9e6 + 11 * (8e8 - 9e6) / (2048 - 13) + 4 * 1e5)
    assert terms.decode_attention == pytest.approx(kv * 256 / 276)
    assert terms.prefill_attention == pytest.approx(kv * 20 / 276 + 400 * 210 + 1e4 * 20 + 10 * 20)
    assert terms.logits == pytest.approx(8e5 + 3 * (2.5e6 - 8e5) / 7)
    assert terms.sequences == 5 * 2e4 + 3e4


# --- the correction -----------------------------------------------------------------------------------------------


def shapes(rng: random.Random) -> StepShape:
    shape = decode_shape(count := rng.randrange(1, 9), count * rng.randrange(20, 2000))
    return shape.with_slice(rng.randrange(1000), rng.randrange(2, 200), 1) if rng.random() < 0.5 else shape


@pytest.mark.parametrize("factor", [0.8, 1.25])
def test_it_follows_a_machine_that_has_become_faster_or_slower(factor: float) -> None:
    model, calibrated, rng = StepTimeModel(COSTS), StepTimeModel(COSTS), random.Random(1)
    for _ in range(2000):
        shape = shapes(rng)
        model.observe(shape, int(factor * calibrated.estimate(shape).expected_ns))
    shape = decode_shape(4, 2000)
    assert model.estimate(shape).expected_ns == pytest.approx(factor * calibrated.estimate(shape).expected_ns, rel=0.03)


@pytest.mark.parametrize(("factor", "bound"), [(0.01, 0.67), (50.0, 1.5)])
def test_however_far_off_the_steps_are_the_correction_is_bounded(factor: float, bound: float) -> None:
    model, calibrated, rng = StepTimeModel(COSTS), StepTimeModel(COSTS), random.Random(2)
    for _ in range(2000):
        shape = shapes(rng)
        model.observe(shape, int(factor * calibrated.estimate(shape).expected_ns))
        assert all(0.67 <= one <= 1.5 for one in model.correction)
    shape = decode_shape(4, 2000)
    assert model.estimate(shape).expected_ns == pytest.approx(bound * calibrated.estimate(shape).expected_ns, rel=1e-6)


def test_one_step_far_off_changes_little() -> None:
    model, shape = StepTimeModel(COSTS), decode_shape(4, 2000)
    before_ns = model.estimate(shape).expected_ns
    model.observe(shape, 100 * before_ns)
    assert model.estimate(shape).expected_ns < 1.3 * before_ns


@pytest.mark.parametrize(("share", "most"), [(0.0, 0.002), (0.3, 0.03)])
def test_margins_widen_until_few_steps_exceed_their_bound(share: float, most: float) -> None:
    """So many steps take a seventh longer; few exceed the margin once it has widened."""
    model, calibrated, rng = StepTimeModel(COSTS), StepTimeModel(COSTS), random.Random(3)
    exceeded = 0
    for i in range(6000):
        shape = shapes(rng)
        measured_ns = int(calibrated.estimate(shape).expected_ns * (1.15 if rng.random() < share else 1.0))
        exceeded += i >= 1000 and measured_ns > model.estimate(shape).bound_ns
        model.observe(shape, measured_ns)
    assert exceeded / 5000 <= most
    assert (model.widening > 1) == (share > 0)


def test_steps_without_tokens_or_time_teach_nothing() -> None:
    model, shape = StepTimeModel(COSTS), decode_shape(4, 2000)
    before = model.estimate(shape)
    model.observe(shape, 0)
    model.observe(StepShape(), 1000)
    assert model.estimate(shape) == before


# --- as data ------------------------------------------------------------------------------------------------------


@given(models())
def test_costs_survive_json_to_the_last_bit(model: StepTimeModel) -> None:
    assert StepCosts.from_json(json.loads(json.dumps(model.costs.to_json()))) == model.costs


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"pair": -1}, "pair is -1; it has to be a number from 0"),
        ({"pair": float("nan")}, "pair is nan"),
        ({"kv": {"at": [1, 2], "ns": [5.0, 4.0], "slope": 0.0}}, "kv falls somewhere"),
        ({"kv": {"at": [2, 1], "ns": [4.0, 5.0], "slope": 0.0}}, "not in order"),
        ({"kv": {"at": [1], "ns": [4.0, 5.0], "slope": 0.0}}, "kv has not a time for each point"),
        ({"kv": 3}, "kv has to be a curve"),
        ({"linear": {"at": [1.5], "ns": [4.0], "slope": 0.0}}, "linear has to be a curve"),
        ({"margins": {}}, "margins have to be those of decode, mixed, prefill"),
        ({"more": 1}, "costs of a step need the fields"),
        ({"tile_rows": 0}, "tile_rows"),
    ],
)
def test_other_data_is_refused(change: dict[str, object], problem: str) -> None:
    with pytest.raises(ModelDataError, match=problem):
        StepCosts.from_json(COSTS.to_json() | change)


def test_no_costs_at_all_are_refused() -> None:
    with pytest.raises(ModelDataError):
        StepCosts.from_json([1, 2])


def test_beyond_its_points_a_curve_goes_on() -> None:
    curve = Curve((2, 4), (10.0, 30.0), 7.0)
    assert [curve(x) for x in (0, 1, 2, 3, 4, 6)] == [0.0, 5.0, 10.0, 20.0, 30.0, 44.0]


def test_wide_steps_are_estimated_beyond_the_table() -> None:
    model = StepTimeModel(replace(COSTS, tile=0.0))
    shape = StepShape().with_slice(0, 10_000, 0)
    assert model.estimate(shape).terms.linear == pytest.approx(8e8 + (10_000 - 2048) * 4e5)
