"""A part of a workload in which prompts still share what they shared: whole conversations stay, or go."""

from collections import Counter
from collections.abc import Iterator
from itertools import chain
from random import Random

from twostep.workload.workload import Workload

COMMON = 0.1
"""What a larger share of prompts begins with is a system prompt: it makes no conversation of them."""


def sample(workload: Workload, share: float) -> list[bool]:
    """Which requests stay: of a random `share` of families. The same for the same workload."""
    rng = Random(0)
    chosen: dict[int, bool] = {}
    return [
        chosen[family] if family in chosen else chosen.setdefault(family, rng.random() < share)
        for family in families(workload)
    ]


def families(workload: Workload) -> list[int]:
    """A number for each request, equal for those that belong together: one comes after the other, or they begin with
    the same blocks, which not too many others do. A request with nothing of the kind is a family of its own."""
    paths = list(_paths(workload))
    sizes = Counter(chain.from_iterable(paths))
    most = COMMON * len(paths)
    found: list[int] = []
    for number, (request, path) in enumerate(zip(workload.requests, paths, strict=True)):
        alone = -1 - number
        beginning = next((node for node in path if sizes[node] <= most), alone)
        found.append(beginning if request.after is None else found[request.after])
    return found


def _paths(workload: Workload) -> Iterator[list[int]]:
    """Of each request, the nodes from 1 that its blocks lead to in the tree of all prompts."""
    tree: dict[tuple[int, int], int] = {}
    for request in workload.requests:
        node, path = 0, []
        for block in request.blocks:
            node = tree.setdefault((node, block), len(tree) + 1)
            path.append(node)
        yield path
