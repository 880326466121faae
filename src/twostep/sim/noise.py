"""The noise of a machine: by what factor its steps take longer or shorter than expected, taken from a recording, and
given to simulated steps."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from twostep.core.cost import CostModel
from twostep.perf.linear import LinearCostModel
from twostep.recording.reader import Recording

LEARNING_STEPS = 64
"""Steps at the start of a recording that only teach the model."""


class Sample(NamedTuple):
    """A step's time divided by the expected one, and the share of that time in which the kernels had no core."""

    factor: float
    starved: float = 0.0


STILL = Sample(1.0)
"""Of a step that takes exactly what was expected."""


@dataclass(frozen=True)
class Noise:
    """Samples of a machine's noise. `draws` returns them in a random order that depends only on the seed."""

    samples: Sequence[Sample]

    def draws(self, seed: int | str) -> Iterator[Sample]:
        """Without end."""
        chosen = random.Random(seed)
        while True:
            yield chosen.choice(self.samples)

    @property
    def longest(self) -> float:
        """The largest factor."""
        return max(sample.factor for sample in self.samples)


def recorded_noise(recording: Recording, cost: CostModel | None = None) -> Noise:
    """How the recorded steps deviate from what `cost` expects, which learns from each as it would in the engine.

    Without `cost` that is the model fitted while running. Failed steps are left out. Raises `RecordingError` for a
    damaged file, `ValueError` if it has too few steps.
    """
    cost, samples = cost or LinearCostModel(), list[Sample]()
    for number, step in enumerate(turn.step for turn in recording.turns() if turn.step and not turn.step.result.failed):
        assert step is not None
        shape, result = step.plan.shape, step.result
        if number >= LEARNING_STEPS:
            share = result.starved_ns / max(1, result.step_ns)
            samples.append(Sample(result.step_ns / max(1, cost.estimate(shape).expected_ns), share))
        cost.observe(shape, result.step_ns)
    if not samples:
        raise ValueError(f"the recording has no more than {LEARNING_STEPS} steps: too few to tell noise from costs")
    return Noise(tuple(samples))
