"""Fits the constants of `StepTimeModel` to measured steps, and says how well they fit."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import NamedTuple

import numpy as np

from twostep.core.cost import StepShape
from twostep.perf.least_squares import Floats, nonnegative_least_squares
from twostep.perf.step_time_model import REGIONS, Curve, Region, StepCosts, StepTimeModel, region_of

STARVED_SHARE = 0.02
"""A step whose kernels had no core for more than this share of its time is discarded."""


UNKNOWN_MARGIN = Curve((1_000_000,), (100_000.0,), 0.1)
"""Of a region without measurements: a tenth."""
LEAST_MARGIN, MARGIN_QUANTILE = 0.01, 0.95
"""Runs within the margin, and what it is at least, as a share of the time."""
LEAST_RUNS, MOST_PIECES = 20, 4
"""A margin's curve has a point for each group of so many runs of similar time, up to so many points."""


class RowTiles(NamedTuple):
    """How the kernels of an instruction set cut the rows of a step: the time jumps at these edges."""

    few: int
    """Up to so many rows, weights are used as they lie; above, they are unpacked first."""
    rows: int
    """Of one tile above that."""


class Sample(NamedTuple):
    """One run of a step."""

    shape: StepShape
    step_ns: int
    starved_ns: int = 0
    """Of it, what the kernels were kept from the cores."""
    parts: Mapping[str, float] = {}
    """Of it, what was measured of linear, attention and head, in ns. Empty: only the whole was measured."""

    @property
    def is_starved(self) -> bool:
        return self.starved_ns > STARVED_SHARE * self.step_ns


class Point(NamedTuple):
    """All runs of one step that had their cores."""

    shape: StepShape
    times_ns: tuple[int, ...]
    parts: Mapping[str, float]
    """Medians."""

    @property
    def ns(self) -> float:
        return median(self.times_ns)


def points_of(samples: Iterable[Sample]) -> list[Point]:
    """By shape, without the starved ones; a step all of whose runs were starved is missing."""
    runs = defaultdict[StepShape, list[Sample]](list)
    for sample in samples:
        if not sample.is_starved:
            runs[sample.shape].append(sample)
    return [_point(shape, of) for shape, of in runs.items()]


def _point(shape: StepShape, runs: Sequence[Sample]) -> Point:
    parts = {name: median(run.parts[name] for run in runs) for name in runs[0].parts}
    return Point(shape, tuple(run.step_ns for run in runs), parts)


# --- the fit ------------------------------------------------------------------------------------------------------


def edges(tiles: RowTiles, most: int) -> list[int]:
    """Rows at which the curve of the linear layers may bend: 1, 2, ... up to the few, one past them, then doubling."""
    few = [1, *range(2, tiles.few, 2), tiles.few, tiles.few + 1]
    wide = [tiles.few << i for i in range(1, 12)]
    return [rows for rows in dict.fromkeys((*few, *wide)) if rows <= most]


def _doubling(first: int, most: int, factor: int = 4) -> list[int]:
    """Points of a curve from `first` to the first that is not below `most`."""
    points = [first]
    while points[-1] < most:
        points.append(points[-1] * factor)
    return points


