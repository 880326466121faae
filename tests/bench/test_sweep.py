"""The search for the highest load within limits, against servers that are formulas: exact, noisy, overloaded."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twostep.bench.load.goodput_limits import parse_limits
from twostep.bench.load.sweep import (
    Ending,
    Judgement,
    Point,
    Search,
    Verdict,
    check_limits,
    judge,
    least_s,
    next_level,
    stopped,
    sweep,
    verdict_words,
)
from twostep.bench.report.result import kept_up, offered_rate
from twostep.errors import InvalidParameterError, WorkloadError
from twostep.metrics.load import Limits, LoadSummary, RequestTimes, summarise_load
from twostep.workload.definition import Workload, WorkloadRequest, mean_rate
from twostep.workload.reshape import lasting

RATES = Search(0.5, 1, 64)


@dataclass(frozen=True)
class Found:
    summary: LoadSummary
    kept_pace: bool = True
    kept_up: bool = True


@cache
def share_met(met: int, of: int = 1000, failed: int = 0) -> Found:
    """So many of the requests met the limits; of the others so many failed, the rest was slow."""
    fast, slow = RequestTimes(0, [1], 1), RequestTimes(0, [10**9], 10**9)
    broken = RequestTimes(0, [1], 1, failure="dropped")
    requests = [fast] * met + [broken] * failed + [slow] * (of - met - failed)
    return Found(summarise_load(requests, Limits(ttft_s=0.5)))


def search(how: Search, measure: Callable[[float], Found | None]) -> Verdict:
    async def asked(level: float) -> Found | None:
        return measure(level)

    return asyncio.run(sweep(how, asked))


def exact(capacity: float) -> Callable[[float], Found]:
    """All requests meet the limits up to this level, and half of them beyond."""
    return lambda level: share_met(1000 if level <= capacity else 500)


# --- exact servers ------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.floats(0.5, 63.9))
def test_the_capacity_is_found_as_finely_as_asked(capacity: float) -> None:
    verdict = search(RATES, exact(capacity))
    assert verdict.ending is Ending.FOUND
    assert verdict.met is not None
    assert verdict.missed is not None
    assert verdict.met <= capacity < verdict.missed
    assert verdict.missed - verdict.met <= RATES.resolution * verdict.missed
    assert len(verdict.points) <= 22


@settings(deadline=None)
@given(st.integers(1, 127))
def test_numbers_of_clients_are_whole(capacity: int) -> None:
    verdict = search(Search(1, 4, 128, whole=True, resolution=0.01), exact(capacity))
    assert (verdict.ending, verdict.met) == (Ending.FOUND, capacity)
    assert all(point.level % 1 == 0 for point in verdict.points)


def test_both_ends_of_the_answer_are_measured_twice() -> None:
    verdict = search(RATES, exact(10))
    levels = [point.level for point in verdict.points]
    assert levels[:6] == [1, 2, 4, 8, 16, 16]
    assert levels.count(verdict.met) == levels.count(verdict.missed) == 2


def test_too_slow_for_the_lowest() -> None:
    verdict = search(RATES, exact(0.4))
    assert (verdict.ending, verdict.met, verdict.missed) == (Ending.BELOW, None, 0.5)
    assert verdict_words(verdict, "requests/s").startswith("not found: even 0.5 requests/s, the lowest allowed, misses")


def test_fast_enough_for_the_highest() -> None:
    verdict = search(RATES, exact(1000))
    assert (verdict.ending, verdict.met, verdict.missed) == (Ending.ABOVE, 64, None)
    assert "even 64 requests/s, the highest allowed, meets" in verdict_words(verdict, "requests/s")


def test_an_overloaded_line_is_found() -> None:
    """One server, 0.1 s a request, arrivals by chance: the wait of M/D/1 crosses its limit before the rate is 10."""

    def measure(rate: float) -> Found:
        random, due, free = Random(3), 0.0, 0.0
        requests = []
        for _ in range(2000):
            due += random.expovariate(rate)
            free = max(due, free) + 0.1
            requests.append(RequestTimes(int(due * 1e9), [int(free * 1e9)], int(free * 1e9)))
        return Found(summarise_load(requests, Limits(ttft_s=0.5)))

    verdict = search(RATES, measure)
    assert verdict.ending is Ending.FOUND
    assert verdict.met is not None
    assert 5 < verdict.met < 9
    assert measure(verdict.met).summary.met >= 0.99 * 2000 > measure(1.06 * verdict.met).summary.met


# --- servers that fall behind -------------------------------------------------------------------------------------

S = 10**9


def line_of_one(rate: float, seconds: float = 20, capacity: float = 20, limit_s: float = 1e9) -> list[RequestTimes]:
    """One request at a time, evenly asked for; whoever asks gives up after `limit_s`."""
    found, free = list[RequestTimes](), 0.0
    for number in range(round(rate * seconds)):
        due = number / rate
        free = max(due, free) + 1 / capacity
        cut = free > limit_s
        tokens, ended = ([], limit_s) if cut else ([int(free * S)], free)
        found.append(RequestTimes(int(due * S), tokens, int(ended * S), cut=cut))
    return found


@pytest.mark.parametrize("limits", [Limits(ttft_s=10), Limits(e2e_s=10)])
def test_a_queue_that_grows_is_seen_long_before_it_breaks_a_limit(limits: Limits) -> None:
    overloaded = line_of_one(24)
    assert summarise_load(overloaded, limits).met == len(overloaded)
    assert not kept_up(overloaded, limits)
    assert kept_up(line_of_one(19), limits)
    assert kept_up(line_of_one(20), limits)


def test_what_was_cut_was_still_waiting() -> None:
    assert not kept_up(line_of_one(48, limit_s=20), Limits(ttft_s=1))


def test_waiting_ends_with_the_first_token_or_the_last() -> None:
    """Answers of which only the first token comes in time: a limit on E2E sees that they pile up."""
    slow = [RequestTimes(i * S, [i * S + 1], 100 * S) for i in range(50)]
    assert kept_up(slow, Limits(ttft_s=1))
    assert not kept_up(slow, Limits(e2e_s=99))


def test_a_few_requests_say_nothing_of_a_queue() -> None:
    assert kept_up([RequestTimes(i, [], S) for i in range(4)], Limits(ttft_s=1))


def test_a_server_that_falls_behind_does_not_meet_a_level() -> None:
    behind = Found(share_met(1000).summary, kept_up=False)
    assert judge(RATES, 8, behind) == Point(8, 1, Judgement.BEHIND)
    verdict = search(RATES, lambda level: exact(99)(level) if level < 10 else behind)
    assert verdict.ending is Ending.FOUND
    assert verdict.met is not None
    assert 9 < verdict.met < 10
    assert verdict_words(verdict, "requests/s").endswith("at 10 the server falls behind")


def test_a_line_of_one_is_found_at_its_capacity_though_its_queue_is_within_the_limit_for_long() -> None:
    limits = Limits(ttft_s=4)

    def measure(rate: float) -> Found:
        asked = line_of_one(rate, least_s(limits, None))
        return Found(summarise_load(asked, limits), kept_up=kept_up(asked, limits))

    verdict = search(Search(0.5, 1, 1024), measure)
    assert verdict.met is not None
    assert 19 <= verdict.met <= 22.5


def test_a_level_at_which_nothing_ended_is_missed() -> None:
    cut = Found(summarise_load([RequestTimes(0, [], S, cut=True)]))
    assert judge(RATES, 1, cut) == Point(1, 0, Judgement.MISSED)


def test_arrivals_last_longer_than_the_limit() -> None:
    assert least_s(Limits(ttft_s=0.5), None) == 20
    assert least_s(Limits(ttft_s=6), None) == 30
    assert least_s(Limits(ttft_s=0.5, e2e_s=6), None) == 30
    assert least_s(Limits(ttft_s=0.5), 3) == 3
    with pytest.raises(InvalidParameterError, match="3 s of arrivals are too short; allowed: at least 5 s: 5 times"):
        least_s(Limits(ttft_s=1), 3)


def test_the_rate_that_was_really_due() -> None:
    assert offered_rate([RequestTimes(i * S // 2, [], S) for i in (2, 0, 1, 4)]) == 1.5
    assert offered_rate([RequestTimes(5, [], S)] * 2) is None


def test_a_workload_is_repeated_as_something_new() -> None:
    asked = [WorkloadRequest(0, 20, 1, (0, 1)), WorkloadRequest(2, 20, 1, (0, 2)), WorkloadRequest(4, 9, 1)]
    once = Workload(asked)
    assert lasting(once, 3) is once
    assert lasting(Workload([]), 3).requests == []
    again = lasting(once, 7)
    assert [one.arrival_s for one in again.requests] == [0, 2, 4, 6, 8, 10, 12, 14, 16]
    assert [one.blocks for one in again.requests[:5]] == [(0, 1), (0, 2), (), (3, 4), (3, 5)]
    assert mean_rate(again) == mean_rate(once)
    with pytest.raises(WorkloadError, match="3 requests and 4 are needed; they arrive all at once"):
        lasting(Workload([WorkloadRequest(0, 1, 1)] * 3), 4)
    with pytest.raises(WorkloadError, match="2 requests and 4 are needed; its prompts have text"):
        lasting(Workload([WorkloadRequest(i, 1, 1, text="a") for i in range(2)]), 4)


# --- noise --------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 40))
def test_noise_moves_the_answer_but_never_beyond_what_was_measured(random: Random, most: int) -> None:
    """Near the capacity half of the measurements are wrong, and elsewhere one in ten."""

    def measure(level: float) -> Found:
        wrong = random.random() < (0.5 if 8 < level < 12 else 0.1)
        return share_met(1000 if (level <= 10) != wrong else 500)

    verdict = search(Search(0.5, 1, 64, most_runs=most), measure)
    votes = {level: [] for level in {point.level for point in verdict.points}}  # type: dict[float, list[bool]]
    for point in verdict.points:
        votes[point.level].append(point.judgement is Judgement.MET)
    assert len(verdict.points) <= most
    assert all(len(cast) <= 3 for cast in votes.values())
    if verdict.ending is Ending.FOUND:
        assert verdict.met is not None
        assert verdict.missed is not None
        assert votes[verdict.met].count(True) == votes[verdict.missed].count(False) == 2
        assert verdict.met < verdict.missed


def test_one_bad_measurement_does_not_decide() -> None:
    told = {2: [500, 1000, 1000], 16: [500, 500]}
    verdict = search(
        RATES, lambda level: share_met(told[level].pop(0) if told.get(level) else int(1000 * (level < 10)))
    )
    assert [point.level for point in verdict.points][:8] == [1, 2, 2, 2, 4, 8, 16, 16]
    assert verdict.ending is Ending.FOUND
    assert verdict.met is not None
    assert 9 < verdict.met < 10


def test_a_lucky_measurement_is_found_out_at_the_end() -> None:
    lucky = [1000, 0, 0]
    verdict = search(RATES, lambda level: share_met(lucky.pop(0) if level == 8 else int(1000 * (level < 5))))
    assert verdict.met is not None
    assert verdict.missed is not None
    assert verdict.met < 5 <= verdict.missed


def test_it_ends_after_so_many_runs() -> None:
    verdict = search(Search(0.5, 1, 64, most_runs=5), exact(10))
    assert (verdict.ending, verdict.met, verdict.missed) == (Ending.RUNS, 8, 16)
    assert verdict_words(verdict, "requests/s") == "not found in 5 runs; 8 requests/s met the limits"


# --- the client, and whoever stops it -----------------------------------------------------------------------------


def test_a_late_client_is_the_limit_and_says_so() -> None:
    verdict = search(RATES, lambda level: Found(share_met(1000).summary, kept_pace=level <= 10))
    assert (verdict.ending, verdict.met, verdict.missed) == (Ending.CLIENT, 8, 16)
    assert [point.level for point in verdict.points] == [1, 2, 4, 8, 16, 16, 8]
    assert "limited by the client, not the server: it could not send 16" in verdict_words(verdict, "requests/s")


def test_a_client_that_was_late_once_is_asked_again() -> None:
    late = [True, True, False]
    verdict = search(RATES, lambda level: Found(exact(10)(level).summary, kept_pace=level != 2 or late.pop()))
    assert verdict.ending is Ending.FOUND


def test_what_was_found_until_an_error() -> None:
    verdict = stopped(RATES, [(1, share_met(1000)), (2, share_met(1000)), (4, share_met(10))])
    assert (verdict.ending, verdict.met, verdict.missed, len(verdict.points)) == (Ending.STOPPED, 2, 4, 3)


def test_it_can_be_stopped() -> None:
    verdict = search(RATES, lambda level: share_met(1000) if level < 4 else None)
    assert (verdict.ending, verdict.met, len(verdict.points)) == (Ending.STOPPED, 2, 2)
    assert verdict_words(verdict, "clients") == "stopped before the result was found; 2 clients met the limits"
    assert verdict_words(search(RATES, lambda _: None), "clients").endswith("no level met the limits")


# --- what is asked ------------------------------------------------------------------------------------------------


def test_failures_do_not_meet_the_limits() -> None:
    assert judge(RATES, 1, share_met(990)).judgement is Judgement.MET
    assert judge(RATES, 1, share_met(989, failed=11)) == Point(1, 0.989, Judgement.MISSED)
    assert judge(Search(1, 1, 2, share=0.9), 1, share_met(900, failed=100)).judgement is Judgement.MET


def test_nothing_measured_begins_at_the_start() -> None:
    assert next_level(Search(1, 3, 8), []) == 3


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"lowest": 0}, "levels 0, 1, 64"),
        ({"start": 0.1}, "levels 0.5, 0.1, 64"),
        ({"highest": 0.7}, "levels 0.5, 1, 0.7"),
        ({"highest": float("inf")}, "levels 0.5, 1, inf"),
        ({"whole": True}, "levels 0.5, 1, 64, allowed: whole numbers"),
        ({"resolution": 0}, "resolution 0, allowed: between 0 and 1"),
        ({"share": 1.1}, "share 1.1, allowed: above 0, at most 1"),
        ({"most_runs": 0}, "at most 0 runs, allowed: 1 or more"),
    ],
)
def test_a_search_without_sense_is_refused(arguments: dict[str, float], complaint: str) -> None:
    with pytest.raises(InvalidParameterError, match=f"sweep: {complaint}"):
        Search(**({"lowest": 0.5, "start": 1, "highest": 64} | arguments))  # type: ignore[arg-type]


def test_a_sweep_needs_limits_that_an_overload_breaks() -> None:
    with pytest.raises(InvalidParameterError, match="needs --goodput with a limit for one of ttft, itl, tpot, e2e"):
        check_limits(Limits(), by_rate=False)
    with pytest.raises(InvalidParameterError, match="a growing queue violates no other"):
        check_limits(parse_limits(["itl:100", "tpot:50"]), by_rate=True)
    check_limits(parse_limits(["itl:100", "ttft:50"]), by_rate=True)
    check_limits(parse_limits(["itl:100"]), by_rate=False)
