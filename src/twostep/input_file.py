"""Input files that can be read more than once: regular files, pipes, standard input."""

import io
import os
import stat
import sys
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO
from weakref import finalize

STANDARD_INPUT = "-"
CHUNK_BYTES = 1 << 16


class InputFile:
    """A file that can be opened from the beginning any number of times. `-` is standard input.

    The bytes of a pipe, which can be read only once, are copied to an unnamed temporary file as they are read.
    Raises `OSError` naming the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._kept: _Kept | None = None
        if str(path) == STANDARD_INPUT:
            self._kept = _Kept(sys.stdin.buffer)
        elif not stat.S_ISREG(path.stat().st_mode):
            self._kept = _Kept(path.open("rb"))

    def open(self) -> BinaryIO:
        """Opens the file at the beginning. Several may be open at a time. The caller closes it."""
        return self.path.open("rb") if self._kept is None else io.BufferedReader(_Reader(self._kept), CHUNK_BYTES)

    def is_file_at(self, path: Path) -> bool:
        """Whether `path` is the same regular file."""
        return self._kept is None and path.exists() and path.samefile(self.path)

    def __str__(self) -> str:
        return "standard input" if str(self.path) == STANDARD_INPUT else str(self.path)


class _Kept:
    """A stream and a copy of the bytes read from it."""

    def __init__(self, source: BinaryIO) -> None:
        self._source = source
        self._copy: BinaryIO = TemporaryFile(buffering=0)  # noqa: SIM115  lives as long as this object
        self._size = 0
        finalize(self, self._copy.close)
        if source is not sys.stdin.buffer:
            finalize(self, source.close)

    def read_at(self, start: int, most: int) -> bytes:
        """Reads at most `most` bytes from `start`, which must not exceed the bytes read so far. Empty at the end."""
        if start == self._size:
            data = self._source.read1(most)  # type: ignore[attr-defined]
            self._size += self._copy.write(data)
            return bytes(data)
        return os.pread(self._copy.fileno(), most, start)


class _Reader(io.RawIOBase):
    """One pass over the input."""

    def __init__(self, kept: _Kept) -> None:
        self._kept, self._at = kept, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "memoryview[int]") -> int:  # type: ignore[override]
        data = self._kept.read_at(self._at, len(buffer))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
