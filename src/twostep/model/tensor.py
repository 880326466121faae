"""A tensor as it lies in a weight file: its type, its shape, and a read-only view of its bytes."""

from dataclasses import dataclass
from enum import IntEnum
from math import prod

import numpy as np
from numpy.typing import NDArray


class TensorType(IntEnum):
    """GGUF's numbers for the types we read. Values come in blocks along a row; see `block_elements`, `block_bytes`."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q8_0 = 8
    Q4_K = 12
    Q6_K = 14
    BF16 = 30

    @property
    def block_elements(self) -> int:
        return _BLOCKS[self][0]

    @property
    def block_bytes(self) -> int:
        return _BLOCKS[self][1]


_BLOCKS: dict[TensorType, tuple[int, int]] = {
    TensorType.F32: (1, 4),
    TensorType.F16: (1, 2),
    TensorType.BF16: (1, 2),
    TensorType.Q4_0: (32, 18),
    TensorType.Q4_1: (32, 20),
    TensorType.Q5_0: (32, 22),
    TensorType.Q8_0: (32, 34),
    TensorType.Q4_K: (256, 144),
    TensorType.Q6_K: (256, 210),
}


@dataclass(frozen=True)
class Tensor:
    """One tensor of a file. `shape` in numpy order: (outputs, inputs) for a matrix; blocks run along the last axis.

    `data` is uint8, one-dimensional, exactly `nbytes` long, usually a view of a memory map: never written to.
    """

    name: str
    type: TensorType
    shape: tuple[int, ...]
    data: NDArray[np.uint8]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) // self.type.block_elements * self.type.block_bytes