class _Columns:
    """The columns of the equations: what each constant, or each piece of a curve, is multiplied by."""

    def __init__(self, points: Sequence[Point], tiles: RowTiles) -> None:
        shapes = [point.shape for point in points]
        self.tiles = tiles
        self.tokens = edges(tiles, max(shape.tokens for shape in shapes))
        self.kv = _doubling(256, max(shape.prefill_kv_tokens + shape.decode_kv_tokens for shape in shapes))
        self.rows = [rows for rows in edges(tiles, max(1, *(shape.logit_rows for shape in shapes)))]
        self._slices: dict[str, slice] = {}
        self._parts: list[str] = []
        self.matrix = np.array([self._row(shape) for shape in shapes])

    def _row(self, shape: StepShape) -> list[float]:
        kv = shape.prefill_kv_tokens + shape.decode_kv_tokens
        self._parts, self._at, row = [], 0, list[float]()
        row += self._named("fixed", "", [1.0])
        row += self._named("row", "", [shape.tokens])
        row += self._named("sampled", "", [shape.logit_rows])
        row += self._named("linear", "linear", _ramps(self.tokens, shape.tokens))
        row += self._named("tile", "linear", [-(-shape.tokens // self.tiles.rows)])
        row += self._named("pair", "attention", [shape.prefill_pairs])
        row += self._named("chunk_row", "attention", [shape.tokens - shape.decodes])
        row += self._named("chunk_kv", "attention", [shape.prefill_kv_tokens])
        row += self._named("kv", "attention", _ramps(self.kv, kv))
        row += self._named("sequence", "attention", [shape.sequences])
        row += self._named("prefill", "attention", [shape.prefills])
        row += self._named("logits", "head", _ramps(self.rows, shape.logit_rows))
        return row

    def _named(self, name: str, part: str, values: list[float]) -> list[float]:
        self._slices[name] = slice(len(self._parts), len(self._parts) + len(values))
        self._parts += [part] * len(values)
        return values

    def of_part(self, part: str) -> Floats:
        """The columns of this part; zeros for the others."""
        inside: Floats = np.array([float(own == part) for own in self._parts])
        return np.asarray(self.matrix * inside, np.float64)

    def values(self, solution: Floats, name: str) -> list[float]:
        return [float(value) for value in solution[self._slices[name]]]


def _ramps(at: Sequence[int], x: int) -> list[float]:
    """For each piece of a curve, how far along it `x` is, from 0 to 1."""
    return [min(1.0, max(0.0, (x - low) / (high - low))) for low, high in zip((0, *at), at, strict=False)]


def fit(points: Sequence[Point], tiles: RowTiles) -> StepCosts:
    """Costs without margins. Errors count relative to the time of the step, for wholes and for measured parts alike."""
    columns = _Columns(points, tiles)
    times = np.array([point.ns for point in points])
    equations, targets = [columns.matrix / times[:, None]], [np.ones(len(points))]
    for part in ("linear", "attention", "head"):
        measured = [part in point.parts for point in points]
        if any(measured):
            equations.append((columns.of_part(part) / times[:, None])[measured])
            targets.append(np.array([point.parts[part] for point in points if part in point.parts]) / times[measured])
    return _costs(columns, nonnegative_least_squares(np.vstack(equations), np.concatenate(targets)))


def _costs(columns: _Columns, solution: Floats) -> StepCosts:
    [row], [sampled] = columns.values(solution, "row"), columns.values(solution, "sampled")
    single = {
        name: columns.values(solution, name)[0]
        for name in ("fixed", "tile", "pair", "chunk_row", "chunk_kv", "sequence", "prefill")
    }
    return StepCosts(
        **single,
        linear=_curve(columns.tokens, columns.values(solution, "linear"), row),
        tile_rows=columns.tiles.rows,
        kv=_curve(columns.kv, columns.values(solution, "kv")),
        logits=_curve(columns.rows, columns.values(solution, "logits"), sampled),
        margins=dict.fromkeys(REGIONS, UNKNOWN_MARGIN),
    )


def _curve(at: Sequence[int], steps: Sequence[float], slope: float = 0.0) -> Curve:
    """From what each piece rises by, and `slope` at every point beside it."""
    ns = [total + slope * x for total, x in zip(np.cumsum(steps).tolist(), at, strict=True)]
    middle = max((i for i, x in enumerate(at) if x <= at[-1] / 2), default=None)
    low_at, low_ns = (0, 0.0) if middle is None else (at[middle], ns[middle])
    return Curve(tuple(at), tuple(ns), (ns[-1] - low_ns) / (at[-1] - low_at))


# --- margins ------------------------------------------------------------------------------------------------------


def with_margins(costs: StepCosts, points: Iterable[Point]) -> StepCosts:
    """The same costs with margins, by region and expected time, that `MARGIN_QUANTILE` of the runs do not exceed.

    A margin in ns does not fall as steps get longer, and at equal times it is not below that of the region before: a
    decode that grows into a chunk makes its step mixed, or a step of prompts only.
    """
    model = StepTimeModel(costs)
    runs = defaultdict[Region, list[tuple[int, float]]](list)
    for point in points:
        expected_ns = model.estimate(point.shape).expected_ns
        runs[region_of(point.shape)] += [(expected_ns, time / expected_ns - 1) for time in point.times_ns]
    margins, below = dict[Region, Curve](), Curve((), ())
    for region in REGIONS:
        own = _margin(runs[region]) if runs[region] else UNKNOWN_MARGIN
        margins[region] = below = _higher(own, below)
    return replace(costs, margins=margins)


def _margin(runs: list[tuple[int, float]]) -> Curve:
    """Of expected times and the relative errors of the runs."""
    pieces = min(MOST_PIECES, max(1, len(runs) // LEAST_RUNS))
    found = dict[int, float]()
    for piece in np.array_split(np.array(sorted(runs)), pieces):
        middle = int(np.median(piece[:, 0]))
        share = max(LEAST_MARGIN, float(np.quantile(piece[:, 1], MARGIN_QUANTILE)))
        found[middle] = max(share * middle, *found.values(), 0.0)
    at, ns = tuple(found), tuple(found.values())
    return Curve(at, ns, ns[-1] / at[-1])


def _higher(one: Curve, other: Curve) -> Curve:
    """A curve that is nowhere below either: between two points the higher of two lines lies below their chord."""
    at = tuple(sorted({*one.at, *other.at}))
    return Curve(at, tuple(max(one(x), other(x)) for x in at), max(one.slope, other.slope))


# --- how well it fits ---------------------------------------------------------------------------------------------


class Errors(NamedTuple):
    """Relative errors of steps of one region. `noise_...`: how far apart repeated identical steps are, each from the
    median of its repetitions: no prediction can be better than this."""

    steps: int
    runs: int
    mean: float
    p95: float
    noise_mean: float
    noise_p95: float


def errors_of(costs: StepCosts, points: Iterable[Point]) -> dict[Region, Errors]:
    """By region: expected times against the median of each step's runs."""
    model = StepTimeModel(costs)
    steps, runs = defaultdict[Region, list[float]](list), defaultdict[Region, list[float]](list)
    for point in points:
        region = region_of(point.shape)
        steps[region].append(abs(model.estimate(point.shape).expected_ns / point.ns - 1))
        if len(point.times_ns) > 1:
            runs[region] += [abs(time / point.ns - 1) for time in point.times_ns]
    return {region: _errors(steps[region], runs[region]) for region in REGIONS if steps[region]}


def _errors(steps: list[float], runs: list[float]) -> Errors:
    noise = (fmean(runs), float(np.quantile(runs, 0.95))) if runs else (0.0, 0.0)
    return Errors(len(steps), len(runs), fmean(steps), float(np.quantile(steps, 0.95)), *noise)
