"""A calibration: runs the grid of steps, fits what they cost, and compares that with steps that it did not see."""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from platform import release
from time import monotonic

from twostep.config.configs import EngineConfig
from twostep.config.values import MemoryShare
from twostep.core.request import BLOCK_TOKENS
from twostep.engine import build
from twostep.engine.calibration.grid import ROW_TILES, Limits, grid, held_out
from twostep.engine.calibration.trial import Trial, TrialRunner
from twostep.engine.profiles import identity_of
from twostep.errors import CalibrationError
from twostep.kernels.machine_limits import measure_limits
from twostep.kernels.native import packed_weight_bytes
from twostep.model.loaded import LoadedModel
from twostep.perf.machine_profile import MachineProfile, MeasuredStep, Roofs
from twostep.perf.step_time_fit import Point, RowTiles, Sample, errors_of, fit, points_of, with_margins
from twostep.perf.step_time_model import StepCosts

STEP_TOKENS, SEQUENCES, CONTEXT, POOL_TOKENS = 2048, 64, 8192, 32768
"""The most that steps of the grid have, where model and memory allow it; the last: KV positions of all sequences."""
LIMIT_S, QUICK_LIMIT_S = 90.0, 30.0
"""However much is disturbed, the steps end after this time."""
LONGEST_STEP_S = 2.5
"""Steps with more work than the first that takes longer are left out; also if first runs take half of all the time."""
MOST_TRIES = 3
"""So many times the wanted runs, if runs are discarded."""
LEAST_USABLE = 0.7
"""Share of the grid that has to be measured, else nothing is learned."""

UNKNOWN_NS = 50_000_000
"""Of a step that was not run yet, for the progress bar."""

Progress = Callable[[str, float], None]
"""What is done now, and which share of all is done."""
SILENT: Progress = lambda what, share: None  # noqa: E731
Run = Callable[[Trial], Sample]


