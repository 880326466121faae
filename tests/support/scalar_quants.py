"""The block layouts of GGUF decoded one value at a time, from the format's description: the oracle of `model.quants`.

Scalars are numpy float32, so that each product and sum is rounded as the vectorised decoder rounds it.
"""

import struct
from collections.abc import Callable, Iterator

import numpy as np

from twostep.model.tensor import TensorType

F = np.float32


def half(raw: bytes, at: int) -> F:
    return F(struct.unpack_from("<e", raw, at)[0])


def nibble(raw: bytes, i: int) -> int:
    """4-bit value i of 32 in 16 bytes: the low halves first."""
    return raw[i] & 15 if i < 16 else raw[i - 16] >> 4


def q8_0(block: bytes) -> Iterator[F]:
    for i in range(32):
        yield half(block, 0) * F(struct.unpack_from("b", block, 2 + i)[0])


def q4_0(block: bytes) -> Iterator[F]:
    for i in range(32):
        yield half(block, 0) * F(nibble(block[2:], i) - 8)


def q4_1(block: bytes) -> Iterator[F]:
    for i in range(32):
        yield half(block, 0) * F(nibble(block[4:], i)) + half(block, 2)


def q5_0(block: bytes) -> Iterator[F]:
    high = struct.unpack_from("<I", block, 2)[0]
    for i in range(32):
        yield half(block, 0) * F((nibble(block[6:], i) | (high >> i & 1) << 4) - 16)


def q4_k(block: bytes) -> Iterator[F]:
    packed, values = block[4:16], block[16:]
    for i in range(256):
        group = i // 32
        if group < 4:
            scale, minimum = packed[group] & 63, packed[group + 4] & 63
        else:
            scale = packed[group + 4] & 15 | packed[group - 4] >> 6 << 4
            minimum = packed[group + 4] >> 4 | packed[group] >> 6 << 4
        byte = values[i // 64 * 32 + i % 32]
        q = byte & 15 if group % 2 == 0 else byte >> 4
        yield half(block, 0) * F(scale) * F(q) - half(block, 2) * F(minimum)


def q6_k(block: bytes) -> Iterator[F]:
    low, high, scales = block[:128], block[128:192], block[192:208]
    for i in range(256):
        part, run, column = i // 128, i % 128 // 32, i % 32
        byte = low[part * 64 + run % 2 * 32 + column]
        q = (byte & 15 if run < 2 else byte >> 4) | (high[part * 32 + column] >> 2 * run & 3) << 4
        scale = struct.unpack_from("b", scales, i // 16)[0]
        yield half(block, 208) * F(scale) * F(q - 32)


def f32(block: bytes) -> Iterator[F]:
    yield F(struct.unpack("<f", block)[0])


def f16(block: bytes) -> Iterator[F]:
    yield half(block, 0)


def bf16(block: bytes) -> Iterator[F]:
    yield F(struct.unpack("<f", b"\0\0" + block)[0])


DECODERS: dict[TensorType, Callable[[bytes], Iterator[F]]] = {
    TensorType.F32: f32,
    TensorType.F16: f16,
    TensorType.BF16: bf16,
    TensorType.Q4_0: q4_0,
    TensorType.Q4_1: q4_1,
    TensorType.Q5_0: q5_0,
    TensorType.Q8_0: q8_0,
    TensorType.Q4_K: q4_k,
    TensorType.Q6_K: q6_k,
}
