"""Which machine a measurement was made on, in what state it was, and of which commit of the sources."""

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
from twostep.kernels.threads import default_threads, physical_cores

ROOT = Path(__file__).parent.parent
MEASURED = ("src", "native", "CMakeLists.txt", "benchmarks", ":!benchmarks/results")
"""Paths that a measurement depends on, as git names them."""

FLAGS_OF_INTEREST = (
    "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_int8", "amx_bf16",
    "asimddp", "asimdhp", "i8mm", "bf16", "sve",
)  # fmt: skip
"""Instruction sets that kernels of this kind use, in the kernel's spelling (x86, then Arm)."""

BUSY_LIMIT = 0.05
"""Above this share the tables say that the machine was not quiet."""

BUSY_WATCH_S = 1.0
"""How long the machine is watched for other work before a measurement."""


@dataclass(frozen=True)
class Cache:
    """One cache as the first CPU sees it; `shared_by` CPUs."""

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
    """What Twostep uses by default."""
    caches: tuple[Cache, ...]
    memory_bytes: int
    kernel: str
    """Version without the name of the build."""
    compiler: str
    python: str
    commit: str | None
    """None outside a git checkout."""
    modified: bool | None
    """Whether files that are measured, or that measure, differ from the commit."""
    date: str
    load_average: float
    """Of the minute before."""
    busy: float
    """Share of all CPUs' time that others took in the second before: 0 on a quiet machine."""
    perf: str
    """Which hardware counters there are, or why there are none."""


def describe() -> Machine:
    """Looks at the machine now; takes a second."""
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
    """`describe()`, with a word to the person who measures if the machine is not quiet."""
    found = describe()
    if found.busy > BUSY_LIMIT:
        say(f"others use {found.busy:.0%} of this machine: the numbers will be too low")
    return found


def cpu_name(cpuinfo: str) -> str:
    """Name with family and model, which tell apart what a virtual machine calls alike."""
    name = _field(cpuinfo, "model name")
    if name is None:
        return platform.machine()
    family, model = _field(cpuinfo, "cpu family"), _field(cpuinfo, "model")
    return f"{name} (family {family}, model {model})" if family and model else name


def slug(name: str) -> str:
    """A name as part of a file's name."""
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
    """The C++ compiler that a build on this machine finds."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return "none found"
    shown = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    return shown.stdout.partition("\n")[0].strip() or "unknown"


def _git(*arguments: str) -> str | None:
    """What git prints, None where it fails: not installed, or the sources are no checkout."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _modified() -> bool:
    return bool(_git("status", "--porcelain", "--untracked-files=no", "--", *MEASURED))


def _busy() -> float:
    """Share of the time of all CPUs that was not idle, while this process sleeps."""
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
