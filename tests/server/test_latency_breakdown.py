"""The latency breakdown of a request is exact: its lines cover the whole time and agree with the steps."""

import json
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate, count, pairwise
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.breakdowns import assert_exact, output, random_timeline, reply
from support.engines import Asked, engine, failing, mixed_requests, prompt, run, submit
from support.http_server import NAME, Host, Served

from twostep.cli.main import main
from twostep.core.cost import LeastTimes
from twostep.core.reasons import Reason, Why
from twostep.engine.collector import Collector
from twostep.engine.outputs import ChunkTime, DecodeTime, PreemptionTime, RequestOutput, Timeline, WaitTime
from twostep.engine.params import SamplingParams
from twostep.engine.timing.timekeeper import StepEnd
from twostep.kernels.native import NativeExecutor
from twostep.kernels.step import StepCancelledError
from twostep.server.observe.breakdown_text import breakdown_lines, collapsed
from twostep.server.observe.finished_requests import LEFT
from twostep.server.observe.latency_breakdown import latency_breakdown

MS = 1_000_000

WHOLE = Timeline(
    arrival_ns=10 * MS,
    first_scheduled_ns=60 * MS,
    chunks=(
        ChunkTime(60 * MS, 100 * MS, 256, step=7, kernel_ns=38 * MS, others=4, alone_ns=30 * MS,
                  reason=Reason(Why.ITL_BUDGET, (40 * MS, 39 * MS))),
        ChunkTime(130 * MS, 160 * MS, 100, step=9, position=256, kernel_ns=29 * MS, alone_ns=29 * MS,
                  without_ns=25 * MS),
        ChunkTime(500 * MS, 520 * MS, 370, step=40, kernel_ns=19 * MS, alone_ns=19 * MS),
    ),
    token_ns=(160 * MS, 190 * MS, 220 * MS, 520 * MS),
    preemptions=(PreemptionTime(221 * MS, 358, Reason(Why.OUT_OF_BLOCKS, (3,)),
                            (WaitTime(Reason(Why.AFTER_PREEMPTION), 20 * MS, 1),)),),
    finish_ns=520 * MS,
    waits=(WaitTime(Reason(Why.NO_SLOT, (4,)), 30 * MS, 3), WaitTime(Reason(Why.NO_BLOCKS, (0, 9, 3, 1)), 15 * MS, 1)),
    decodes=(DecodeTime(160 * MS, 220 * MS, 2, 1, 55 * MS, tokens=12, alone_ns=20 * MS, prefill_ns=25 * MS),),
)  # fmt: skip


# --- by hand ------------------------------------------------------------------------------------------------------


