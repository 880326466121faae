"""A machine with a known law of step times, to calibrate against, and profiles made from it."""

from dataclasses import replace
from random import Random

from twostep.core.cost import StepShape
from twostep.engine.calibration.calibrate import Learned, learn
from twostep.engine.calibration.grid import Limits
from twostep.engine.calibration.trial import Trial
from twostep.perf.machine_profile import Identity, MachineProfile, MeasuredStep, Roofs
from twostep.perf.step_time_fit import RowTiles, Sample
from twostep.perf.step_time_model import Curve, StepCosts

TILES = RowTiles(few=12, rows=6)
LIMITS = Limits(tokens=2048, sequences=64, context=8192, kv_tokens=32768)


class SyntheticMachine:
    """Weights are read once while rows are few, then unpacked; attention, head and host have costs of their own."""

    def __init__(self, *, noise: float = 0.0, starves: float = 0.0, parts: bool = True, seed: int = 1) -> None:
        """`noise`: relative standard deviation. `starves`: share of runs whose kernels lack their cores for as long
        again as the step takes."""
        self.runs = 0
        self._rng, self._noise, self._starves, self._parts = Random(seed), noise, starves, parts

    def law(self, shape: StepShape) -> dict[str, float]:
        """Nanoseconds by part; `host` is what the kernels do not measure."""
        tiles = -(-shape.tokens // TILES.rows)
        linear = max(2e6, 6e5 * shape.tokens) if shape.tokens <= TILES.few else 3e6 + 2.4e6 * tiles
        kv = shape.prefill_kv_tokens + shape.decode_kv_tokens
        attention = 400.0 * shape.prefill_pairs + 1200.0 * kv + 2e4 * shape.sequences
        return {
            "linear": linear,
            "attention": attention,
            "head": max(8e5, 3e5 * shape.logit_rows) if shape.logit_rows else 0.0,
            "host": 4e5 + 2e4 * shape.tokens + 5e4 * shape.logit_rows,
        }

    def time_ns(self, shape: StepShape) -> float:
        return sum(self.law(shape).values())

    def run(self, trial: Trial) -> Sample:
        self.runs += 1
        law, factor = self.law(trial.shape), max(0.1, self._rng.gauss(1.0, self._noise))
        starved = self._rng.random() < self._starves
        step_ns = int(sum(law.values()) * factor)
        parts = {name: law[name] * factor for name in ("linear", "attention", "head")} if self._parts else {}
        return Sample(trial.shape, step_ns * (1 + starved), step_ns * starved, parts)

    def learned(self, *, quick: bool = False) -> Learned:
        return learn(self.run, TILES, LIMITS, quick=quick)


COSTS = StepCosts(
    fixed=4e5, linear=Curve((1, 12, 13, 2048), (2e6, 7e6, 9e6, 8e8), 4e5), tile_rows=6, tile=1e5, pair=400.0,
    chunk_row=1e4, chunk_kv=10.0, kv=Curve((256, 16384), (3e5, 2e7), 1200.0), logits=Curve((1, 8), (8e5, 2.5e6), 3e5),
    sequence=2e4, prefill=3e4,
    margins={
        "decode": Curve((5_000_000,), (3e5,), 0.06), "mixed": Curve((5_000_000, 50_000_000), (4e5, 3e6), 0.06),
        "prefill": Curve((5_000_000, 50_000_000), (4e5, 3e6), 0.07),
    },
)  # fmt: skip
"""Plausible ones, of no machine."""


def profile_for(identity: Identity, **changed: object) -> MachineProfile:
    """A small profile with `COSTS`; `changed`: fields of the identity that are another machine's."""
    return MachineProfile(
        identity=replace(identity, **changed),  # type: ignore[arg-type]
        model_name="test.gguf",
        date="2026-01-02T03:04:05+00:00",
        system="6.1",
        seconds=1.0,
        costs=COSTS,
        roofs=Roofs(1e12, 2e11, ((1 << 20, 1e11), (1 << 30, 2e10))),
        weight_bytes=90_000_000,
        kv_bytes_per_token=23040,
        grid={},
        held_out={},
        runs=10,
        starved_runs=1,
        left_out=0,
        steps=(MeasuredStep(StepShape(1, 0, 0, 17, 1, 0, 1), 3e6, 3, False),),
    )
