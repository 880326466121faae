"""What a user may write for a model: a name of the catalogue, a `.gguf` path, or the stem of a file in the cache."""

import os
from difflib import get_close_matches
from pathlib import Path

from twostep.errors import FetchError, ModelFileError
from twostep.store.cache import cache_folder, cached_files
from twostep.store.catalogue import CATALOGUE, Entry
from twostep.store.fetch import ensure
from twostep.store.progress import Progress


def resolve(model: str, progress: Progress) -> Path:
    """The weight file that `model` means, fetched if need be.

    Raises `ModelFileError` for a path without a file, `FetchError` for a name that nobody knows or that cannot be had.
    """
    if model in CATALOGUE:
        return ensure(CATALOGUE[model], progress)
    if model.endswith(".gguf") or os.sep in model:
        return _file(Path(model))
    if (cached := cache_folder() / f"{model}.gguf").is_file():
        return cached
    raise _unknown(model, [*CATALOGUE, *(path.stem for path in cached_files())], "; or give the path of a .gguf file")


def entry_named(name: str) -> Entry:
    """Raises `FetchError` that lists what can be fetched."""
    if name not in CATALOGUE:
        raise _unknown(name, list(CATALOGUE))
    return CATALOGUE[name]


def _file(path: Path) -> Path:
    if not path.exists():
        raise ModelFileError(f"{path}: no such file")
    if not path.is_file():
        raise ModelFileError(f"{path}: not a file; a model is a .gguf file")
    return path


def _unknown(model: str, known: list[str], otherwise: str = "") -> FetchError:
    """Suggests those of the known names that look alike."""
    near = get_close_matches(model, known, n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    return FetchError(f"unknown model {model!r}; known: {', '.join(known)}{otherwise}{hint}")
