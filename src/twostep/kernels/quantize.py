"""8-bit activations: how the kernels round the input of a product with a quantised weight."""

import numpy as np
from numpy.typing import NDArray

GROUP = 32
"""Elements of a row that share one scale. Blocks of quantised weights are multiples of it, so it divides every row."""


def round_to_int8(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """`x` (rows, inputs) as integer kernels see it: scale·q with scale = max|x|/127 of the group and q = rint(x/scale).

    A group of zeros stays zero. Ties go to the even integer. All arithmetic is float32.
    """
    groups = x.reshape(len(x), -1, GROUP)
    scale: NDArray[np.float32] = np.abs(groups).max(axis=-1, keepdims=True) / np.float32(127)
    q = np.rint(groups / np.where(scale == 0, np.float32(1), scale))
    return (scale * q).reshape(x.shape)
