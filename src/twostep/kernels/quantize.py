"""8-bit activations: how kernels round the input of a product with a quantised weight, and where they round less."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from twostep.model.ops import Attention, Linear, Logits, Op

GROUP = 32
"""Elements of a row that share one scale. Blocks of quantised weights are multiples of it, so it divides every row."""


def round_to_int8(x: NDArray[np.float32], *, fine: bool = False) -> NDArray[np.float32]:
    """`x` (rows, inputs) as integer kernels see it: scale·q with scale = max|x|/127 of the group and q = rint(x/scale).

    `fine` adds a second 8-bit number for what the first left, with scale/254: about 16 bits in all.
    A group of zeros stays zero. Ties go to the even integer. All arithmetic is float32.
    """
    groups = x.reshape(len(x), -1, GROUP)
    scale: NDArray[np.float32] = np.abs(groups).max(axis=-1, keepdims=True) / np.float32(127)
    rounded = _round(groups, scale)
    if fine:
        rounded = rounded + _round(groups - rounded, scale / np.float32(254))
    return rounded.reshape(x.shape)


def _round(groups: NDArray[np.float32], scale: NDArray[np.float32]) -> NDArray[np.float32]:
    return scale * np.rint(groups / np.where(scale == 0, np.float32(1), scale))


def fine_weights(ops: Sequence[Op]) -> frozenset[str]:
    """Weights whose input is rounded finely: value projections, the last two layers' feed-forward, the head.

    These few products, a fourteenth of SmolLM2's arithmetic, cause more than half of what rounding all inputs to 8 bits
    costs in KL divergence, since no later layer averages it out; docs/LOG.md has the measurements.
    """
    attentions = {i: op for i, op in enumerate(ops) if isinstance(op, Attention)}
    last_layers = min(list(attentions)[-2:])
    values = {op.v for op in attentions.values()}
    around_attention = {name for op in attentions.values() for name in (op.q, op.k, op.out)}
    return frozenset(
        op.weight
        for i, op in enumerate(ops)
        if isinstance(op, Logits)
        or (isinstance(op, Linear) and op.out in values)
        or (isinstance(op, Linear) and i > last_layers and not around_attention & {op.x, op.out})
    )
