"""Dequantisation, bit for bit against a decoder of one value at a time, and against blocks decoded by hand."""

import struct

import numpy as np
import pytest
from numpy.typing import NDArray
from support.scalar_quants import DECODERS

from twostep.model.quants import dequantize, dequantize_rows
from twostep.model.tensor import Tensor, TensorType

HALF_COLUMNS = {  # where a block has float16 scales
    TensorType.Q4_0: [0], TensorType.Q4_1: [0, 2], TensorType.Q5_0: [0], TensorType.Q8_0: [0],
    TensorType.Q4_K: [0, 2], TensorType.Q6_K: [208], TensorType.F16: [0],
}  # fmt: skip


def random_tensor(kind: TensorType, rows: int = 5, blocks: int = 3) -> Tensor:
    """Random bytes, but finite values."""
    rng = np.random.default_rng(kind)
    if kind in (TensorType.F32, TensorType.BF16):
        raw = rng.standard_normal((rows * blocks, 1)).astype("<f4").view(np.uint8)[:, -kind.block_bytes :]
    else:
        raw = rng.integers(0, 256, (rows * blocks, kind.block_bytes), dtype=np.uint8)
        for column in HALF_COLUMNS[kind]:
            raw[:, column : column + 2] = rng.standard_normal((len(raw), 1)).astype("<f2").view(np.uint8)
    return Tensor("t", kind, (rows, blocks * kind.block_elements), raw.reshape(-1))


def bits(values: NDArray[np.float32]) -> list[int]:
    assert values.dtype == np.float32
    return values.reshape(-1).view(np.uint32).tolist()


@pytest.mark.parametrize("kind", TensorType)
def test_agrees_bit_for_bit_with_one_value_at_a_time(kind: TensorType) -> None:
    tensor = random_tensor(kind)
    blocks = tensor.data.tobytes()
    size = kind.block_bytes
    expected = [value for at in range(0, len(blocks), size) for value in DECODERS[kind](blocks[at : at + size])]
    found = dequantize(tensor)
    assert found.shape == tensor.shape
    assert len(set(bits(found))) > 5
    assert bits(found) == bits(np.array(expected, np.float32))


@pytest.mark.parametrize("kind", TensorType)
def test_rows_are_those_of_the_whole(kind: TensorType) -> None:
    tensor = random_tensor(kind)
    whole = dequantize(tensor)
    assert bits(dequantize_rows(tensor, slice(1, 4))) == bits(whole[1:4])
    assert bits(dequantize_rows(tensor, np.array([4, 0, 4]))) == bits(whole[[4, 0, 4]])
    assert dequantize_rows(tensor, slice(2, 2)).shape == (0, tensor.shape[1])


def by_hand(kind: TensorType, raw: bytes) -> list[float]:
    data = np.frombuffer(raw, np.uint8)
    return dequantize(Tensor("t", kind, (1, kind.block_elements), data))[0].tolist()


def half(value: float) -> bytes:
    return struct.pack("<e", value)


def test_q4_0_by_hand() -> None:
    values = by_hand(TensorType.Q4_0, half(0.5) + bytes([0xF0, 0x88, 0x1A]) + bytes([0x88] * 13))
    assert values[:3] == [-4.0, 0.0, 1.0]  # low halves 0, 8, 10
    assert values[16:19] == [3.5, 0.0, -3.5]  # high halves 15, 8, 1


def test_q4_1_by_hand() -> None:
    values = by_hand(TensorType.Q4_1, half(2.0) + half(-3.0) + bytes([0x21]) + bytes(15))
    assert (values[0], values[16], values[1]) == (-1.0, 1.0, -3.0)


def test_q5_0_by_hand() -> None:
    values = by_hand(TensorType.Q5_0, half(1.0) + struct.pack("<I", 1 | 1 << 17) + bytes([0x03, 0x40]) + bytes(14))
    assert (values[0], values[1]) == (3.0, -16.0)  # 16 + 3 - 16; 0 + 0 - 16
    assert (values[16], values[17]) == (-16.0, 4.0)  # 0 + 0 - 16; 16 + 4 - 16


def test_q8_0_by_hand() -> None:
    values = by_hand(TensorType.Q8_0, half(0.25) + struct.pack("32b", -128, 127, *range(30)))
    assert values[:4] == [-32.0, 31.75, 0.0, 0.25]


def test_q4_k_by_hand() -> None:
    """Group 0: scale 3, minimum 5. Group 5: scale 0b100010, minimum 0b010001, their top bits in bytes 1 and 5."""
    packed = bytearray(12)
    packed[0], packed[4] = 3, 5
    packed[1], packed[5], packed[9] = 0b10 << 6, 0b01 << 6, 0b0001_0010
    quants = bytearray(128)
    quants[0] = 0x07  # value 0, group 0
    quants[64] = 0x90  # value 160, group 5
    values = by_hand(TensorType.Q4_K, half(1.0) + half(2.0) + packed + quants)
    assert values[0] == 3 * 7 - 2 * 5
    assert values[1] == -10.0
    assert values[160] == 34 * 9 - 2 * 17
    assert values[32] == 0.0  # group 1: scale and minimum 0


def test_q6_k_by_hand() -> None:
    """Value 0: low 5, high 2. Value 96 (run 3): low 4, high 1, scale 6 of group 6. The second half starts at 128."""
    low, high, scales = bytearray(128), bytearray(64), bytearray(16)
    low[0], low[32] = 0x05, 0x40
    high[0] = 0b01_00_00_10
    low[64] = 0x0F
    scales[0], scales[6], scales[8] = 2, 0xFF, 1  # 0xFF is -1
    values = by_hand(TensorType.Q6_K, bytes(low + high + scales) + half(0.5))
    assert values[0] == 0.5 * 2 * (5 + 32 - 32)
    assert values[96] == 0.5 * -1 * (4 + 16 - 32)
    assert values[128] == 0.5 * (15 - 32)


def test_bfloat16_by_hand() -> None:
    assert by_hand(TensorType.BF16, bytes([0x40, 0xC0])) == [-3.0]
