"""How long a step takes, as far as scheduling needs it: predicted from its shape, corrected by what was measured."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step's time depends on."""

    tokens: int = 0
    """Rows that pass the linear layers."""
    pairs: int = 0
    """Query positions times positions that each sees: attention's work; for a decode its context, the KV it reads."""
    sampled: int = 0
    """Rows that pass the head."""
    sequences: int = 0

    def with_slice(self, start: int, count: int, sampled: int) -> "StepShape":
        """And also `count` tokens of one sequence from position `start`, of which `sampled` rows want logits."""
        pairs = self.pairs + _pairs(start, count)
        return StepShape(self.tokens + count, pairs, self.sampled + sampled, self.sequences + 1)

    def without_slice(self, start: int, count: int, sampled: int) -> "StepShape":
        """The same less such a slice."""
        pairs = self.pairs - _pairs(start, count)
        return StepShape(self.tokens - count, pairs, self.sampled - sampled, self.sequences - 1)


def _pairs(start: int, count: int) -> int:
    """Each token sees all before it and itself."""
    return count * start + count * (count + 1) // 2


class StepTimeModel(Protocol):
    """Predicts steps. `observe` alone changes it, and only `Scheduler.resolve` calls that: the same inputs in the same
    order give the same plans."""

    def predict_ns(self, shape: StepShape) -> int:
        """Time within which such a step should end, its margin included."""

    def largest_slice(self, load: StepShape, start: int, most: int, budget_ns: int) -> int:
        """The most tokens of one sequence from `start`, at most `most`, that fit beside `load`; 0 if none do."""

    def observe(self, shape: StepShape, measured_ns: int) -> None:
        """A step of this shape took so long."""
