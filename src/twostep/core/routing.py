"""Which replica gets a request: one cost in nanoseconds of delay. Pure, so that server and simulator share it.

The cost of a placement is the delay that it causes, summed over everybody: the request itself waits for what is queued
before it and for its own prefill, and each sequence that decodes there is slowed by that prefill. A prefix that a
replica has in its cache shortens both, so that affinity needs no weight of its own.
"""

from collections.abc import Sequence
from typing import NamedTuple

from twostep.core.cost import CostModel, StepShape


class ReplicaLoad(NamedTuple):
    """What a router knows of one replica. Times are predictions in nanoseconds."""

    queued_ns: int
    """To prefill the prompts that were placed there and have no first token yet."""
    decoding: int
    """Sequences that a prefill slows."""
    waiting: int
    """Sequences without a slot."""
    free_slots: int
    """0 also if there are slots, but no blocks for those that wait."""
    slot_every_ns: int
    """Between the ends of two sequences there, which is how often a slot becomes free; 0 if not known yet."""


class RouteCost(NamedTuple):
    """The delay that one placement causes, in nanoseconds, by who is delayed and why."""

    queue_ns: int
    """The request: waits for prompts before it, or for a slot."""
    prefill_ns: int
    """The request: its own prefill, less what the prefix cache has."""
    harm_ns: int
    """All sequences that decode there, together."""

    @property
    def total_ns(self) -> int:
        return self.queue_ns + self.prefill_ns + self.harm_ns


class Placement(NamedTuple):
    """The chosen replica, by its index, and what the placement costs."""

    replica: int
    cost: RouteCost


def prefill_ns(cost: CostModel, prompt_tokens: int, cached_tokens: int) -> int:
    """Expected time to compute a prompt of which `cached_tokens` are cached; at least one token is computed."""
    start = min(cached_tokens, prompt_tokens - 1)
    return cost.estimate(StepShape().with_slice(start, prompt_tokens - start, 1)).expected_ns


def route_cost(load: ReplicaLoad, prefill: int) -> RouteCost:
    """The cost of placing a request there whose prefill takes `prefill` ns."""
    slot_ns = 0 if load.free_slots > load.waiting else (load.waiting + 1) * load.slot_every_ns
    return RouteCost(max(load.queued_ns, slot_ns), prefill, prefill * load.decoding)


def place(loads: Sequence[ReplicaLoad], prefills: Sequence[int]) -> Placement:
    """The replica where the request causes the least delay, among equals the one with the fewest sequences, then the
    first. `prefills`: what its prefill takes on each replica, in ns. Raises `ValueError` without replicas."""
    costs = [route_cost(load, prefill) for load, prefill in zip(loads, prefills, strict=True)]
    best = min(range(len(costs)), key=lambda i: (costs[i].total_ns, loads[i].decoding + loads[i].waiting))
    return Placement(best, costs[best])
