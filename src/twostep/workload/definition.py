"""A workload: requests by arrival time, lengths and shared prefixes, with or without their text."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, pstdev


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request. Tokens are counted as the model that it is meant for counts them."""

    arrival_s: float
    """From the begin of the workload; with `after`, from the end of that request."""
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    """Content of the prompt by blocks of the workload's `block_tokens`, from its first token: equal leading blocks are
    a shared prefix. They may cover only a part of the prompt, the rest being like nothing else; the last may reach
    beyond its end."""
    after: int | None = None
    """Number in the workload of an earlier request that has to end first: the turn before in a conversation."""
    text: str | None = None
    """The prompt, where it is known. It goes before `blocks`."""


@dataclass(frozen=True)
class Workload:
    """`requests` in order of their number; arrivals of those without `after` never go back."""

    requests: Sequence[WorkloadRequest]
    block_tokens: int = 16
    name: str = ""
    source: str = ""
    """Where it comes from, with the licence of what it was made of."""

    def shared_tokens(self) -> Iterator[int]:
        """Of each request, the first tokens of its prompt that an earlier prompt begins with too. No prefix cache finds
        more, whatever its blocks: of a block that both have, which reaches beyond the end of one, as far as that end.

        The sum is the same in any order of the requests, as each has as many tokens that no other before it had.
        """
        tree = dict[tuple[int, int], int]()  # from a node and a block to the node after it; the root is 0
        reach = [0]  # of each node, tokens up to its block's end, or to that of the longest prompt that ends in it
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
