"""Threads that mostly wait, beside threads that compute without a pause.

Kernels keep every core busy. A thread that wakes to take in a step's result, or to write a token to a client, waits
until the system's next look at who runs: up to 4 ms, on many machines as long as the step itself. Linux from 6.12 on
lets a thread ask for shorter turns (`sched_setattr(2)`, `sched_runtime`); who has shorter ones gets a core at once when
it wakes. It is no more of the processor, only sooner, and needs no privilege. A client that measures on the same cores
does well to have them too: else it waits, and takes that for the server's time.
"""

import ctypes
import os
import platform

SHORT_TURN_NS = 600_000
"""Long enough for a token's way to its client (0.4 ms of work): whoever needs longer than its turn waits again. Shorter
than the turns that others have, 0.7 ms on one core, 1.4 ms on two, 2.8 ms on eight and more."""

_NUMBER = {"x86_64": 314, "aarch64": 274, "riscv64": 274}
"""Of the system call: not every C library has a function for it."""
_RESET_ON_FORK = 1


class _Attributes(ctypes.Structure):
    """The kernel's `struct sched_attr`, first version."""

    _fields_ = [
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime_ns", ctypes.c_uint64),
        ("deadline_ns", ctypes.c_uint64),
        ("period_ns", ctypes.c_uint64),
    ]


def take_short_turns() -> bool:
    """For the calling thread; threads and processes that it starts have ordinary turns.

    Whether the system took it: an older Linux ignores it, others do not know it. All works without, only later.
    """
    number = _NUMBER.get(platform.machine())
    if (
        platform.system() != "Linux"
        or number is None
        or os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK != os.SCHED_OTHER
    ):
        return False
    wanted = _Attributes(
        size=ctypes.sizeof(_Attributes),
        flags=_RESET_ON_FORK,
        nice=os.getpriority(os.PRIO_PROCESS, 0),
        runtime_ns=SHORT_TURN_NS,
    )
    taken: int = ctypes.CDLL(None).syscall(number, 0, ctypes.byref(wanted), 0)
    return taken == 0
