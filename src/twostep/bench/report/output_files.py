"""Files that are written: tried before minutes of measuring, and never half there."""

import os
from pathlib import Path

from twostep.errors import ResultError


def check_outputs(*paths: Path | None) -> None:
    """Raises `ResultError` for one that could not be written, and for two that are the same file."""
    named = [path for path in paths if path is not None]
    for i, path in enumerate(named):
        _check(path)
        if path.resolve() in [other.resolve() for other in named[:i]]:
            raise ResultError(f"{path} is named twice; each file is for one thing")


def is_replaced(path: Path) -> bool:
    """Whether what is written takes the place of what was there: a pipe or a terminal gets it all."""
    return path.is_file() or not path.exists()


def write_file(path: Path, content: bytes) -> None:
    """Whoever reads `path` meanwhile sees the old content or the new one, whole. Raises `ResultError`."""
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
            raise ResultError(f"{path}: is a folder; it has to be a file")
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
    """In the same folder, else it could not take the other's place."""
    whole = path.resolve()
    return whole.with_name(f".{whole.name}.{os.getpid()}")
