"""Reads GGUF files, versions 2 and 3, little-endian: metadata and a view of each tensor's bytes, nothing copied.

The format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): magic, version, counts of tensors and keys; the
keys with typed values; per tensor its name, dimensions (innermost first), type and offset; then, aligned, the data.
Nothing in a file is believed: each count, length, dimension and offset is checked against what is left before its use.
The file is mapped, not read; whoever shortens it while it is in use takes the process down, as with any mapping.
"""

import mmap
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from struct import Struct

import numpy as np
from numpy.typing import NDArray

from twostep.errors import ModelFileError
from twostep.model.metadata import Metadata, StringArray, Value
from twostep.model.tensor import Tensor, TensorType

_SUPPORTED_VERSIONS = (2, 3)
_MAX_ENTRIES = 1 << 16  # keys, and tensors: far above any real file, low enough that a wrong count fails at once
_MAX_KEY_BYTES = 65535
_MAX_TENSOR_NAME_BYTES = 64
_MAX_TEXT_BYTES = 1 << 24
_MAX_DIMENSIONS = 4
_DEFAULT_ALIGNMENT = 32
_MAX_ALIGNMENT = 1 << 20

_U32 = Struct("<I")
_U64 = Struct("<Q")
_STRING, _ARRAY, _BOOL = 8, 9, 7
_NUMBERS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}

