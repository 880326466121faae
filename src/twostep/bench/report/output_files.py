"""Output files: checked before the measurement, and replaced atomically."""

import os
from pathlib import Path

from twostep.errors import ResultError


def check_outputs(*paths: Path | None) -> None:
    """Raises `ResultError` for a path that cannot be written, and for the same file given twice."""
    named = [path for path in paths if path is not None]
    for i, path in enumerate(named):
        _check(path)
        if path.resolve() in [other.resolve() for other in named[:i]]:
            raise ResultError(f"{path} is given for two outputs; give two different files")


def is_replaced(path: Path) -> bool:
    """Whether writing replaces the content, as in a regular file; a pipe or a terminal receives every write."""
    return path.is_file() or not path.exists()


def write_file(path: Path, content: bytes) -> None:
    """Writes atomically: a concurrent reader sees the old or the new content. Raises `ResultError`."""
    try:
        if not is_replaced(path):
            path.write_bytes(content)
            return
        beside = _beside(path)
        try:
            beside.write_bytes(content)
            os.replace(beside, path.resolve())
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise ResultError(f"{path}: cannot be written: {error.strerror}") from error


def _check(path: Path) -> None:
    try:
        if path.is_dir():
            raise ResultError(f"{path}: is a folder; give a file")
        if not path.parent.is_dir():
            raise ResultError(f"{path}: no such folder")
        if path.exists():
            path.open("ab").close()
        if is_replaced(path):
            _beside(path).touch()
            _beside(path).unlink()
    except OSError as error:
        raise ResultError(f"{path}: cannot be written: {error.strerror}") from error


def _beside(path: Path) -> Path:
    """A temporary name in the same folder, so that it can be renamed."""
    whole = path.resolve()
    return whole.with_name(f".{whole.name}.{os.getpid()}")
