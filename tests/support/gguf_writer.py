"""Writes GGUF files for tests, sound ones and, through `NewTensor` and raw values, unsound ones.

Python values become: bool a boolean, int a u32, float an f32, str a string, list of str an array of strings, a numpy
array or scalar its own type. Anything else is written as the bytes of a `Raw`.
"""

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ALIGNMENT = 32

_U32, _F32, _BOOL, _STRING, _ARRAY = 4, 6, 7, 8, 9
_NUMPY_KINDS = {
    "uint8": 0, "int8": 1, "uint16": 2, "int16": 3, "uint32": 4, "int32": 5, "float32": 6, "bool": 7,
    "uint64": 10, "int64": 11, "float64": 12,
}  # fmt: skip


@dataclass(frozen=True)
class Raw:
    """A value written as it is: its type's number, then these bytes."""

    kind: int
    data: bytes


Value = bool | int | float | str | list[str] | np.ndarray | np.generic | Raw


@dataclass(frozen=True)
class NewTensor:
    """`shape` in numpy order; `kind` GGUF's number; `offset` None lays it behind the one before."""

    name: str
    kind: int
    shape: tuple[int, ...]
    data: bytes
    offset: int | None = None


def f32(name: str, values: np.ndarray) -> NewTensor:
    return NewTensor(name, 0, values.shape, values.astype("<f4").tobytes())


def gguf_bytes(metadata: Mapping[str, Value], tensors: Iterable[NewTensor] = (), version: int = 3) -> bytes:
    """A whole file. `general.alignment` among the metadata is kept to."""
    tensors = list(tensors)
    alignment = int(metadata.get("general.alignment", ALIGNMENT))  # type: ignore[arg-type]
    infos, data = b"", b""
    for tensor in tensors:
        offset = len(data) if tensor.offset is None else tensor.offset
        infos += _info(tensor, offset)
        data += _padded(tensor.data, alignment)
    pairs = b"".join(string(key) + _value(value) for key, value in metadata.items())
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata)) + pairs + infos
    return _padded(head, alignment) + data


def write_gguf(path: Path, metadata: Mapping[str, Value], tensors: Iterable[NewTensor] = ()) -> Path:
    path.write_bytes(gguf_bytes(metadata, tensors))
    return path


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def _info(tensor: NewTensor, offset: int) -> bytes:
    dimensions = tensor.shape[::-1]
    layout = f"<I{len(dimensions)}QIQ"
    return string(tensor.name) + struct.pack(layout, len(dimensions), *dimensions, tensor.kind, offset)


def _padded(data: bytes, alignment: int) -> bytes:
    return data + bytes(-len(data) % alignment)


def _value(value: Value) -> bytes:
    match value:
        case Raw():
            return struct.pack("<I", value.kind) + value.data
        case np.generic():  # before `float`, which numpy's float64 is
            return struct.pack("<I", _NUMPY_KINDS[value.dtype.name]) + value.tobytes()
        case bool():
            return struct.pack("<I?", _BOOL, value)
        case int():
            return struct.pack("<II", _U32, value)
        case float():
            return struct.pack("<If", _F32, value)
        case str():
            return struct.pack("<I", _STRING) + string(value)
        case list():
            return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + b"".join(map(string, value))
        case np.ndarray():
            return struct.pack("<IIQ", _ARRAY, _NUMPY_KINDS[value.dtype.name], len(value)) + value.tobytes()


EVERY_KIND: dict[str, Value] = {
    "u8": np.uint8(200), "i8": np.int8(-100), "u16": np.uint16(60000), "i16": np.int16(-30000),
    "u32": np.uint32(4_000_000_000), "i32": np.int32(-2_000_000_000), "f32": np.float32(1.5), "bool": True,
    "text": "größer 漢字", "u64": np.uint64(1 << 60), "i64": np.int64(-(1 << 60)), "f64": np.float64(1 / 3),
    "strings": ["", "a", "漢字", "z" * 300], "numbers": np.array([1, -2, 3], np.int32),
    "flags": np.array([True, False]), "no strings": [], "no numbers": np.array([], np.float32),
}  # fmt: skip
