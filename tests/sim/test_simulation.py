"""Simulations of whole workloads, against queueing theory, exact caches, hand-made runs and the real engine."""

from collections import OrderedDict
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from random import Random
from statistics import fmean

import pytest
from support.recorded_run import ABOUT, replays

from twostep.config.configs import SchedulerSettings
from twostep.core.cost import Cost, StepShape, Terms
from twostep.core.plan import Plan
from twostep.core.request import BLOCK_TOKENS
from twostep.core.routing import Placement, RouteCost
from twostep.errors import InvalidParameterError
from twostep.perf.linear import LinearCostModel
from twostep.recording.reader import Recording
from twostep.recording.writer import Recorder
from twostep.sim import simulation
from twostep.sim.prompt_blocks import PromptBlocks
from twostep.sim.simulation import (
    FrontEndCosts,
    ReplicaSpec,
    SimulatedRequest,
    Simulation,
    recorded_by,
    simulate,
)
from twostep.workload.arrivals import AtOnce, Renewal
from twostep.workload.definition import Workload, WorkloadRequest
from twostep.workload.kinds import Chat, Rag, make_workload
from twostep.workload.reshape import Changes, reshaped
from twostep.workload.schedule import Closed, Mode, Open
from twostep.workload.trace_formats import find_workload

MS = 1_000_000


class StepsOf:
    """A fixed time a step, and a time for each token."""

    def __init__(self, step_ns: int, token_ns: int = 0) -> None:
        self._step_ns, self._token_ns = step_ns, token_ns

    def estimate(self, shape: StepShape) -> Cost:
        ns = self._step_ns + self._token_ns * shape.tokens
        return Cost(ns, ns, Terms(fixed=self._step_ns, linear=self._token_ns * shape.tokens))

    def observe(self, shape: StepShape, measured_ns: int) -> None:
        pass


def spec(
    cost: StepsOf, *, blocks: int = 2000, seqs: int = 16, chunking: str = "tokens=256", **more: int
) -> ReplicaSpec:
    settings = SchedulerSettings((blocks,), max_num_seqs=seqs, max_num_batched_tokens=4096, chunking=chunking, **more)
    return ReplicaSpec(settings, cost)


def silent(_: str) -> None:
    pass


def workload(*requests: tuple[float, int, int]) -> Workload:
    return Workload([WorkloadRequest(*request) for request in requests])


def ttfts_s(simulation: Simulation) -> list[float]:
    return [(one.token_ns[0] - one.due_ns) / 1e9 for one in simulation.requests]


# --- by hand ------------------------------------------------------------------------------------------------------


def test_a_little_run_by_hand() -> None:
    """Front end 3 ms a request, one at a time; a step takes 10 ms + 1 ms a token; replies take 1 ms.

    a (4 tokens, 2 out) is sent at 0, b (2 tokens, 1 out) at 1: they reach the engine at 3 and 6. Steps: 3..17 prefill
    of a; 17..30 a's second token and b's prefill (3 tokens).
    """
    costs = FrontEndCosts(request_ns=3 * MS, reply_ns=MS)
    run = simulate(
        workload((0.0, 4, 2), (0.001, 2, 1)),
        Open(),
        [spec(StepsOf(10 * MS, MS))],
        front_end=costs,
        prefix_caching=False,
    )
    a, b = run.requests
    assert a == SimulatedRequest(0, 0, 0, 0, (18 * MS, 31 * MS), 31 * MS)
    assert b == SimulatedRequest(1, MS, MS, 0, (31 * MS,), 31 * MS)
    assert [tuple(step) for step in run.replicas[0].steps] == [(3 * MS, 17 * MS, 4, 0), (17 * MS, 30 * MS, 2, 1)]
    assert (run.ended_ns, run.whole) == (31 * MS, True)


def test_a_turn_waits_for_the_answer_before_it_and_finds_the_prompt_before_it() -> None:
    first = WorkloadRequest(0.0, 40, 3, blocks=(1, 2, 3))
    second = WorkloadRequest(0.5, 60, 2, blocks=(1, 2, 3, 4), after=0)
    run = simulate(Workload([first, second]), Open(), [spec(StepsOf(MS))])
    done = run.requests[0].ended_ns
    assert done == 3 * MS
    assert run.requests[1].due_ns == done + 500 * MS
    assert run.requests[1].cached_tokens == 32


