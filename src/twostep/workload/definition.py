"""A workload: requests by arrival time, lengths and shared prefixes, with or without their text."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, pstdev


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request. Token counts depend on the tokenizer of the intended model."""

    arrival_s: float
    """Seconds from the start of the workload; with `after`, from the end of that request."""
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    """Ids of the content of the prompt in blocks of `block_tokens`, from its first token. Equal leading blocks are a
    shared prefix. Blocks may cover only part of the prompt, the rest being unique; the last may extend beyond it."""
    after: int | None = None
    """Number of an earlier request that must end first: the previous turn of a conversation."""
    text: str | None = None
    """The prompt, if known; used instead of `blocks`."""


@dataclass(frozen=True)
class Workload:
    """`requests` in order of their numbers; those without `after` are in order of arrival."""

    requests: Sequence[WorkloadRequest]
    block_tokens: int = 16
    name: str = ""
    source: str = ""
    """Origin of the workload, with the licence of its source."""

    def shared_tokens(self) -> Iterator[int]:
        """Yields, for each request, the tokens at the start of its prompt that an earlier prompt has too. This is an
        upper bound for any prefix cache. A shared block that extends beyond one prompt counts up to the end of that
        prompt.

        The sum does not depend on the order of the requests.
        """
        tree = dict[tuple[int, int], int]()  # (node, block) to next node; the root is 0
        reach = [0]  # per node: tokens to the end of its block, or of the longest prompt that ends in it
        for request in self.requests:
            node = shared = 0
            for number, block in enumerate(request.blocks, start=1):
                node = tree.setdefault((node, block), len(reach))
                reach += [0] * (node == len(reach))
                end = min(number * self.block_tokens, request.input_tokens)
                shared = max(shared, min(reach[node], end))
                reach[node] = max(reach[node], end)
            yield shared


def starts_s(workload: Workload) -> list[float]:
    """Arrival times of requests that wait for no other."""
    return [request.arrival_s for request in workload.requests if request.after is None]


def mean_rate(workload: Workload) -> float | None:
    """Requests per second: (starts - 1) / (last start - first start), times requests per start. None if all start at
    once."""
    starts = starts_s(workload)
    if not starts or starts[-1] == starts[0]:
        return None
    return (len(starts) - 1) / (starts[-1] - starts[0]) * len(workload.requests) / len(starts)


def arrival_cv(workload: Workload) -> float | None:
    """Coefficient of variation of the gaps between starts: 1 for a Poisson process, 0 for even spacing. None with fewer
    than two gaps, or if all start at once."""
    gaps = [after - before for before, after in pairwise(starts_s(workload))]
    if len(gaps) < 2 or not (mean := fmean(gaps)):
        return None
    return pstdev(gaps) / mean
