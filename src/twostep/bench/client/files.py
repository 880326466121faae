"""How many connections this process may have open, each being a file."""

import resource

from twostep.bench.load.record import Closed, Mode
from twostep.errors import InvalidParameterError

SPARE = 64
"""Files for everything else."""


def make_room(mode: Mode, requests: int) -> int:
    """Raises the process's limit of open files as far as it may and the run can need it; gives the connections that
    fit. Raises `InvalidParameterError` if clients of a closed loop do not, or not one connection does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = min(mode.clients, requests) if isinstance(mode, Closed) else requests
    wanted = most + SPARE
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if isinstance(mode, Closed) and allowed < wanted:
        message = f"{most} clients need {wanted} open files, this process may have {hard} (ulimit -Hn)"
        raise InvalidParameterError(message, "concurrency")
    room = max(allowed, soft) - SPARE
    if room < 1:
        raise InvalidParameterError(
            f"{SPARE + 1} open files are needed at least, this process may have {hard} (ulimit -Hn)"
        )
    return room
