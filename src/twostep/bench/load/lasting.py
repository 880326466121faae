"""A workload made long enough for a rate: the same again, but like nothing that a server has seen."""

from dataclasses import replace

from twostep.errors import WorkloadError
from twostep.workload.rates import mean_rate
from twostep.workload.workload import Workload, WorkloadRequest


def lasting(workload: Workload, requests: int) -> Workload:
    """At least so many requests: as often as needed once more, each time with content of its own, which shares no
    prefix with the times before. For workloads whose requests wait for no other.

    Raises `WorkloadError` for requests that have their text, or all come at once.
    """
    if requests <= len(workload.requests) or not workload.requests:
        return workload
    times = -(-requests // len(workload.requests))
    rate = mean_rate(workload)
    if rate is None or any(one.text is not None for one in workload.requests):
        why = "has its prompts' text" if rate else "comes all at once"
        raise WorkloadError(
            f"{workload.name or 'the workload'} has {len(workload.requests)} requests and {requests} are needed; it "
            f"{why}, so it cannot be repeated"
        )
    return replace(workload, requests=_repeated(workload, times, len(workload.requests) / rate))


def _repeated(workload: Workload, times: int, period_s: float) -> list[WorkloadRequest]:
    blocks = 1 + max((block for one in workload.requests for block in one.blocks), default=0)
    return [
        replace(
            one,
            arrival_s=round(one.arrival_s + time * period_s, 6),
            blocks=tuple(block + time * blocks for block in one.blocks),
        )
        for time in range(times)
        for one in workload.requests
    ]
