"""A weight file's key-value pairs, asked for by key and kind: what is missing or of the wrong kind is named."""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import overload

import numpy as np
from numpy.typing import NDArray

from twostep.errors import ModelFileError


class StringArray(Sequence[str]):
    """Strings that stay in the mapped file until asked for: half a million of them cost a scan, not a decode.

    String i is bytes `starts[i]` up to 8 before `starts[i + 1]` (each length stands before its string), the last up to
    `end`. Text that is not UTF-8 raises `ModelFileError` when it is read.
    """

    def __init__(self, where: str, data: memoryview, starts: "array[int]", end: int) -> None:
        self._where = where
        self._data = data
        self._starts = starts
        self._end = end

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self._decode(index % len(self))

    def __iter__(self) -> Iterator[str]:
        return iter(self.decoded())

    def decoded(self) -> list[str]:
        """All strings at once, several times quicker than one by one."""
        if not self._starts:
            return []
        first = self._starts[0]
        raw = bytes(self._data[first : self._end])
        starts = [start - first for start in self._starts]
        stops = [start - _LENGTH_BYTES for start in starts[1:]] + [len(raw)]
        try:
            return [raw[start:stop].decode() for start, stop in zip(starts, stops, strict=True)]
        except UnicodeDecodeError:
            return [self._decode(i) for i in range(len(self))]  # raises, naming the string

    def _decode(self, index: int) -> str:
        stop = self._starts[index + 1] - _LENGTH_BYTES if index + 1 < len(self) else self._end
        try:
            return str(self._data[self._starts[index] : stop], "utf-8")
        except UnicodeDecodeError as error:
            raise ModelFileError(f"{self._where}: string {index} is not UTF-8 ({error.reason})") from None


_LENGTH_BYTES = 8

Value = bool | int | float | str | StringArray | NDArray[np.generic]


class Metadata(Mapping[str, Value]):
    """The pairs of one file, read-only. A missing key without a `default` is an error, so is a wrong kind."""

    def __init__(self, path: Path, values: Mapping[str, Value]) -> None:
        self._path = path
        self._values = values

    def __getitem__(self, key: str) -> Value:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number, at least 0 (a size, a count, a token id)."""
        value = self._required(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.error(key, f"is {_shown(value)}, needs a whole number of 0 or more")
        return value

    def positive(self, key: str, default: int | None = None) -> int:
        """A whole number, at least 1."""
        value = self.count(key, default)
        if value == 0:
            raise self.error(key, "is 0, needs a whole number of 1 or more")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number."""
        value = self._required(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
            raise self.error(key, f"is {_shown(value)}, needs a finite number")
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self._required(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"is {_shown(value)}, needs true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._required(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"is {_shown(value)}, needs a string")
        return value

    def strings(self, key: str) -> StringArray:
        value = self._required(key, None)
        if not isinstance(value, StringArray):
            raise self.error(key, f"is {_shown(value)}, needs an array of strings")
        return value

    def integers(self, key: str) -> NDArray[np.generic]:
        value = self._required(key, None)
        if not isinstance(value, np.ndarray) or not np.issubdtype(value.dtype, np.integer):
            raise self.error(key, f"is {_shown(value)}, needs an array of whole numbers")
        return value

    def error(self, key: str, problem: str) -> ModelFileError:
        """The error to raise about `key`, naming the file."""
        return ModelFileError(f"{self.where(key)} {problem}")

    def where(self, key: str) -> str:
        """How errors name `key`."""
        return f"{self._path}: key {key!r}"

    def _required(self, key: str, default: Value | None) -> Value:
        value = self._values.get(key, default)
        if value is None:
            raise self.error(key, "is missing")
        return value


def _shown(value: Value) -> str:
    """A value as an error message shows it: short, whatever it holds."""
    if isinstance(value, StringArray):
        return f"an array of {len(value)} strings"
    if isinstance(value, np.ndarray):
        return f"an array of {len(value)} {value.dtype}"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