def test_every_line_of_a_request_by_hand() -> None:
    made = reply(output(WHOLE), received_ns=1 * MS, submitted_ns=4 * MS, sent_ns=525 * MS)
    [breakdown] = assert_exact(made)
    lines = [
        (line.what, line.ns // MS, {part: ns // MS for part, ns in line.parts.items()}) for line in breakdown.lines
    ]
    assert lines == [
        ("received and tokenized", 3, {"front": 3}),
        ("passed to the engine, between two steps", 6, {"queue": 6}),
        ("queued", 50, {"queue": 35, "blocks": 15}),
        ("prefill", 40, {"prefill": 38, "host": 2}),
        ("steps of other requests", 30, {"host": 5, "others": 25}),
        ("prefill", 30, {"prefill": 29, "host": 1}),
        ("decode", 60, {"decode": 55, "host": 5}),
        ("between steps", 1, {"host": 1}),
        ("preempted", 279, {"preempted": 279}),
        ("prefill again", 20, {"preempted": 19, "host": 1}),
        ("detokenized and sent", 5, {"send": 5}),
    ]
    told = latency_breakdown(made)
    [choice] = told["choices"]
    assert (choice["ttft"]["ns"], choice["e2e"]["ns"], choice["total"]["ns"]) == (159 * MS, 519 * MS, 524 * MS)
    assert choice["ttft"]["parts_ns"]["prefill"] == 67 * MS
    assert (told["verdict"]["limit"], told["verdict"]["ns"]) == ("preemption", 298 * MS)


def test_its_text() -> None:
    made = reply(output(WHOLE), received_ns=1 * MS, submitted_ns=4 * MS, sent_ns=525 * MS)
    text = "\n".join(breakdown_lines(json.loads(json.dumps(latency_breakdown(made)))))
    for expected in (
        "cmpl-1: 4 prompt tokens + 4 tokens",
        "limited by preemption: it lost its KV blocks, waited and was recomputed; 298.0 of 524.0 ms (57%)",
        "all 4 slots are taken: 30.000, 3 steps",
        "block group 0: needs 9, 3 are free, 1 of them reserved for running requests: 15.000, 1 step\n",
        "       9.000       50.000  queued",
        "prefill, 256 tokens in step 7: ITL budget 40.0 ms, predicted 39.0 ms",
        "shared with 4 tokens of other requests; estimated: own 30.000, others' 8.000",
        "decode, 2 tokens, one per step",
        "shared with 10 tokens of other requests; estimated: "
        "own 20.000, others' decodes 10.000, others' prompts 25.000",
        "preempted, 358 computed tokens lost: sequence 3 needed its blocks",
        "358 of these tokens were recomputed",
        "TTFT              159.000  = front 3.000 + queue 41.000 + blocks 15.000 + prefill 67.000 + host 8.000",
    ):
        assert expected in text


@pytest.mark.parametrize(
    ("limit", "changes"),
    [
        ("queue", {"held": (), "first_scheduled_ns": 30_000 * MS}),
        ("blocks", {"held": (WaitTime(Reason(Why.NO_BLOCKS, (0, 9, 3, 1)), 29_000 * MS, 1),),
                    "first_scheduled_ns": 30_000 * MS}),
        ("arithmetic", {"chunk_ns": 30_000 * MS}),
        ("attention", {"chunk_ns": 30_000 * MS, "chunk_attention_ns": 20_000 * MS}),
        ("attention", {"decode_ns": 30_000 * MS, "attention_ns": 20_000 * MS}),
        ("cores", {"decode_ns": 30_000 * MS, "attention_ns": 20_000 * MS, "starved_ns": 16_000 * MS}),
        ("company", {"chunk_ns": 30_000 * MS, "alone_ns": 3 * MS, "chunk_attention_ns": 3 * MS}),
        ("bandwidth", {"decode_ns": 30_000 * MS}),
        ("company", {"decode_ns": 30_000 * MS, "prefill_ns": 29_000 * MS}),
        ("cores", {"decode_ns": 30_000 * MS, "prefill_ns": 12_000 * MS, "starved_ns": 20_000 * MS}),
        ("host", {"decode_ns": 30_000 * MS, "kernel_ns": 5 * MS}),
        ("send", {"sent_ns": 30_000 * MS}),
        ("front", {"received_ns": -30_000 * MS}),
        ("form", {"received_ns": -30_000 * MS, "form_ns": -29_999 * MS}),
    ],
)  # fmt: skip
def test_the_verdict_names_what_took_longest(limit: str, changes: dict[str, int]) -> None:
    first_ns = int(changes.get("first_scheduled_ns", 10 * MS))
    chunk_ns, decode_ns = changes.get("chunk_ns", 10 * MS), changes.get("decode_ns", 10 * MS)
    middle_ns, end_ns = first_ns + chunk_ns, first_ns + chunk_ns + decode_ns
    chunk = ChunkTime(
        first_ns,
        middle_ns,
        9,
        1,
        kernel_ns=chunk_ns,
        alone_ns=changes.get("alone_ns", chunk_ns),
        attention_ns=changes.get("chunk_attention_ns", 0),
    )
    kernel_ns = changes.get("kernel_ns", decode_ns)
    prefill_ns, starved_ns = changes.get("prefill_ns", 0), changes.get("starved_ns", 0)
    decode = DecodeTime(
        middle_ns, end_ns, 1, 0, kernel_ns, 1, 0, prefill_ns, starved_ns, attention_ns=changes.get("attention_ns", 0)
    )
    held: Any = changes.get("held", ())
    line = Timeline(0, first_ns, (chunk,), (middle_ns, end_ns), (), end_ns, held, (decode,))
    times = {name: changes[name] for name in ("received_ns", "form_ns", "sent_ns") if name in changes}
    verdict = latency_breakdown(reply(output(line), submitted_ns=0, **times))["verdict"]
    assert verdict["limit"] == limit
    assert 0.5 < verdict["share"] <= 1
    whole_ns = times.get("sent_ns", end_ns + 500) - times.get("received_ns", -3000)
    assert sum(verdict["limits_ns"].values()) == whole_ns
    shares = list(verdict["shares"].values())
    assert sum(shares) == pytest.approx(1, abs=0.001)
    assert shares == sorted(shares, reverse=True)
    assert next(iter(verdict["shares"])) == limit
    assert verdict["shares"].keys() == {name for name, ns in verdict["limits_ns"].items() if ns}


def test_the_share_of_every_limit_is_shown_in_one_line() -> None:
    """Of 100 ms: 30 of attention and 20 of other own arithmetic beside 10 of company, then 40 of decoding."""
    chunk = ChunkTime(0, 60 * MS, 9, 1, kernel_ns=60 * MS, alone_ns=50 * MS, attention_ns=30 * MS, others=4)
    decode = DecodeTime(60 * MS, 100 * MS, 4, 0, 40 * MS, 4, 40 * MS, prefill_ns=0)
    line = Timeline(0, 0, (chunk,), (60 * MS, 100 * MS), (), 100 * MS, (), (decode,))
    made = reply(output(line), received_ns=0, submitted_ns=0, sent_ns=100 * MS)
    told = json.loads(json.dumps(latency_breakdown(made)))
    assert told["verdict"]["shares"] == {"bandwidth": 0.4, "attention": 0.3, "arithmetic": 0.2, "company": 0.1}
    shown = "what held it: bandwidth 40%, attention 30%, arithmetic 20%, company 10%"
    assert list(breakdown_lines(told))[3] == shown


def test_a_calibrated_machine_shows_how_near_steps_came_to_its_limits() -> None:
    """Chunks that are shown as one add up; without a calibration nothing is said."""
    least = LeastTimes(arithmetic=6 * MS, bandwidth=MS)
    chunks = tuple(
        ChunkTime(at * MS, (at + 10) * MS, 16, at, position=at, kernel_ns=10 * MS, alone_ns=10 * MS, least=least)
        for at in (0, 10)
    )
    decode = DecodeTime(20 * MS, 60 * MS, 4, 0, 40 * MS, 4, 40 * MS, 0, least=LeastTimes(2 * MS, 30 * MS))
    line = Timeline(0, 0, chunks, (20 * MS, 60 * MS), (), 60 * MS, (), (decode,))
    made = latency_breakdown(reply(output(line), received_ns=0, submitted_ns=0, sent_ns=60 * MS))
    said = [text.strip() for text in breakdown_lines(made) if "reached" in text]
    assert said == [
        "its steps reached 60% of the arithmetic and 10% of the bandwidth that this machine has (calibrated)",
        "its steps reached 5% of the arithmetic and 75% of the bandwidth that this machine has (calibrated)",
    ]
    without = replace(line, chunks=(), decodes=(replace(decode, start_ns=0, kernel_ns=60 * MS, least=LeastTimes()),))
    made = latency_breakdown(reply(output(without), received_ns=0, submitted_ns=0, sent_ns=60 * MS))
    assert not any("reached" in text for text in breakdown_lines(made))


def test_the_verdict_says_how_often_a_prompt_was_cut_and_why() -> None:
    share, longest = Reason(Why.LEAST_SHARE), Reason(Why.LONGEST_STEP, (250 * MS, 180 * MS))
    chunks = tuple(
        ChunkTime(at * MS, (at + 1) * MS, 16, at, position=16 * at, kernel_ns=MS, alone_ns=MS, reason=reason)
        for at, reason in enumerate([share, share, longest, Reason(Why.WHOLE)])
    )
    line = Timeline(0, 0, chunks, (4 * MS,), (), 4 * MS)
    words = latency_breakdown(reply(output(line), submitted_ns=0))["verdict"]["words"]
    assert "computing its prompt, in 4 chunks (2 of them limited by: no budget left)" in words


def starved(chunk_ns: int, decode_ns: int) -> dict[str, Any]:
    """The breakdown of `WHOLE`, whose first chunk and whose decodes were kept from the cores for so long."""
    first, *others = WHOLE.chunks
    chunks, [decode] = (replace(first, starved_ns=chunk_ns), *others), WHOLE.decodes
    line = replace(WHOLE, chunks=chunks, decodes=(replace(decode, starved_ns=decode_ns),))
    return latency_breakdown(reply(output(line), received_ns=1 * MS, submitted_ns=4 * MS, sent_ns=525 * MS))


def test_time_without_a_core_comes_out_of_own_work_and_company_in_proportion() -> None:
    before, after = (told["verdict"]["limits_ns"] for told in (starved(0, 0), starved(19 * MS, 11 * MS)))
    taken = {limit: (ns - after[limit]) // MS for limit, ns in before.items() if ns != after[limit]}
    assert taken == {"arithmetic": 15, "bandwidth": 6, "company": 4 + 5, "cores": -30}, "19 of 30 + 8, 11 of 30 + 25"


def test_a_line_says_how_long_it_was_without_a_core_where_that_is_over_a_tenth() -> None:
    """The chunk took 40 ms, the decodes 60."""
    note = "ms without a core: other programs of this machine, or a limit of CPU time (estimated)"
    for chunk_ns, decode_ns, said in (
        (4 * MS, 6 * MS, []),
        (4 * MS + 1, 0, ["4.000"]),
        (38 * MS, 55 * MS, ["38.000", "55.000"]),
    ):
        text = list(breakdown_lines(json.loads(json.dumps(starved(chunk_ns, decode_ns)))))
        assert [line.strip() for line in text if "without a core" in line] == [f"of this {ms} {note}" for ms in said]


def test_the_check_of_a_form_is_not_tokenising() -> None:
    made = reply(output(WHOLE), received_ns=1 * MS, form_ns=2 * MS, submitted_ns=4 * MS)
    [breakdown] = assert_exact(made)
    assert [(line.what, line.ns, line.parts) for line in breakdown.lines[:2]] == [
        ("received and tokenized", 1 * MS, {"front": 1 * MS}),
        ("structured output checked", 2 * MS, {"form": 2 * MS}),
    ]


def decoded(end_ns: int) -> Timeline:
    """A prompt computed from 10 to 20 ms, then tokens until `end_ns`."""
    chunk = ChunkTime(10 * MS, 20 * MS, 4, 1, kernel_ns=10 * MS, alone_ns=10 * MS)
    decode = DecodeTime(20 * MS, end_ns, 1, 0, end_ns - 20 * MS, 1, 0, prefill_ns=0)
    return Timeline(10 * MS, 10 * MS, (chunk,), (20 * MS, end_ns), (), end_ns, (), (decode,))


def test_an_answer_that_waits_for_the_others_is_not_being_sent() -> None:
    """Outputs come in the order in which prompts end; the breakdown is in that of the request."""
    late, early = output(decoded(900 * MS), id="x-0"), output(decoded(30 * MS), decoded(31 * MS), id="x-1")
    made = replace(reply(early, late, sent_ns=902 * MS), prompt_ids=("x-0", "x-1"))
    [last, first, second] = assert_exact(made)
    assert [(one.prompt, one.index) for one in (last, first, second)] == [(0, 0), (1, 0), (1, 1)]
    assert [line.what for line in last.lines][-2:] == ["decode", "detokenized and sent"]
    for breakdown, waited_ns in ((first, 870 * MS), (second, 869 * MS)):
        *_, waited, sent = breakdown.lines
        assert (waited.parts, sent.parts) == ({"answers": waited_ns}, {"send": 2 * MS})
    told = latency_breakdown(made)
    assert told["verdict"]["words"].startswith("prompt 0, choice 0, which ended last: limited by memory bandwidth")
    assert [choice["verdict"]["limit"] for choice in told["choices"]] == ["bandwidth", "answers", "answers"]
    text = "\n".join(breakdown_lines(told))
    assert "limited by the reply's other choices (it ends with the last of them): prompt 0, choice 0; 870.0 of " in text
    assert "870.000  waited for the reply's other choices: prompt 0, choice 0 ended last\n" in text


def test_a_reply_that_was_cut_has_a_breakdown_until_the_engine_was_done() -> None:
    """Nothing is later than the whole."""
    made = reply(output(decoded(900 * MS)), sent_ns=500 * MS, status=499)
    [breakdown] = assert_exact(made)
    assert breakdown.lines[-1].what == "decode"
    told = latency_breakdown(made)
    [choice] = told["choices"]
    assert told["cut_ns"] < choice["e2e"]["ns"] == choice["total"]["ns"]
    assert "cancelled after 490.003 ms" in "\n".join(breakdown_lines(told))


def chunked(limits: list[Reason]) -> Timeline:
    """Chunks of 16 tokens and then more, 10 ms each with 1 ms between and another's step of 2 ms before every third."""
    chunks, now = [], 0
    for step, reason in enumerate(limits, 15):
        now += 3 * MS if step % 3 == 0 else 1 * MS
        others = {"without_ns": 2 * MS if step % 3 == 0 else 0, "others": 1, "reason": reason}
        chunks.append(ChunkTime(now, now + 10 * MS, step + 1, step, kernel_ns=9 * MS, alone_ns=8 * MS, **others))  # type: ignore[arg-type]
        now += 10 * MS
    return Timeline(0, 0, tuple(chunks), (now,), (), now)


def test_alike_chunks_are_one_line_of_text_and_many_of_json() -> None:
    budget = [Reason(Why.ITL_BUDGET, (40 * MS, predicted * MS)) for predicted in range(20, 30)]
    made = reply(output(chunked([*budget, Reason(Why.WHOLE)])), sent_ns=10**9)
    told = latency_breakdown(made)
    text = "\n".join(breakdown_lines(told))
    assert "  prefill: 10 chunks of 16 to 25 tokens, steps 15 to 24, 10.000 ms each: ITL budget 40.0 ms\n" in text
    assert "115.000  prefill: " in text
    assert "    including the time between chunks: prefill 90.000 + host 19.000 + others 6.000\n" in text
    assert "    shared with 10 tokens of other requests; estimated: own 80.000, others' 10.000\n" in text
    assert "prefill, 26 tokens in step 25: all that was left" in text
    assert len([line for line in told["choices"][0]["lines"] if line["what"] == "prefill"]) == 11


def test_stamps_out_of_order_are_an_error_not_a_wrong_breakdown() -> None:
    made = reply(output(WHOLE), received_ns=1 * MS, submitted_ns=11 * MS)
    with pytest.raises(ValueError, match="out of order"):
        latency_breakdown(made)


def test_a_reply_that_the_engine_never_heard_of_has_no_choices() -> None:
    told = latency_breakdown(reply(status=500))
    assert (told["choices"], told["verdict"]) == ([], None)
    assert "has not reported on this request yet" in "\n".join(breakdown_lines(told))


# --- timelines at random ------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.integers(0, 2**32))
def test_random_timelines_are_covered_exactly(seed: int) -> None:
    rng = random.Random(seed)
    lines = [random_timeline(rng) for _ in range(rng.randint(1, 3))]
    made = reply(*(output(line, id=str(i)) for i, line in enumerate(lines)))
    submitted_ns = min(line.arrival_ns for line in lines)
    form_ns = rng.choice([None, submitted_ns - rng.randrange(9)])
    received_ns = (submitted_ns if form_ns is None else form_ns) - rng.randrange(3)
    ids = tuple(rng.sample(made.prompt_ids, len(lines)))
    early = replace(made, received_ns=received_ns, submitted_ns=submitted_ns, form_ns=form_ns, prompt_ids=ids)
    assert_exact(early)
    for sent_ns in (submitted_ns, rng.randint(submitted_ns, made.sent_ns)):
        assert_exact(replace(early, sent_ns=sent_ns, status=LEFT))
    assert_text_adds_up(latency_breakdown(early))


def assert_text_adds_up(told: dict[str, Any]) -> None:
    """Lines of text are fewer, their sums the same; nothing is without words."""
    assert list(breakdown_lines(told))
    for choice in told["choices"]:
        lines = list(collapsed(choice["lines"]))
        assert [line["start_ns"] for line in lines] == starts(lines)
        assert sum(line["ns"] for line in lines) == choice["total"]["ns"]
        parts = sum((Counter(line["parts_ns"]) for line in lines), Counter())
        assert parts == Counter(choice["total"]["parts_ns"])
        for line in lines:
            assert sum(line["parts_ns"].values()) == line["ns"]


# --- real runs ----------------------------------------------------------------------------------------------------

CROWD = mixed_requests(40, seed=3)


@dataclass
class Watched:
    """What the collector was told, to account for once more, step by step and sequence by sequence."""

    ends: list[StepEnd] = field(default_factory=list)
    choices: dict[tuple[str, int], int] = field(default_factory=dict)
    """Numbers of sequences."""
    arrivals: dict[int, int] = field(default_factory=dict)


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    seen = Watched()
    note, follow = Collector.note, Collector.follow

    def noting(self: Collector, end: StepEnd) -> None:
        seen.ends.append(end)
        note(self, end)

    def following(
        self: Collector, id_: str, prompt: Any, params: Any, answers: Any, arrival_ns: int, **how: Any
    ) -> None:
        for index, number in enumerate(answers):
            seen.choices[id_, index], seen.arrivals[number] = number, arrival_ns
        follow(self, id_, prompt, params, answers, arrival_ns, **how)

    with monkeypatch.context() as patch:
        patch.setattr(Collector, "note", noting)
        patch.setattr(Collector, "follow", following)
        yield seen


SETTINGS = pytest.mark.parametrize(
    "settings",
    [
        {},
        {"chunking": "tokens=32"},
        {"chunking": "time=2"},
        {"overlap": False, "max_num_seqs": 3},
        {"kv_memory": "36 blocks"},
        {"kv_memory": "36 blocks", "priority_preempts": True, "chunking": "tokens=48"},
        {"batching": "static=8"},
    ],
    ids=["usual", "chunked", "time budget", "few seats", "few blocks", "urgent", "static"],
)


@SETTINGS
def test_bills_of_real_runs_are_exact(settings: dict[str, Any]) -> None:
    for made in served(CROWD, **settings).values():
        assert_exact(reply(made))


def served(crowd: list[Asked], wrap: Any = None, **settings: Any) -> dict[str, RequestOutput]:
    with engine(wrap, **settings) as made:
        for asked in crowd:
            submit(made, asked)
        return run(made)


@SETTINGS
def test_decodes_are_the_steps_that_gave_a_token_and_no_chunk(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Differences of totals against a sum over the steps."""
    with watched(monkeypatch) as seen:
        outputs = served(CROWD, **settings)
    for (id_, index), number in seen.choices.items():
        line = outputs[id_].choices[index].timeline
        steps = [end for end in seen.ends if number in {given.number for given in end.given} - in_chunks(end)]
        told = sorted(line.decodes, key=lambda run: run.start_ns)
        assert sum(run.steps for run in told) == len(steps)
        assert sum(run.kernel_ns for run in told) == sum(end.result.step_ns for end in steps)
        assert sum(run.tokens for run in told) == sum(end.step.plan.shape.tokens for end in steps)
        mixed = sum(bool(end.step.plan.chunks and end.step.plan.decoding) for end in steps)
        assert sum(run.mixed_steps for run in told) == mixed
        assert sum(run.steps for run in told) + count_sampled_chunks(seen, number) == len(line.token_ns)


@SETTINGS
def test_time_without_a_core_is_that_of_the_steps(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the threads of the kernels had lacked a core for a little longer in each step."""
    lacked_ns = accumulate(count(1000, 10))
    monkeypatch.setattr(NativeExecutor, "lacked_ns", lambda _: next(lacked_ns))
    with watched(monkeypatch) as seen:
        outputs = served(CROWD, **settings)
    by_step = {end.step.plan.step: end for end in seen.ends}
    assert all(0 < end.result.starved_ns < end.result.step_ns for end in seen.ends if end.step.plan.shape.tokens)
    for (id_, index), number in seen.choices.items():
        line = outputs[id_].choices[index].timeline
        assert all(chunk.starved_ns == by_step[chunk.step].result.starved_ns for chunk in line.chunks)
        steps = [end for end in seen.ends if number in {given.number for given in end.given} - in_chunks(end)]
        assert sum(run.starved_ns for run in line.decodes) == sum(end.result.starved_ns for end in steps)


def test_nothing_is_said_of_cores_where_the_threads_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    lacked_ns = count(0, 1000)
    monkeypatch.setattr(NativeExecutor, "lacked_ns", lambda _: next(lacked_ns))
    for made in served(CROWD[:3], executor="reference").values():
        for choice in made.choices:
            assert {item.starved_ns for item in (*choice.timeline.chunks, *choice.timeline.decodes)} == {0}


def in_chunks(end: StepEnd) -> set[int]:
    """Sequences that had a chunk, and those that were forked from one."""
    chunks = end.step.plan.chunks
    return {chunk.number for chunk in chunks} | {fork for chunk in chunks for fork in chunk.forks}


def count_sampled_chunks(seen: Watched, number: int) -> int:
    return sum(number in in_chunks(end) and number in {given.number for given in end.given} for end in seen.ends)


@SETTINGS
def test_waiting_is_told_by_the_reasons_of_the_plans(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Running totals against each plan's words for each that waited."""
    with watched(monkeypatch) as seen:
        outputs = served(CROWD, **settings)
    reasons = 0
    for (id_, index), number in seen.choices.items():
        line = outputs[id_].choices[index].timeline
        if index:
            continue
        told: Counter[Why] = Counter()
        for held in (*line.waits, *(held for one in line.preemptions for held in one.waits)):
            told[held.reason.why] += held.ns
        assert told == waited(seen, number)
        reasons += len(told)
    assert reasons > 10


def waited(seen: Watched, number: int) -> Counter[Why]:
    """Step by step: it waits from the first step after its arrival or preemption to the one that admits it."""
    took: Counter[Why] = Counter()
    waiting, since_ns = True, seen.arrivals[number]
    for end, later in pairwise(seen.ends):
        plan = end.step.plan
        if number in {admission.number for admission in plan.admissions}:
            waiting = False
        if waiting and end.began_ns >= since_ns:
            took[reason_for(end, number)] += later.began_ns - end.began_ns
        if number in {one.number for one in (*plan.preemptions, *end.resolved.preempted)}:
            waiting, since_ns = True, end.began_ns + 1
        if number in {one.number for one in end.resolved.finished}:
            break
    return took


def reason_for(end: StepEnd, number: int) -> Why:
    shared = {held.number for held in end.step.plan.not_admitted if held.reason.why is Why.SHARES_PREFIX}
    others = [held.reason.why for held in end.step.plan.not_admitted if held.reason.why is not Why.SHARES_PREFIX]
    return Why.SHARES_PREFIX if number in shared else others[-1] if others else Why.NO_BUDGET


def test_chunks_tell_of_company_and_of_steps_without(monkeypatch: pytest.MonkeyPatch) -> None:
    with watched(monkeypatch) as seen:
        outputs = served(CROWD, chunking="tokens=48")
    by_step = {end.step.plan.step: end for end in seen.ends}
    without = 0
    for (id_, index), _ in seen.choices.items():
        chunks = outputs[id_].choices[index].timeline.chunks
        for chunk in chunks:
            end = by_step[chunk.step]
            assert chunk.others == end.step.plan.shape.tokens - chunk.tokens
            assert chunk.kernel_ns == end.result.step_ns <= chunk.end_ns - chunk.start_ns
            assert 0 < chunk.alone_ns <= chunk.kernel_ns
            assert chunk.others or chunk.alone_ns == chunk.kernel_ns
        for chunk, later in pairwise(chunks):
            between = [by_step[step].result.step_ns for step in range(chunk.step + 1, later.step)]
            assert later.without_ns == sum(between)
            without += bool(between)
    assert without > 5


def test_failed_steps_are_billed_exactly() -> None:
    for made in served(CROWD[:20], failing({step: StepCancelledError() for step in (2, 7, 9)})).values():
        assert_exact(reply(made))
    for made in served(CROWD[:20], failing({3: MemoryError(), 8: MemoryError()})).values():
        assert_exact(reply(made))


@pytest.mark.parametrize("turns", [0, 1, 3, 8])
def test_whoever_leaves_early_is_billed_to_that_moment(turns: int) -> None:
    """In the queue, in prefill, while it decodes."""
    with engine(chunking="tokens=64", max_num_seqs=2) as made:
        ids = [made.submit(prompt(200, seed=i), SamplingParams(max_tokens=9, n=2), id=str(i)) for i in range(4)]
        for _ in range(turns):
            made.turn()
        for id_ in ids:
            made.abort(id_)
        for one in run(made).values():
            [first, second] = assert_exact(reply(one))
            assert "abort" in (first.finish_reason, second.finish_reason)


def test_nothing_of_those_that_waited_stays_behind() -> None:
    with engine(kv_memory="36 blocks") as made:
        for asked in CROWD:
            submit(made, asked)
        run(made)
        made.submit(prompt(5), SamplingParams(max_tokens=3))
        run(made)
        times = made._io.collector.times
        assert (times._times, times._queue._fresh) == ({}, [])


def test_estimates_know_a_wide_prompt_from_a_decode() -> None:
    """Once a few steps have been seen: a long chunk beside one decode is mostly the chunk's work."""
    with engine(chunking="tokens=256") as made:
        decoding = made.submit(prompt(4, seed=9), SamplingParams(max_tokens=60, temperature=0, ignore_eos=True))
        for _ in range(20):
            made.turn()
        long = made.submit(prompt(450, seed=8), SamplingParams(max_tokens=2, temperature=0))
        outputs = run(made)
        chunk, *_ = outputs[long].choices[0].timeline.chunks
        assert chunk.others == 1
        assert chunk.alone_ns > 0.5 * chunk.kernel_ns
        [decode] = outputs[decoding].choices[0].timeline.decodes
        assert decode.mixed_steps >= 2
        assert 0 < decode.prefill_ns < decode.kernel_ns
        assert 0 < decode.alone_ns <= decode.kernel_ns - decode.prefill_ns


# --- over HTTP ----------------------------------------------------------------------------------------------------


def ask(server: Served, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}/v1/completions", json={"model": NAME, "prompt": "Once", **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


@pytest.mark.parametrize("body", [{}, {"n": 2, "temperature": 1}, {"prompt": ["Once", "Twice"]}])
def test_the_bill_of_a_reply_over_http(server: Served, body: dict[str, Any]) -> None:
    answer = ask(server, max_tokens=5, **body)
    told = httpx.get(f"{server.url}/v1/requests/{answer['id']}").json()
    assert told["id"] == answer["id"]
    assert told["completion_tokens"] == answer["usage"]["completion_tokens"]
    assert len(told["choices"]) == len(answer["choices"])
    for choice in told["choices"]:
        assert sum(line["ns"] for line in choice["lines"]) == choice["total"]["ns"] > choice["ttft"]["ns"] > 0
        assert [line["start_ns"] for line in choice["lines"]] == starts(choice["lines"])
    assert_exact(server.state.finished.get(answer["id"]))  # type: ignore[arg-type]


def test_only_a_request_with_a_form_has_a_line_for_its_check(server: Served) -> None:
    form = {"type": "object", "properties": {"checked": {"type": "boolean"}}}
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": form}}
    for more, checks in (({}, 0), ({"response_format": schema}, 1)):
        id_ = ask(server, max_tokens=3, **more)["id"]
        [choice] = httpx.get(f"{server.url}/v1/requests/{id_}").json()["choices"]
        names = [line["what"] for line in choice["lines"]]
        assert names.count("structured output checked") == checks
        assert ("form" in choice["ttft"]["parts_ns"]) == bool(checks)


@pytest.mark.parametrize("stream", [False, True])
def test_timings_in_the_reply_are_those_of_the_bill(server: Served, stream: bool) -> None:
    """TTFT counts from the request's arrival at the server, wherever it is told."""
    body = {"model": NAME, "prompt": "Once", "max_tokens": 4, "stream": stream}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    last = json.loads(answer.text.split("\n\n")[-3].removeprefix("data: ")) if stream else answer.json()
    [choice] = httpx.get(f"{server.url}/v1/requests/{last['id']}").json()["choices"]
    assert last["timings"]["ttft_ms"] == pytest.approx(choice["ttft"]["ns"] / 1e6)
    parts = choice["ttft"]["parts_ns"]
    assert last["timings"]["queue_ms"] == pytest.approx((parts["front"] + parts["queue"]) / 1e6)


def starts(lines: list[dict[str, Any]]) -> list[int]:
    """Each where the one before ended."""
    found, at = [], 0
    for line in lines:
        found.append(at)
        at += line["ns"]
    return found


def test_an_unknown_bill_is_404_in_openais_form(server: Served) -> None:
    answer = httpx.get(f"{server.url}/v1/requests/cmpl-nothing")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "request_not_found"


def test_explain_prints_the_breakdown(server: Served, capsys: pytest.CaptureFixture[str]) -> None:
    id_ = ask(server, max_tokens=4, stop=None)["id"]
    assert main(["explain", id_, "--url", server.url]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{id_}: ")
    assert "limited by " in text
    assert "TTFT" in text
    assert main(["explain", id_, "--url", server.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["id"] == id_


def test_explain_without_id_is_of_the_last(server: Served, capsys: pytest.CaptureFixture[str]) -> None:
    ids = [ask(server, max_tokens=2)["id"] for _ in range(2)]
    assert main(["explain", "--url", server.url]) == 0
    assert capsys.readouterr().out.startswith(f"{ids[-1]}: ")


def test_explain_where_nothing_has_finished(server_host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    with server_host.front() as front:
        assert main(["explain", "--url", front.url]) == 1
        assert httpx.get(f"{front.url}/v1/requests").json()["data"] == []
    assert capsys.readouterr().err == f"twostep: {front.url}/v1: the server has no finished request to explain\n"
    assert main(["explain", "--url", front.url]) == 1
    assert "Connection refused; no server is running there (--url gives its address)" in capsys.readouterr().err


def test_requests_are_listed_newest_first(server: Served) -> None:
    ids = [ask(server, max_tokens=n)["id"] for n in (1, 2, 3)]
    told = httpx.get(f"{server.url}/v1/requests?limit=2").json()
    assert (told["object"], told["has_more"], told["first_id"], told["last_id"]) == ("list", True, ids[2], ids[1])
    assert [row["id"] for row in told["data"]] == ids[:0:-1]
    assert [row["completion_tokens"] for row in told["data"]] == [3, 2]
    for row in told["data"]:
        breakdown = httpx.get(f"{server.url}/v1/requests/{row['id']}").json()
        assert {name: breakdown[name] for name in row.keys() & breakdown.keys() - {"object"}} == {
            name: row[name] for name in row.keys() & breakdown.keys() - {"object"}
        }
        [choice] = breakdown["choices"]
        assert row["ttft_ms"] == pytest.approx(choice["ttft"]["ns"] / 1e6, abs=0.001)
        assert row["e2e_ms"] == pytest.approx(choice["e2e"]["ns"] / 1e6, abs=0.001)


@pytest.mark.parametrize("limit", ["0", "1001", "x", "-1", "", "9" * 5000])
def test_limits_of_the_list(server: Served, limit: str) -> None:
    answer = httpx.get(f"{server.url}/v1/requests", params={"limit": limit})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "limit")


def test_explain_says_what_is_wrong_in_one_line(server: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "cmpl-x y%", "--url", server.url]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "no finished request" in error