def test_a_closed_loop_has_no_more_requests_in_flight_than_clients() -> None:
    made = make_workload(Rag(), AtOnce(), 40, 1)
    run = simulate(made, Closed(3), [spec(StepsOf(MS, 1000))])
    ends = sorted((one.ended_ns or 0, -1) for one in run.requests)
    moments = sorted([*ends, *((one.sent_ns, 1) for one in run.requests)])
    flying = highest = 0
    for _, change in moments:
        flying += change
        highest = max(highest, flying)
    assert (highest, run.whole) == (3, True)


# --- conservation -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit_s", [0.05, 0.5, 2.0, None])
@pytest.mark.parametrize("replicas", [1, 3])
def test_what_arrived_has_ended_or_runs_or_waits(limit_s: float | None, replicas: int) -> None:
    """Blocks are scarce, so that some are preempted."""
    made = make_workload(Chat(turns=1, system_tokens=0, answer_tokens=300), Renewal(60), 150, 3)
    tight = spec(StepsOf(5 * MS, 20_000), blocks=300)
    run = simulate(made, Open(), [tight] * replicas, front_end=FrontEndCosts(MS, 1000, MS), limit_s=limit_s)
    ended = sum(one.ended_ns is not None for one in run.requests)
    inside = sum(one.running + one.waiting for one in run.replicas)
    assert len(run.requests) == ended + inside + run.in_front_end
    assert run.whole == (limit_s is None)
    for one in run.requests:
        asked = made.requests[one.number].output_tokens
        assert len(one.token_ns) == asked if one.ended_ns is not None else len(one.token_ns) <= asked
        assert list(one.token_ns) == sorted(set(one.token_ns))
    if limit_s is None:
        assert sum(one.counters.preemptions for one in run.replicas) > 0 or replicas > 1


def test_steps_of_a_replica_do_not_overlap_and_compute_every_token_once() -> None:
    made = make_workload(Rag(), Renewal(20), 60, 5)
    run = simulate(made, Open(), [spec(StepsOf(MS, 5000), blocks=4000)])
    steps, [replica] = run.replicas[0].steps, run.replicas
    assert all(before.end_ns <= after.start_ns for before, after in pairwise(steps))
    prompts = sum(one.input_tokens for one in made.requests)
    outputs = sum(one.output_tokens for one in made.requests)
    hits = sum(one.cached_tokens for one in run.requests)
    assert replica.counters.preemptions == 0
    assert hits > 0
    assert sum(step.prefill_tokens for step in steps) == prompts - hits
    assert sum(step.decode_tokens for step in steps) == outputs - len(made.requests)


# --- queueing theory ----------------------------------------------------------------------------------------------


def one_server(made: Workload, cost: StepsOf) -> float:
    """Mean seconds of waiting before service, with one slot and whole prompts; all answers have one token."""
    run = simulate(made, Open(), [spec(cost, seqs=1, chunking="none")], prefix_caching=False)
    service_s = [cost.estimate(StepShape(one.input_tokens)).expected_ns / 1e9 for one in made.requests]
    return fmean(ttft - own for ttft, own in zip(ttfts_s(run), service_s, strict=True))


def poisson(rate: float, inputs: list[int], seed: int) -> Workload:
    times = Renewal(rate).times(Random(seed))
    return Workload([WorkloadRequest(next(times), tokens, 1) for tokens in inputs])


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_fixed_steps_wait_as_in_an_md1_queue(load: float) -> None:
    """Pollaczek and Khinchine: the mean wait is S·u / (2·(1 - u)) at load u. Half as long as in an M/M/1 queue."""
    wait_s = one_server(poisson(load / 0.01, [1] * 12_000, 7), StepsOf(10 * MS))
    assert wait_s == pytest.approx(0.01 * load / (2 * (1 - load)), rel=0.08)


@pytest.mark.parametrize("load", [0.3, 0.6])
def test_exponential_prompts_wait_as_in_an_mm1_queue(load: float) -> None:
    """S·u / (1 - u), with times proportional to prompts that are exponential, up to rounding to tokens."""
    rng, mean = Random(11), 200
    inputs = [max(1, min(4000, round(rng.expovariate(1 / mean)))) for _ in range(12_000)]
    service_s = fmean(inputs) * 50_000 / 1e9
    wait_s = one_server(poisson(load / service_s, inputs, 5), StepsOf(0, 50_000))
    assert wait_s == pytest.approx(service_s * load / (1 - load), rel=0.1)


