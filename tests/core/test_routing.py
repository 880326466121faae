"""Routing: the replica where a request causes the least delay."""

from twostep.core.cost import Cost, StepShape, Terms
from twostep.core.routing import Placement, ReplicaLoad, RouteCost, place, prefill_ns, route_cost

IDLE = ReplicaLoad(queued_ns=0, decoding=0, waiting=0, free_slots=8, slot_every_ns=50)


class OneNsAToken:
    def estimate(self, shape: StepShape) -> Cost:
        return Cost(shape.tokens, shape.tokens, Terms(linear=shape.tokens))

    def observe(self, shape: StepShape, measured_ns: int) -> None:
        raise AssertionError("a router learns nothing")


def test_a_request_waits_for_queued_prompts_and_slows_every_stream() -> None:
    load = IDLE._replace(queued_ns=300, decoding=4)
    assert route_cost(load, 100) == RouteCost(queue_ns=300, prefill_ns=100, harm_ns=400)
    assert route_cost(load, 100).total_ns == 800


def test_without_a_free_slot_it_waits_until_all_before_it_have_one() -> None:
    full = IDLE._replace(free_slots=0, waiting=3)
    assert route_cost(full, 0).queue_ns == 4 * 50
    assert route_cost(full._replace(queued_ns=1000), 0).queue_ns == 1000
    assert route_cost(IDLE._replace(waiting=7), 0).queue_ns == 0


def test_a_cached_prefix_outweighs_some_queue_but_not_every_queue() -> None:
    """100 tokens to compute against 1000."""
    assert place([IDLE._replace(queued_ns=800), IDLE], [100, 1000]).replica == 0
    assert place([IDLE._replace(queued_ns=1000), IDLE], [100, 1000]).replica == 1


def test_streams_count_each() -> None:
    assert place([IDLE._replace(decoding=3), IDLE._replace(decoding=2)], [100, 100]).replica == 1


def test_equals_go_to_the_one_with_fewer_sequences_then_to_the_first() -> None:
    assert place([IDLE, IDLE], [0, 0]) == Placement(0, RouteCost(0, 0, 0))
    assert place([IDLE._replace(waiting=2), IDLE._replace(waiting=1)], [0, 0]).replica == 1


def test_a_wholly_cached_prompt_computes_its_last_token() -> None:
    assert prefill_ns(OneNsAToken(), 64, 64) == 1
    assert prefill_ns(OneNsAToken(), 64, 48) == 16
    assert prefill_ns(OneNsAToken(), 64, 0) == 64
