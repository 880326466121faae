"""What this machine can do at best with an instruction set: the limits that kernels are compared with."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from twostep.kernels import _native

WORKING_SETS = (2 << 20, 16 << 20, 64 << 20, 1 << 30)
"""Sizes for the read bandwidth: about the cache of a core, the shared cache, above it, memory."""

LEAST_PASSES, READ_BYTES = 9, 1 << 30
"""Minimum passes over a working set, and minimum bytes read."""


@dataclass(frozen=True)
class Peak:
    """Peak operations per second; a multiplication and an addition count as two."""

    one_core: float
    all_threads: float


@dataclass(frozen=True)
class Bandwidth:
    """Bytes per second when all threads repeatedly read `bytes` in total, each its own part."""

    bytes: int
    bytes_per_s: float


@dataclass(frozen=True)
class Limits:
    isa: str
    threads: int
    int8_dot: Peak
    fp32_fma: Peak
    read: tuple[Bandwidth, ...]


def measure_limits(isa: str, threads: int, weight_bytes: int) -> Limits:
    """Measures the limits of this machine with the instruction set in use; takes a few seconds.

    `weight_bytes` is an additional working set. Peaks use the kernels' own instructions with all operands in registers;
    kernels that also load, unpack and scale cannot reach them.
    """
    return Limits(
        isa=isa,
        threads=threads,
        int8_dot=_peak(lambda: _native.peak_int8(isa), threads),
        fp32_fma=_peak(lambda: _native.peak_f32(isa), threads),
        read=tuple(read_bandwidth(size, threads) for size in sorted({*WORKING_SETS, weight_bytes})),
    )


def read_bandwidth(size: int, threads: int) -> Bandwidth:
    """Bandwidth of the median pass over `size` bytes, after a warm-up pass."""
    passes = max(LEAST_PASSES, READ_BYTES // size)
    return Bandwidth(size, _native.read_bandwidth(size, threads, passes))


def _peak(one_core: Callable[[], float], threads: int) -> Peak:
    return Peak(one_core(), threads * while_others_run(one_core, threads - 1))


def while_others_run(measured: Callable[[], float], others: int) -> float:
    """Runs `measured` while `others` threads do the same throughout.

    Cores that share units, power or a host processor are slower together than alone.
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
