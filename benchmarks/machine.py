"""The machine of a measurement, its state, and the commit of the sources."""

import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import sleep

from benchmarks.counters import missing_counters
from benchmarks.measurement import say
from twostep.engine.profiles import cpu_name
from twostep.kernels.threads import default_threads, physical_cores

ROOT = Path(__file__).parent.parent
MEASURED = ("src", "native", "CMakeLists.txt", "benchmarks", ":!benchmarks/results")
"""Paths that affect a measurement, as git pathspecs."""

FLAGS_OF_INTEREST = (
    "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_int8", "amx_bf16",
    "asimddp", "asimdhp", "i8mm", "bf16", "sve",
)  # fmt: skip
"""Relevant instruction sets, as spelled by the Linux kernel (x86, then Arm)."""

BUSY_LIMIT = 0.05
"""Above this share, tables report that the machine was not idle."""

BUSY_WATCH_S = 1.0
"""How long the CPU use of other processes is observed before a measurement."""


@dataclass(frozen=True)
class Cache:
    """A cache of the first CPU, shared by `shared_by` CPUs."""

    level: int
    kind: str
    bytes: int
    shared_by: int


@dataclass(frozen=True)
class Machine:
    cpu: str
    flags: tuple[str, ...]
    cores: int
    cpus: int
    threads: int
    """Default threads of Twostep."""
    caches: tuple[Cache, ...]
    memory_bytes: int
    kernel: str
    """Version without the build name."""
    compiler: str
    python: str
    commit: str | None
    """None outside a git checkout."""
    modified: bool | None
    """Whether measured or measuring files differ from the commit."""
    date: str
    load_average: float
    """Load average of the previous minute."""
    busy: float
    """Share of CPU time used by other processes in the second before: 0 on an idle machine."""
    perf: str
    """Available hardware counters, or why there are none."""


def describe() -> Machine:
    """Describes the machine and its current state; takes a second."""
    cpuinfo = _read("/proc/cpuinfo")
    commit = _git("rev-parse", "HEAD")
    return Machine(
        cpu=cpu_name(cpuinfo),
        flags=known_flags(cpuinfo),
        cores=physical_cores(os.sched_getaffinity(0)),
        cpus=len(os.sched_getaffinity(0)),
        threads=default_threads(),
        caches=tuple(_caches(Path("/sys/devices/system/cpu/cpu0/cache"))),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        kernel=platform.release().partition("-")[0],
        compiler=_compiler(),
        python=platform.python_version(),
        commit=commit,
        modified=None if commit is None else _modified(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        load_average=os.getloadavg()[0],
        busy=_busy(),
        perf=missing_counters() or "hardware counters",
    )


def watched() -> Machine:
    """As `describe()`; prints a warning if the machine is not idle."""
    found = describe()
    if found.busy > BUSY_LIMIT:
        say(f"other processes use {found.busy:.0%} of this machine: the results will be too low")
    return found


def slug(name: str) -> str:
    """A name for use in a file name."""
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")


def known_flags(cpuinfo: str) -> tuple[str, ...]:
    found = (_field(cpuinfo, "flags") or _field(cpuinfo, "Features") or "").split()
    return tuple(flag for flag in FLAGS_OF_INTEREST if flag in found)


def _field(cpuinfo: str, name: str) -> str | None:
    found = re.search(rf"^{name}\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    return found[1] if found else None


def _caches(folder: Path) -> list[Cache]:
    return [_cache(index) for index in sorted(folder.glob("index*"))]


def _cache(index: Path) -> Cache:
    size = _read(index / "size").strip()
    unit = {"K": 1 << 10, "M": 1 << 20}[size[-1]]
    cpus = _read(index / "shared_cpu_list").strip()
    return Cache(int(_read(index / "level")), _read(index / "type").strip(), int(size[:-1]) * unit, cpu_count(cpus))


def cpu_count(cpu_list: str) -> int:
    """CPUs in the kernel's notation, such as `0-3,8`."""
    ranges = [part.partition("-") for part in cpu_list.split(",")]
    return sum(int(last or first) - int(first) + 1 for first, _, last in ranges)


def _compiler() -> str:
    """The C++ compiler that a build would use."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return "none found"
    shown = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    return shown.stdout.partition("\n")[0].strip() or "unknown"


def _git(*arguments: str) -> str | None:
    """Output of git; None if git is not installed or the sources are not a checkout."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _modified() -> bool:
    return bool(_git("status", "--porcelain", "--untracked-files=no", "--", *MEASURED))


def _busy() -> float:
    """Share of non-idle time of all CPUs while this process sleeps."""
    idle_before, total_before = _cpu_ticks()
    sleep(BUSY_WATCH_S)
    idle, total = _cpu_ticks()
    return round(1 - (idle - idle_before) / max(1, total - total_before), 3)


def _cpu_ticks() -> tuple[int, int]:
    """Idle (waiting for disks included) and all ticks since the start of the system."""
    ticks = [int(tick) for tick in _read("/proc/stat").partition("\n")[0].split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)


def _read(path: Path | str) -> str:
    return Path(path).read_text()
