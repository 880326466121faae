"""How fast and how evenly the requests of a workload arrive."""

from itertools import pairwise
from statistics import fmean, pstdev

from twostep.workload.workload import Workload


def starts_s(workload: Workload) -> list[float]:
    """When requests arrive that wait for no other."""
    return [request.arrival_s for request in workload.requests if request.after is None]


def mean_rate(workload: Workload) -> float | None:
    """Requests per second while new ones arrive: (starts - 1) / (last start - first), times requests per start. None if
    all start at once."""
    starts = starts_s(workload)
    if not starts or starts[-1] == starts[0]:
        return None
    return (len(starts) - 1) / (starts[-1] - starts[0]) * len(workload.requests) / len(starts)


def arrival_cv(workload: Workload) -> float | None:
    """Coefficient of variation of the gaps between starts: 1 for a Poisson process, 0 for evenly spaced. None for fewer
    than two gaps, or if all start at once."""
    gaps = [after - before for before, after in pairwise(starts_s(workload))]
    if len(gaps) < 2 or not (mean := fmean(gaps)):
        return None
    return pstdev(gaps) / mean
