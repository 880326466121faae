"""What this machine can do at best with the instruction set in use: the yardsticks of a measurement, of the same run.

Peaks are measured with the kernels' own instructions and all operands at hand; no kernel that also loads, unpacks and
scales can reach them.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from twostep.kernels import _native

WORKING_SETS = (2 << 20, 16 << 20, 64 << 20, 1 << 30)
"""Bytes at which the read bandwidth is shown: about a core's cache, the shared cache, beyond it, memory."""

LEAST_PASSES, READ_BYTES = 9, 1 << 30
"""A working set is read so often, and until so many bytes were read."""


@dataclass(frozen=True)
class Peak:
    """Operations per second; a multiplication and an addition count as two."""

    one_core: float
    all_threads: float


@dataclass(frozen=True)
class Bandwidth:
    """Bytes per second when all threads read `bytes` in all, again and again, each its own part."""

    bytes: int
    bytes_per_s: float


@dataclass(frozen=True)
class Limits:
    isa: str
    threads: int
    int8_dot: Peak
    fp32_fma: Peak
    read: tuple[Bandwidth, ...]


def measure(isa: str, threads: int, weight_bytes: int) -> Limits:
    """All limits; `weight_bytes` is one more working set. Takes a few seconds."""
    return Limits(
        isa=isa,
        threads=threads,
        int8_dot=_peak(lambda: _native.peak_int8(isa), threads),
        fp32_fma=_peak(lambda: _native.peak_f32(isa), threads),
        read=tuple(read_bandwidth(size, threads) for size in sorted({*WORKING_SETS, weight_bytes})),
    )


def read_bandwidth(size: int, threads: int) -> Bandwidth:
    """The median pass over `size` bytes, after a first that fills the caches as far as they go."""
    passes = max(LEAST_PASSES, READ_BYTES // size)
    return Bandwidth(size, _native.read_bandwidth(size, threads, passes))


def _peak(one_core: Callable[[], float], threads: int) -> Peak:
    return Peak(one_core(), threads * while_others_run(one_core, threads - 1))


def while_others_run(measured: Callable[[], float], others: int) -> float:
    """Runs it while so many other threads do the same, from before it begins until after it ends.

    Cores that share units, power or a host's processor are slower together than the sum of each alone.
    """
    done = threading.Event()
    started = threading.Barrier(others + 1)

    def keep_busy() -> None:
        started.wait()
        while not done.is_set():
            measured()

    companions = [threading.Thread(target=keep_busy) for _ in range(others)]
    for companion in companions:
        companion.start()
    try:
        started.wait()
        return measured()
    finally:
        done.set()
        for companion in companions:
            companion.join()
