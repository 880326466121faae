"""Values of a tensor in float32, from the block layouts of GGUF.

A row is cut into blocks, each with its scales; `d`, `m`, `dmin` are float16 in the file, `q` the small integers.
Layouts as in ggml's `ggml-common.h` and `ggml-quants.c`:

    F32, F16, BF16  the value
    Q8_0   32 values   d, 32 int8                                   d·q
    Q4_0   32 values   d, 16 bytes                                  d·(q - 8)
    Q4_1   32 values   d, m, 16 bytes                               d·q + m
    Q5_0   32 values   d, 32 high bits, 16 bytes                    d·(q - 16)
    Q4_K  256 values   d, dmin, 12 bytes of scales, 128 bytes       d·s·q - dmin·t      s, t 6 bits, one a group of 32
    Q6_K  256 values   128 bytes, 64 bytes, 16 int8 scales, d       d·s·(q - 32)        s one a group of 16

In the 32-value types a byte's low half is value i, its high half value i + 16. Arithmetic is float32, in the
order written.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from twostep.model.tensor import Tensor, TensorType

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


def dequantize(tensor: Tensor) -> Floats:
    """All values, float32, shape `tensor.shape`."""
    return _DECODERS[tensor.type](_blocks(tensor)).reshape(tensor.shape)


def dequantize_rows(tensor: Tensor, rows: slice | NDArray[np.integer]) -> Floats:
    """The values of some rows of a matrix, float32, shape (rows, inputs), without touching the others' bytes."""
    blocks = _blocks(tensor).reshape(tensor.shape[0], -1, tensor.type.block_bytes)[rows]
    return _DECODERS[tensor.type](blocks.reshape(-1, tensor.type.block_bytes)).reshape(-1, tensor.shape[-1])


def _blocks(tensor: Tensor) -> Bytes:
    return tensor.data.reshape(-1, tensor.type.block_bytes)


def _half(columns: Bytes) -> Floats:
    """Float16 values, two columns each, as float32: shape (blocks, values)."""
    return np.ascontiguousarray(columns).view("<f2").astype(np.float32)


def _nibbles(columns: Bytes) -> Bytes:
    """4-bit numbers of packed bytes: all low halves of a block, then all high halves."""
    return np.concatenate([columns & 15, columns >> 4], axis=-1)


def _f32(blocks: Bytes) -> Floats:
    return np.ascontiguousarray(blocks).view("<f4").astype(np.float32)


def _bf16(blocks: Bytes) -> Floats:
    """A bfloat16 is the upper half of a float32."""
    return (np.ascontiguousarray(blocks).view("<u2").astype(np.uint32) << 16).view(np.float32)


def _q8_0(blocks: Bytes) -> Floats:
    return _half(blocks[:, :2]) * blocks[:, 2:].view(np.int8)


def _q4_0(blocks: Bytes) -> Floats:
    return _half(blocks[:, :2]) * (_nibbles(blocks[:, 2:]).astype(np.int8) - np.int8(8))


def _q4_1(blocks: Bytes) -> Floats:
    return _half(blocks[:, :2]) * _nibbles(blocks[:, 4:]) + _half(blocks[:, 2:4])


def _q5_0(blocks: Bytes) -> Floats:
    """Bit i of the 32 high bits is the fifth bit of value i."""
    high = np.unpackbits(blocks[:, 2:6], axis=-1, bitorder="little")
    return _half(blocks[:, :2]) * ((_nibbles(blocks[:, 6:]) | high << 4).astype(np.int8) - np.int8(16))


def _q4_k(blocks: Bytes) -> Floats:
    """Eight groups of 32; value bytes 32j to 32j+31 hold group 2j in their low halves, 2j+1 in their high ones."""
    scales, minima = _k_scales(blocks[:, 4:16])
    values = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    factors, offsets = _half(blocks[:, :2]) * scales, _half(blocks[:, 2:4]) * minima
    return factors[:, :, None] * values - offsets[:, :, None]


def _k_scales(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Eight 6-bit scales and eight 6-bit minima out of 12 bytes, shapes (blocks, 8).

    Bytes 0-3 and 4-7 hold scales and minima 0-3 in their low six bits; their two top bits are the top bits of scales
    and minima 4-7, whose low four bits are the halves of bytes 8-11.
    """
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=-1)
    minima = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=-1)
    return scales, minima


def _q6_k(blocks: Bytes) -> Floats:
    """Two halves of 128 values, each four runs of 32, whose low four bits share 64 bytes and top two 32 bytes."""
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(4, 1)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3
    values = (low | high << 4).astype(np.int8) - np.int8(32)
    factors = _half(blocks[:, 208:210]) * blocks[:, 192:208].view(np.int8)
    return factors[:, :, None] * values.reshape(-1, 16, 16)


_DECODERS: dict[TensorType, Callable[[Bytes], Floats]] = {
    TensorType.F32: _f32,
    TensorType.F16: _half,
    TensorType.BF16: _bf16,
    TensorType.Q4_0: _q4_0,
    TensorType.Q4_1: _q4_1,
    TensorType.Q5_0: _q5_0,
    TensorType.Q8_0: _q8_0,
    TensorType.Q4_K: _q4_k,
    TensorType.Q6_K: _q6_k,
}