def calibrate(
    model: LoadedModel, *, threads: int | None = None, quick: bool = False, progress: Progress = SILENT
) -> MachineProfile:
    """Takes about a minute, a third of that if `quick`. Raises `CalibrationError` if other programs leave no cores,
    `MemoryPlanError` if the model does not fit."""
    config = _config(model, threads)
    sizing = build.size(model, config)
    blocks = min(sizing.blocks, POOL_TOKENS // BLOCK_TOKENS)
    kernels = build.kernels(model, config, sizing._replace(blocks=blocks))
    try:
        started_s = monotonic()
        progress("limits of the machine", 0.0)
        weight_bytes = packed_weight_bytes(model.network)
        roofs = _roofs(kernels.isa, kernels.threads, weight_bytes)
        context = min(sizing.max_model_len, blocks * BLOCK_TOKENS)
        limits = Limits(sizing.max_num_batched_tokens, SEQUENCES, context, blocks * BLOCK_TOKENS)
        runner = TrialRunner(kernels, model.network.shape.vocab)
        learned = learn(runner.run, ROW_TILES[kernels.isa], limits, quick=quick, progress=progress)
        roofs = _higher(roofs, _roofs(kernels.isa, kernels.threads, weight_bytes))
        return _profile(model, config, roofs, learned, monotonic() - started_s)
    finally:
        kernels.close()


def _config(model: LoadedModel, threads: int | None) -> EngineConfig:
    return EngineConfig(
        max_num_seqs=SEQUENCES,
        max_num_batched_tokens=STEP_TOKENS,
        max_model_len=min(CONTEXT, model.network.shape.context),
        kv_memory=MemoryShare(0.5),
        threads=threads,
        profile="none",
    )


def _roofs(isa: str, threads: int, weight_bytes: int) -> Roofs:
    found = measure_limits(isa, threads, weight_bytes)
    read = tuple((one.bytes, one.bytes_per_s) for one in found.read)
    return Roofs(found.int8_dot.all_threads, found.fp32_fma.all_threads, read)


def _higher(one: Roofs, other: Roofs) -> Roofs:
    """The higher of two measurements each: a limit is what is reached when nothing disturbs."""
    read = tuple((size, max(rate, again)) for (size, rate), (_, again) in zip(one.read, other.read, strict=True))
    return Roofs(max(one.int8_ops_per_s, other.int8_ops_per_s), max(one.fp32_flops_per_s, other.fp32_flops_per_s), read)


# --- steps --------------------------------------------------------------------------------------------------------


class Learned:
    """What was measured, and the costs that were fitted to it."""

    def __init__(self, costs: StepCosts, seen: Sequence[Point], unseen: Sequence[Point], bench: "Bench", trials: int):
        self.costs, self.seen, self.unseen = costs, seen, unseen
        self.runs, self.starved_runs = bench.runs, bench.starved
        self.left_out = trials - len(seen)
        self.grid, self.held_out = errors_of(costs, seen), errors_of(costs, unseen)


def learn(run: Run, tiles: RowTiles, limits: Limits, *, quick: bool = False, progress: Progress = SILENT) -> Learned:
    """Runs grid and held-out steps with `run` and fits. Raises `CalibrationError`."""
    bench = Bench(run, quick=quick, progress=progress)
    trials, others = grid(tiles, limits, quick=quick), held_out(limits, quick=quick)
    samples = bench.measured(trials, others)
    shapes = {trial.shape for trial in trials}
    points = points_of(samples)
    seen = [point for point in points if point.shape in shapes]
    if len(seen) < LEAST_USABLE * len([trial for trial in trials if trial not in bench.skipped]):
        share = f"{bench.starved} of {bench.runs} steps had no core for part of their time"
        raise CalibrationError(f"{share}: other programs use this machine; end them, or give fewer --threads")
    unseen = [point for point in points if point.shape not in shapes]
    costs = with_margins(fit(seen, tiles), points)
    return Learned(costs, seen, unseen, bench, len(trials))


class Bench:
    """Runs each trial several times, all in turn, so that what changes slowly changes all alike."""

    def __init__(self, run: Run, *, quick: bool, progress: Progress) -> None:
        self._run, self._quick, self._progress = run, quick, progress
        self.runs = self.starved = 0
        self.skipped: set[Trial] = set()
        """Left out because such steps take too long."""
        self._samples = list[Sample]()
        self._good, self._tried = Counter[Trial](), Counter[Trial]()
        self._ns = dict[Trial, int]()
        """Shortest run of each."""

    def measured(self, trials: Sequence[Trial], others: Sequence[Trial]) -> list[Sample]:
        """All runs, the starved ones included."""
        limit_s = QUICK_LIMIT_S if self._quick else LIMIT_S
        ends_s = monotonic() + limit_s
        for i, trial in enumerate(trials):  # the cheapest first
            self._progress("first runs", 0.15 * i / len(trials))
            self._once(trial)
            if self._ns[trial] > LONGEST_STEP_S * 1e9 or ends_s - monotonic() < limit_s / 2:
                self.skipped = {one for one in (*trials[i + 1 :], *others) if _is_larger(one, trial)}
                break
        trials = [trial for trial in (*trials, *others) if trial not in self.skipped]
        rng = random.Random(0)
        while monotonic() < ends_s and (todo := [trial for trial in trials if self._wants(trial)]):
            rng.shuffle(todo)
            for trial in todo:
                self._once(trial)
                if self.runs % 8 == 0:
                    self._progress(f"{self.runs} steps run", 0.15 + 0.85 * self._done(trials))
                if monotonic() >= ends_s:
                    break
        return self._samples

    def _once(self, trial: Trial) -> None:
        sample = self._run(trial)
        self._samples.append(sample)
        self.runs += 1
        self.starved += sample.is_starved
        self._tried[trial] += 1
        self._good[trial] += not sample.is_starved
        self._ns[trial] = min(sample.step_ns, self._ns.get(trial, sample.step_ns))

    def _wanted(self, trial: Trial) -> int:
        """Runs: short steps are cheap to repeat, and vary more."""
        step_ns = self._ns.get(trial, 0)
        if self._quick:
            return 3 if step_ns < 100e6 else 2
        return 9 if step_ns < 25e6 else 6 if step_ns < 100e6 else 4 if step_ns < 400e6 else 2

    def _wants(self, trial: Trial) -> bool:
        wanted = self._wanted(trial)
        return self._good[trial] < wanted and self._tried[trial] < MOST_TRIES * wanted

    def _done(self, trials: Iterable[Trial]) -> float:
        """Share of the time."""
        done = total = 1
        for trial in trials:
            wanted, ns = self._wanted(trial), self._ns.get(trial, UNKNOWN_NS)
            done += min(self._good[trial], wanted) * ns
            total += wanted * ns
        return done / total


def _is_larger(one: Trial, other: Trial) -> bool:
    return one.shape.tokens >= other.shape.tokens or one.shape.pairs > other.shape.pairs


def _profile(
    model: LoadedModel, config: EngineConfig, roofs: Roofs, learned: Learned, seconds: float
) -> MachineProfile:
    steps = [(point, held) for points, held in ((learned.seen, False), (learned.unseen, True)) for point in points]
    return MachineProfile(
        identity=identity_of(model, config),
        model_name=model.path.name,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        system=release(),
        seconds=round(seconds, 1),
        costs=learned.costs,
        roofs=roofs,
        weight_bytes=packed_weight_bytes(model.network),
        kv_bytes_per_token=model.network.shape.kv_bytes_per_token(),
        grid=learned.grid,
        held_out=learned.held_out,
        runs=learned.runs,
        starved_runs=learned.starved_runs,
        left_out=learned.left_out,
        steps=tuple(MeasuredStep(point.shape, point.ns, len(point.times_ns), held) for point, held in steps),
    )
