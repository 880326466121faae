"""Steps whose costs a reader can imagine, and what a model estimates for them."""

from collections.abc import Iterator
from typing import NamedTuple

from twostep.core.cost import StepShape, decode_shape
from twostep.perf.step_time_model import StepCosts, StepTimeModel

CONTEXT = 500
"""Tokens of each sequence that decodes."""
_EIGHT = decode_shape(8, 8 * CONTEXT)
SHAPES = {
    "decode, 1 stream": decode_shape(1, CONTEXT),
    "decode, 8 streams": _EIGHT,
    "decode, 32 streams": decode_shape(32, 32 * CONTEXT),
    "prompt of 128": StepShape().with_slice(0, 128, 1),
    "prompt of 512": StepShape().with_slice(0, 512, 1),
    "8 streams and 64 of a prompt": _EIGHT.with_slice(0, 64, 0),
    "8 streams and 256 of a prompt": _EIGHT.with_slice(0, 256, 0),
}


class TypicalStep(NamedTuple):
    """An estimate in ms. Its terms add up to the expected time."""

    name: str
    expected: float
    bound: float
    linear: float
    attention: float
    logits: float
    sequences: float
    fixed: float

    @property
    def weights(self) -> float:
        """Linear layers and head: with one row, the reading of all weights."""
        return self.linear + self.logits


TERMS = TypicalStep._fields[3:]


def typical_steps(costs: StepCosts) -> Iterator[TypicalStep]:
    """In the order of `SHAPES`, the decode of one stream first."""
    model = StepTimeModel(costs)
    for name, shape in SHAPES.items():
        expected, bound, terms = model.estimate(shape)
        attention = terms.prefill_attention + terms.decode_attention
        parts = (expected, bound, terms.linear, attention, terms.logits, terms.sequences, terms.fixed)
        yield TypicalStep(name, *(ns / 1e6 for ns in parts))