def test_latency_rises_with_the_rate() -> None:
    made = make_workload(Rag(), Renewal(1.0), 150, 2)
    ttft, itl = list[float](), list[float]()
    for rate in (2, 4, 8, 16, 32):
        run = simulate(reshaped(made, Changes(rate=rate), silent), Open(), [spec(StepsOf(4 * MS, 20_000), blocks=9000)])
        ttft.append(fmean(ttfts_s(run)))
        itl.append(fmean((one.token_ns[-1] - one.token_ns[0]) / max(1, len(one.token_ns) - 1) for one in run.requests))
    assert ttft == sorted(ttft)
    assert itl == sorted(itl)


# --- prefix cache -------------------------------------------------------------------------------------------------


def exact_lru_hits(made: Workload, blocks: int) -> list[int]:
    """Cached tokens of each request when they run one after the other, by a cache of `blocks` blocks that drops the
    block that was released longest ago. Knows nothing of our pool."""
    free = OrderedDict[object, None]((("blank", i), None) for i in range(blocks))
    naming, hits = PromptBlocks(made.block_tokens), list[int]()
    for number, request in enumerate(made.requests):
        names = naming.names(number, request)
        most = (request.input_tokens - 1) // BLOCK_TOKENS
        found = next((i for i, name in enumerate(names[:most]) if name not in free), min(most, len(names)))
        hits.append(found * BLOCK_TOKENS)
        for name in names[:found]:
            del free[name]
        positions = request.input_tokens + request.output_tokens - 1
        held: list[object] = list(names[:found])
        for i in range(found, -(-positions // BLOCK_TOKENS)):
            free.pop(next((one for one in free if isinstance(one, tuple)), None) or next(iter(free)))
            full = (i + 1) * BLOCK_TOKENS <= positions
            held.append(names[i] if i < len(names) else f"output {number} {i}" if full else ("blank", number, i))
        for name in reversed(held):
            duplicate = name in free  # the same content is here twice: the second stays unnamed
            free[("blank", number, name) if duplicate else name] = None
            free.move_to_end(("blank", number, name) if duplicate else name)
    return hits


@pytest.mark.parametrize("blocks", [400, 1500, 100_000])
def test_prefix_hits_are_those_of_an_exact_lru_cache(blocks: int) -> None:
    """One request at a time, on an excerpt of Mooncake's conversations."""
    made = find_workload("mooncake-conversation", silent)
    longest = blocks * BLOCK_TOKENS
    made = replace(made, requests=[one for one in made.requests if one.input_tokens + one.output_tokens <= longest])
    one_by_one = spec(StepsOf(MS), blocks=blocks, seqs=1, max_model_len=100_000)
    run = simulate(made, Closed(1), [one_by_one])
    hits = [one.cached_tokens for one in run.requests]
    assert hits == exact_lru_hits(made, blocks)
    assert sum(hits) > 0
    if blocks == 100_000:
        assert sum(hits) > 0.95 * sum(made.shared_tokens())


def test_names_are_equal_where_all_declared_blocks_are() -> None:
    """Blocks of 24 tokens: the second block of 16 has part of two declared ones."""
    naming = PromptBlocks(24)
    a, b, c = (
        naming.names(i, WorkloadRequest(0, 80, 1, blocks)) for i, blocks in enumerate([(1, 2, 3), (1, 2, 4), (1, 5)])
    )
    assert len(a) == 5
    assert (a[:3], a[0]) == (b[:3], c[0])
    assert a[1] != c[1]
    assert {a[3], a[4]}.isdisjoint({b[3], b[4]})


def test_a_router_keeps_documents_together_while_load_allows() -> None:
    """Two documents, asked about in turn: each stays on one replica, although both replicas are idle each time."""
    asked = [WorkloadRequest(float(i), 330, 4, tuple(range(100 * (i % 2), 100 * (i % 2) + 20))) for i in range(12)]
    run = simulate(Workload(asked), Open(), [spec(StepsOf(MS, 100_000))] * 2)
    by_document = [{one.replica for one in run.requests[i::2]} for i in (0, 1)]
    assert [len(replicas) for replicas in by_document] == [1, 1]
    assert all(one.cached_tokens == 320 for one in run.requests[2:])


def test_a_router_finds_more_prefixes_and_waits_less_than_round_robin(monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_workload(Rag(documents=100), Renewal(30), 400, 6)
    replicas = [spec(StepsOf(5 * MS, 100_000), blocks=3000)] * 4
    routed = simulate(made, Open(), replicas)
    turns = count()
    nothing = RouteCost(0, 0, 0)
    monkeypatch.setattr(simulation, "place", lambda loads, prefills: Placement(next(turns) % len(loads), nothing))
    in_turn = simulate(made, Open(), replicas)
    assert {one.replica for one in routed.requests} == {one.replica for one in in_turn.requests} == {0, 1, 2, 3}
    hits = [sum(one.cached_tokens for one in run.requests) for run in (routed, in_turn)]
    assert hits[0] > 1.3 * hits[1]
    assert fmean(ttfts_s(routed)) < 0.8 * fmean(ttfts_s(in_turn))


# --- the same input, the same run ---------------------------------------------------------------------------------


def noisy(seed: int) -> Simulation:
    one = replace(spec(StepsOf(4 * MS, 20_000)), residuals=(-0.1, 0.0, 0.05, 0.3))
    return simulate(make_workload(Chat(), Renewal(10), 120, 4), Open(), [one] * 2, seed=seed)


def test_the_same_seed_gives_the_same_run() -> None:
    first, again, other = noisy(1), noisy(1), noisy(2)
    assert (first.requests, [r.steps for r in first.replicas]) == (again.requests, [r.steps for r in again.replicas])
    assert first.requests != other.requests


def test_noise_changes_step_times_by_its_residuals() -> None:
    one = replace(spec(StepsOf(10 * MS)), residuals=(0.5,))
    run = simulate(workload((0.0, 4, 3)), Open(), [one])
    assert run.requests[0].token_ns == (15 * MS, 30 * MS, 45 * MS)


def recorded_simulation(made: Workload, mode: Mode, one: ReplicaSpec, path: Path) -> list[Plan]:
    """All plans, as they were recorded; they replay byte for byte."""
    with Recorder(path, one.settings, ABOUT) as recorder:
        simulate(made, mode, [one], recorded=recorded_by(recorder))
    replays(path)
    return [turn.step.plan for turn in Recording(path).turns() if turn.step]


@pytest.mark.parametrize("chunking", ["tokens=64", "time=30", "none"])
def test_a_whole_workload_replays_byte_for_byte(tmp_path: Path, chunking: str) -> None:
    """A scheduler that learns, with scarce blocks: as the real one would, given these times."""
    made = make_workload(Chat(), Renewal(20), 150, 9)
    one = replace(
        spec(StepsOf(3 * MS, 100_000), blocks=400, chunking=chunking, max_model_len=4096), planner_cost=LinearCostModel
    )
    assert len(recorded_simulation(made, Open(), one, tmp_path / "run")) > 500


def test_the_scheduler_does_not_know_how_long_answers_are(tmp_path: Path) -> None:
    """Until the shorter answer ends, both runs have the same plans."""
    one = spec(StepsOf(MS), blocks=200)
    short, long = (
        recorded_simulation(workload((0.0, 40, 30), (0.0, 50, 20 + more)), Open(), one, tmp_path / f"run{more}")
        for more in (0, 400)
    )
    assert short[:20] == long[:20]
    assert short[20:30] != long[20:30]


# --- bad input ----------------------------------------------------------------------------------------------------


def test_a_request_that_never_fits_is_named_with_what_would() -> None:
    with pytest.raises(InvalidParameterError, match=r"2 of 3 .* request 1 with 900 \+ 200 .* longest has 1500.* 1000"):
        simulate(
            workload((0.0, 1, 1), (0.0, 900, 200), (0.0, 1400, 100)), Open(), [spec(StepsOf(MS), max_model_len=1000)]
        )


def test_blocks_limit_as_the_context_does() -> None:
    """Ten blocks hold 160 positions; the last token needs none."""
    simulate(workload((0.0, 100, 61)), Open(), [spec(StepsOf(MS), blocks=10)])
    with pytest.raises(InvalidParameterError, match="at most 161"):
        simulate(workload((0.0, 100, 62)), Open(), [spec(StepsOf(MS), blocks=10)])


def test_a_workload_without_requests_is_refused() -> None:
    with pytest.raises(InvalidParameterError, match="no requests"):
        simulate(workload(), Open(), [spec(StepsOf(MS))])
