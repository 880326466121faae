"""The fit: non-negative least squares are right, and a machine whose law is known is found again."""

import random
from itertools import combinations

import numpy as np
import pytest
from support.calibrated import TILES, SyntheticMachine

from twostep.core.cost import StepShape, decode_shape
from twostep.perf.least_squares import Floats, nonnegative_least_squares
from twostep.perf.step_time_fit import RowTiles, Sample, edges, points_of
from twostep.perf.step_time_model import REGIONS, StepTimeModel, region_of


def by_subsets(matrix: Floats, target: Floats) -> float:
    """The least distance, found by solving without bounds for each set of columns."""
    best = float(np.linalg.norm(target))
    for count in range(1, matrix.shape[1] + 1):
        for columns in combinations(range(matrix.shape[1]), count):
            x = np.linalg.lstsq(matrix[:, columns], target, rcond=None)[0]
            if (x >= 0).all():
                best = min(best, float(np.linalg.norm(matrix[:, columns] @ x - target)))
    return best


@pytest.mark.parametrize("seed", range(60))
def test_the_least_squares_are_those_of_the_best_subset(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, columns = rng.integers(3, 12), rng.integers(1, 7)
    matrix = rng.normal(size=(rows, columns)) * 10.0 ** rng.integers(-3, 4, size=columns)
    if seed % 4 == 0:
        matrix[:, 0] = matrix[:, -1]  # columns that cannot be told apart
    if seed % 5 == 0:
        matrix[:, 0] = 0.0
    target = rng.normal(size=rows)
    x = nonnegative_least_squares(matrix, target)
    assert (x >= 0).all()
    assert float(np.linalg.norm(matrix @ x - target)) == pytest.approx(by_subsets(matrix, target), rel=1e-6, abs=1e-9)


def test_positive_solutions_are_found_exactly() -> None:
    rng = np.random.default_rng(3)
    matrix, x = rng.random((40, 8)), np.array([0, 1, 2, 0, 3, 0.5, 0, 7])
    assert nonnegative_least_squares(matrix, matrix @ x) == pytest.approx(x, abs=1e-9)


# --- a known machine ----------------------------------------------------------------------------------------------


def random_shape(rng: random.Random) -> StepShape:
    shape = StepShape()
    for _ in range(rng.choice((0, 1, 3, 8, 20))):
        shape = shape.with_slice(rng.randrange(3000), 1, 1)
    if not shape.tokens or rng.random() < 0.6:
        shape = shape.with_slice(rng.randrange(3000), rng.randrange(2, 600), rng.randrange(2))
    return shape


def worst(machine: SyntheticMachine, model: StepTimeModel, seed: int = 5) -> dict[str, float]:
    """By region, the largest relative error over random steps."""
    rng, found = random.Random(seed), dict.fromkeys(REGIONS, 0.0)
    for _ in range(400):
        shape = random_shape(rng)
        error = abs(model.estimate(shape).expected_ns / machine.time_ns(shape) - 1)
        found[region_of(shape)] = max(error, found[region_of(shape)])
    return dict(found)


@pytest.mark.parametrize("parts", [True, False], ids=["parts measured", "wholes only"])
def test_a_quiet_machine_is_recovered(parts: bool) -> None:
    machine = SyntheticMachine(parts=parts)
    model = StepTimeModel(machine.learned().costs)
    assert max(worst(machine, model).values()) < 0.06


def test_terms_are_told_apart_where_parts_are_measured() -> None:
    machine = SyntheticMachine(noise=0.01)
    model = StepTimeModel(machine.learned().costs)
    for shape in (decode_shape(1, 500), decode_shape(16, 8000), decode_shape(4, 2000).with_slice(100, 200, 1)):
        law, terms = machine.law(shape), model.estimate(shape).terms
        attention = terms.prefill_attention + terms.decode_attention + terms.sequences
        assert attention == pytest.approx(law["attention"], rel=0.1)
        assert terms.logits == pytest.approx(law["head"] + 5e4 * shape.logit_rows, rel=0.1)
        assert terms.linear == pytest.approx(law["linear"] + 2e4 * shape.tokens, rel=0.1)


def test_noise_is_averaged_and_reported() -> None:
    machine = SyntheticMachine(noise=0.05)
    learned = machine.learned()
    assert max(worst(machine, StepTimeModel(learned.costs)).values()) < 0.12
    assert learned.held_out["mixed"].mean < 0.05
    for errors in (*learned.grid.values(), *learned.held_out.values()):
        assert 0.02 < errors.noise_mean < 0.06
        assert errors.noise_mean < errors.noise_p95 < 0.15


def test_margins_hold_most_runs_of_their_region() -> None:
    machine = SyntheticMachine(noise=0.06)
    model, rng, exceeded = StepTimeModel(machine.learned().costs), random.Random(8), 0
    for _ in range(1000):
        shape = random_shape(rng)
        exceeded += machine.time_ns(shape) * rng.gauss(1, 0.06) > model.estimate(shape).bound_ns
    assert 0 < exceeded < 100


def test_margins_grow_with_the_noise() -> None:
    shape = decode_shape(4, 2000)
    quiet, noisy = (
        StepTimeModel(SyntheticMachine(noise=noise).learned().costs).estimate(shape) for noise in (0.01, 0.1)
    )
    assert quiet.bound_ns / quiet.expected_ns < 1.04
    assert noisy.bound_ns / noisy.expected_ns > 1.08


def test_starved_runs_are_discarded() -> None:
    machine = SyntheticMachine(starves=0.3)
    learned = machine.learned()
    assert 0.2 * learned.runs < learned.starved_runs < 0.4 * learned.runs
    assert max(worst(machine, StepTimeModel(learned.costs)).values()) < 0.06


def test_points_are_medians_of_runs_that_had_their_cores() -> None:
    shape, other = decode_shape(1, 10), decode_shape(2, 20)
    runs = [Sample(shape, 100), Sample(shape, 110), Sample(shape, 130), Sample(shape, 900, 800), Sample(other, 50, 20)]
    [point] = points_of(runs)
    assert (point.shape, point.ns, point.times_ns) == (shape, 110, (100, 110, 130))


def test_edges_are_where_tiles_change() -> None:
    assert edges(TILES, 100) == [1, 2, 4, 6, 8, 10, 12, 13, 24, 48, 96]
    assert edges(RowTiles(4, 4), 20) == [1, 2, 4, 5, 8, 16]
    assert edges(RowTiles(1, 1), 9) == [1, 2, 4, 8]