# Names of the types that we do not read, so that the error can say more than a number.
_OTHER_TENSOR_TYPES = {
    7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 13: "Q5_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64",
    28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip


@dataclass(frozen=True)
class GgufFile:
    """One open file. `tensors` are views of its mapping, which lives as long as any of them; `size` in bytes."""

    path: Path
    version: int
    size: int
    metadata: Metadata
    tensors: Mapping[str, Tensor]


def read_gguf(path: Path) -> GgufFile:
    """Opens and checks `path`. Raises `ModelFileError`, one line, for whatever is wrong with it."""
    data = _map(path)
    cursor = _Cursor(path, data)
    version = _read_version(cursor)
    tensor_count = cursor.entries("tensors")
    key_count = cursor.entries("keys")
    metadata = Metadata(path, _read_pairs(cursor, key_count))
    infos = _read_infos(cursor, tensor_count)
    tensors = _place(cursor, infos, _alignment(metadata))
    return GgufFile(path, version, len(data), metadata, tensors)


def _map(path: Path) -> memoryview:
    if path.exists() and not path.is_file():  # opening a pipe would wait for somebody to write
        raise ModelFileError(f"{path}: is not a regular file; supported: GGUF files")
    try:
        with path.open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except ValueError:
        raise ModelFileError(f"{path}: the file is empty; supported: GGUF") from None
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be opened: {error.strerror}") from None


class _Cursor:
    """Goes through a file front to back. What would read past the end raises, naming the offset and what was sought."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self.path = path
        self.data = data
        self.at = 0

    def error(self, problem: str) -> ModelFileError:
        return ModelFileError(f"{self.path}: {problem}")

    def take(self, count: int, what: str) -> memoryview:
        """The next `count` bytes."""
        if count > len(self.data) - self.at:
            left = len(self.data) - self.at
            raise self.error(f"truncated or damaged: {what} needs {count} bytes at offset {self.at}, {left} are left")
        self.at += count
        return self.data[self.at - count : self.at]

    def u32(self, what: str) -> int:
        return int(_U32.unpack(self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack(self.take(8, what))[0])

    def entries(self, what: str) -> int:
        count = self.u64(f"the number of {what}")
        if count > _MAX_ENTRIES:
            raise self.error(f"says it has {count} {what}; at most {_MAX_ENTRIES} are supported")
        return count

    def text(self, what: str, limit: int) -> str:
        length = self.u64(f"the length of {what}")
        if length > limit:
            raise self.error(f"{what} at offset {self.at} says it is {length} bytes long; supported: up to {limit}")
        try:
            return str(self.take(length, what), "utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"{what} before offset {self.at} is not UTF-8 ({error.reason})") from None

    def strings(self, count: int, what: str) -> StringArray:
        """Finds where each of `count` strings starts without decoding any: the hot loop of opening a file."""
        data, at, end, length_at = self.data, self.at, len(self.data), _U64.unpack_from
        if count > (end - at) // 8:
            raise self.error(f"{what} says it has {count} strings; {end - at} bytes are left at offset {at}")
        starts = array("Q", bytes(8 * count))
        for i in range(count):
            if at > end - 8:
                raise self.error(f"truncated or damaged: {what}, string {i}, runs past the end of the file")
            starts[i] = at + 8
            at += 8 + length_at(data, at)[0]
        if at > end:
            raise self.error(f"truncated or damaged: {what}, string {count - 1}, runs past the end of the file")
        self.at = at
        return StringArray(f"{self.path}: {what}", data, starts, at)


def _read_version(cursor: _Cursor) -> int:
    magic = bytes(cursor.take(4, "the magic"))
    if magic != b"GGUF":
        raise cursor.error(f"not a GGUF file (starts with {magic!r}); supported: GGUF versions 2 and 3")
    version = cursor.u32("the version")
    if version in _SUPPORTED_VERSIONS:
        return version
    if int.from_bytes(version.to_bytes(4, "little"), "big") in _SUPPORTED_VERSIONS:
        raise cursor.error("is a big-endian GGUF file; supported: little-endian")
    raise cursor.error(f"is GGUF version {version}; supported: versions 2 and 3")


def _read_pairs(cursor: _Cursor, count: int) -> dict[str, Value]:
    pairs: dict[str, Value] = {}
    for i in range(count):
        key = cursor.text(f"key {i}", _MAX_KEY_BYTES)
        if key in pairs:
            raise cursor.error(f"key {key!r} appears twice")
        pairs[key] = _read_value(cursor, cursor.u32(f"the type of key {key!r}"), f"key {key!r}")
    return pairs


def _read_value(cursor: _Cursor, kind: int, what: str) -> Value:
    if kind == _STRING:
        return cursor.text(what, _MAX_TEXT_BYTES)
    if kind == _ARRAY:
        return _read_array(cursor, what)
    return _as_scalar(_read_numbers(cursor, kind, 1, what))


def _as_scalar(values: NDArray[np.generic]) -> bool | int | float:
    value: bool | int | float = values[0].item()
    return value


def _read_array(cursor: _Cursor, what: str) -> Value:
    kind, count = cursor.u32(f"the element type of {what}"), cursor.u64(f"the length of {what}")
    if kind == _STRING:
        return cursor.strings(count, what)
    if kind == _ARRAY:
        raise cursor.error(f"{what} is an array of arrays; supported: arrays of numbers, booleans and strings")
    return _read_numbers(cursor, kind, count, what)


def _read_numbers(cursor: _Cursor, kind: int, count: int, what: str) -> NDArray[np.generic]:
    if kind not in _NUMBERS:
        raise cursor.error(f"{what} has value type {kind} before offset {cursor.at}; supported: 0 to 12")
    dtype = np.dtype(_NUMBERS[kind])
    raw = cursor.take(count * dtype.itemsize, what)
    if kind == _BOOL and max(raw, default=0) > 1:
        raise cursor.error(f"{what} has a boolean that is neither 0 nor 1")
    return np.frombuffer(raw, dtype)


@dataclass(frozen=True)
class _Info:
    """A tensor as the file lists it; `offset` from the start of the data, in bytes."""

    name: str
    type: TensorType
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) // self.type.block_elements * self.type.block_bytes


def _read_infos(cursor: _Cursor, count: int) -> list[_Info]:
    infos = [_read_info(cursor, i) for i in range(count)]
    seen: set[str] = set()
    for info in infos:
        if info.name in seen:
            raise cursor.error(f"tensor {info.name!r} appears twice")
        seen.add(info.name)
    return infos


def _read_info(cursor: _Cursor, index: int) -> _Info:
    name = cursor.text(f"the name of tensor {index}", _MAX_TENSOR_NAME_BYTES)
    what = f"tensor {name!r}"
    dimensions = cursor.u32(f"the number of dimensions of {what}")
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise cursor.error(f"{what} has {dimensions} dimensions; supported: 1 to {_MAX_DIMENSIONS}")
    shape = tuple(cursor.u64(f"the dimensions of {what}") for _ in range(dimensions))[::-1]
    kind = _tensor_type(cursor, cursor.u32(f"the type of {what}"), what)
    _check_shape(cursor, shape, kind, what)
    return _Info(name, kind, shape, cursor.u64(f"the offset of {what}"))


def _tensor_type(cursor: _Cursor, number: int, what: str) -> TensorType:
    try:
        return TensorType(number)
    except ValueError:
        name = _OTHER_TENSOR_TYPES.get(number, "unknown")
        supported = ", ".join(kind.name for kind in TensorType)
        raise cursor.error(f"{what} is of type {name} ({number}); supported: {supported}") from None


def _check_shape(cursor: _Cursor, shape: tuple[int, ...], kind: TensorType, what: str) -> None:
    if min(shape) == 0:
        raise cursor.error(f"{what} has shape {shape}: a dimension of 0")
    if shape[-1] % kind.block_elements:
        raise cursor.error(f"{what} has rows of {shape[-1]}, not whole {kind.name} blocks of {kind.block_elements}")


def _alignment(metadata: Metadata) -> int:
    key = "general.alignment"
    alignment = metadata.count(key, _DEFAULT_ALIGNMENT)
    if alignment.bit_count() != 1 or alignment > _MAX_ALIGNMENT:
        raise metadata.error(key, f"is {alignment}; supported: powers of two up to {_MAX_ALIGNMENT}")
    return alignment


def _place(cursor: _Cursor, infos: list[_Info], alignment: int) -> dict[str, Tensor]:
    """The tensors with their bytes, in the file's order; each aligned and inside the file, no byte shared."""
    start = -(-cursor.at // alignment) * alignment
    room = len(cursor.data) - start
    for info in infos:
        if info.offset % alignment:
            raise cursor.error(f"tensor {info.name!r} is at offset {info.offset}, not a multiple of {alignment}")
        if info.offset + info.nbytes > room:
            raise cursor.error(
                f"tensor {info.name!r} needs bytes {info.offset} to {info.offset + info.nbytes} of the data, "
                f"which has {max(room, 0)}: truncated or damaged"
            )
    _check_apart(infos, cursor.error)
    data = np.frombuffer(cursor.data, np.uint8)
    return {info.name: _view(info, data, start + info.offset) for info in infos}


def _check_apart(infos: list[_Info], error: Callable[[str], ModelFileError]) -> None:
    ordered = sorted(infos, key=lambda info: info.offset)
    for before, after in pairwise(ordered):
        if before.offset + before.nbytes > after.offset:
            raise error(f"tensors {before.name!r} and {after.name!r} overlap at offset {after.offset} of the data")


def _view(info: _Info, data: NDArray[np.uint8], start: int) -> Tensor:
    return Tensor(info.name, info.type, info.shape, data[start : start + info.nbytes])
