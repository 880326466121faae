"""The load generator's runs: when requests are sent, what ends them, what the client says of itself; its prompts."""

import asyncio
import os
import resource
import signal
from dataclasses import replace
from io import StringIO
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.hostile import DONE, Answer, Peer, serving, stream, text, usage
from support.http_server import NAME, Served

from twostep.bench.client.outcome import Counting, FailureKind
from twostep.bench.client.target import Target
from twostep.bench.load import workload_run
from twostep.bench.load.prompts import FIRST_ID, PROBES, WORDS, IdSource, WordSource, fitted
from twostep.bench.load.run_record import LATE_S, End, Fit, RunRecord
from twostep.bench.load.workload_run import LiveLine, Options, RunProgress, run
from twostep.cli.bench_runs import interrupts
from twostep.errors import InvalidParameterError, TargetError
from twostep.metrics.summary import summarise
from twostep.terminal import StatusLine
from twostep.workload.definition import Workload, WorkloadRequest
from twostep.workload.schedule import Closed, ClosedLoop, Mode, Open, OpenLoop

MS = 1_000_000
ONE_EACH = Fit(overhead=0, per_word=1)
OPTIONS = Options(salt="test", fit=ONE_EACH)


def request(arrival_s: float = 0, after: int | None = None, tokens: int = 2, **more: object) -> WorkloadRequest:
    return WorkloadRequest(arrival_s, 5, tokens, after=after, **more)  # type: ignore[arg-type]


def measured(
    answer: Answer,
    *requests: WorkloadRequest,
    mode: Mode | None = None,
    options: Options = OPTIONS,
    **target: object,
) -> RunRecord:
    """A run against such a server."""

    async def measure() -> RunRecord:
        async with serving(answer) as url:
            asked = Target(url, **target)  # type: ignore[arg-type]
            return await run(Workload(requests, name="w", source="s"), asked, mode or Open(), options)

    return asyncio.run(measure())


TWO = stream(text("a"), text("b", "length"), usage(5, 2), DONE)


class Gate:
    """Answers only once so many requests are there at a time; tells how many there were at most."""

    def __init__(self, wanted: int) -> None:
        self._wanted, self._here = wanted, 0
        self.most = 0
        self.prompts: list[str] = []
        self._open = asyncio.Event()

    async def __call__(self, peer: Peer) -> None:
        self.prompts.append(peer.body["prompt"])
        self._here += 1
        self.most = max(self.most, self._here)
        if self._here >= self._wanted:
            self._open.set()
        await self._open.wait()
        await asyncio.sleep(0.01)
        self._here -= 1
        await TWO(peer)


# --- schedules ----------------------------------------------------------------------------------------------------


def test_open_loop_by_hand() -> None:
    """The third comes 30 ms after the end of the first, whenever that is."""
    loop = OpenLoop([request(0.010), request(0.020), request(0.030, after=0)])
    assert loop.next_ns() == 10 * MS
    assert list(loop.take(9 * MS)) == []
    assert list(loop.take(25 * MS)) == [(0, 10 * MS), (1, 20 * MS)]
    assert (loop.next_ns(), loop.ahead()) == (None, None)
    loop.ended(0, 50 * MS)
    assert (loop.next_ns(), loop.ahead()) == (80 * MS, 2)
    assert list(loop.take(81 * MS)) == [(2, 80 * MS)]


def test_closed_loop_by_hand() -> None:
    """Two clients; the second request of a conversation goes before later ones as soon as it may."""
    loop = ClosedLoop([request(9), request(9, after=0), request(9), request(9)], clients=2)
    assert list(loop.take(0)) == [(0, 0), (2, 0)]
    assert list(loop.take(5 * MS)) == []
    loop.ended(0, 10 * MS)
    assert loop.next_ns() is None
    assert list(loop.take(11 * MS)) == [(1, 10 * MS)]
    loop.ended(2, 20 * MS)
    assert list(loop.take(21 * MS)) == [(3, 20 * MS)]


def test_a_client_that_waits_for_a_conversation_is_not_late() -> None:
    loop = ClosedLoop([request(), request(after=0)], clients=2)
    assert list(loop.take(0)) == [(0, 0)]
    loop.ended(0, 30 * MS)
    assert list(loop.take(31 * MS)) == [(1, 30 * MS)]


# --- runs ---------------------------------------------------------------------------------------------------------


def test_open_loop_does_not_wait_for_answers() -> None:
    """No answer comes before all five are there."""
    gate = Gate(5)
    record = measured(gate, *(request(i / 100) for i in range(5)))
    assert [outcome.failure for outcome in record.outcomes] == [None] * 5
    assert [outcome.number for outcome in record.outcomes] == [0, 1, 2, 3, 4]
    assert [outcome.due_ns for outcome in record.outcomes] == [i * 10 * MS for i in range(5)]
    assert all(outcome.sent_ns >= outcome.due_ns for outcome in record.outcomes)
    assert (gate.most, record.end, record.lateness and record.lateness.n) == (5, End.WHOLE, 5)
    assert (record.workload, record.source, record.server.model) == ("w", "s", "small")


def test_a_turn_waits_for_the_one_before() -> None:
    record = measured(TWO, request(), request(0.02, after=0), request(0.01, after=1))
    for before, after, pause_ns in zip(record.outcomes, record.outcomes[1:], (20 * MS, 10 * MS), strict=False):
        assert after.due_ns >= before.ended_ns + pause_ns


def test_a_turn_is_sent_though_the_one_before_failed() -> None:
    record = measured(stream(text("a", "stop"), usage(5, 1), DONE), request(), request(after=0, tokens=1))
    first, second = record.outcomes
    assert first.failure is not None
    assert (first.failure.kind, second.failure) == (FailureKind.SHORT, None)


def test_closed_loop_keeps_so_many_outstanding() -> None:
    gate = Gate(3)
    record = measured(gate, *(request(1000) for _ in range(9)), mode=Closed(3))
    assert (gate.most, record.end) == (3, End.WHOLE)
    assert all(outcome.failure is None for outcome in record.outcomes)
    ends = sorted(outcome.ended_ns for outcome in record.outcomes)
    assert [outcome.due_ns for outcome in record.outcomes[:3]] == [0, 0, 0]
    later = sorted(outcome.due_ns for outcome in record.outcomes[3:])
    assert all(due_ns >= ended_ns for due_ns, ended_ns in zip(later, ends, strict=False))


def test_warm_up_has_other_prompts_and_is_not_counted() -> None:
    gate = Gate(1)
    blocks = request(blocks=(1, 2))
    record = measured(gate, blocks, blocks, options=replace(OPTIONS, warmup=1))
    assert (len(record.outcomes), record.warmup, len(gate.prompts)) == (2, 1, 3)
    warm, first, second = gate.prompts
    assert first == second  # five tokens, all of the first block
    assert warm != first


def test_a_warm_up_that_fails_ends_it() -> None:
    with pytest.raises(TargetError, match="warm-up request failed: no token"):
        measured(stream(text("", "stop"), DONE), request(), options=replace(OPTIONS, warmup=1))


async def hanging(peer: Peer) -> None:
    await peer.begin()
    await peer.part(text("a"))
    await peer.gone()


@pytest.mark.parametrize("mode", [Open(), Closed(2)])
def test_the_time_is_over(mode: Mode) -> None:
    """One is running, one has not been sent."""
    record = measured(hanging, request(), request(after=0), mode=mode, options=replace(OPTIONS, limit_s=1))
    assert record.end == End.LIMIT
    [running] = record.outcomes
    assert (running.number, running.cut, len(running.token_ns)) == (0, True, 1)
    assert record.lateness is not None
    assert record.lateness.n == 1


def test_ctrl_c_ends_a_run_with_what_there_is() -> None:
    calls = 0

    async def answer(peer: Peer) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            return await TWO(peer)
        await peer.begin()
        await peer.part(text("a"))
        os.kill(os.getpid(), signal.SIGINT)
        await peer.gone()

    async def measure() -> RunRecord:
        async with serving(answer) as url:
            with interrupts() as stop:
                workload = Workload([request(), request(after=0), request(1000)])
                return await run(workload, Target(url), Open(), OPTIONS, stop=stop)

    record = asyncio.run(measure())
    assert record.end == End.INTERRUPTED
    failures = [outcome.failure and outcome.failure.kind for outcome in record.outcomes]
    assert failures == [None, FailureKind.CANCELLED]


@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_that_ask_to_end(which: signal.Signals) -> None:
    before = signal.getsignal(which)

    async def asked() -> signal.Signals | None:
        with interrupts() as stop:
            os.kill(os.getpid(), which)
            await asyncio.wait_for(stop.wait(), 10)
            return stop.by

    assert asyncio.run(asked()) == which
    assert signal.getsignal(which) == before


def test_a_signal_that_is_ignored_stays_so() -> None:
    """As SIGHUP is under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)

    async def asked() -> bool:
        with interrupts() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0.01)
            return stop.is_set()

    try:
        assert not asyncio.run(asked())
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_run_that_ends_before_anything_is_due_is_an_error() -> None:
    with pytest.raises(TargetError, match="ended before its first request was sent"):
        measured(TWO, request(5), options=replace(OPTIONS, limit_s=0.05))


def test_a_stop_before_the_run_does_not_wait_for_the_server() -> None:
    """The warm-up hangs."""

    async def measure() -> None:
        stop = asyncio.Event()

        async def answer(peer: Peer) -> None:
            stop.set()
            await peer.gone()

        async with serving(answer) as url:
            await run(Workload([request()]), Target(url), Open(), replace(OPTIONS, warmup=1), stop=stop)

    with pytest.raises(TargetError, match="stopped before the first request"):
        asyncio.run(measure())


def test_progress_is_told() -> None:
    told: list[RunProgress] = []

    async def slow(peer: Peer) -> None:
        await peer.begin()
        await peer.part(text("a"))
        while not any(one.tokens == 1 for one in told):
            await asyncio.sleep(0.01)
        await peer.part(text("b", "stop"))
        await peer.end()

    async def measure() -> None:
        async with serving(slow) as url:
            await run(Workload([request(tokens=3)]), Target(url), Open(), OPTIONS, told.append)

    asyncio.run(measure())
    running, last = next(one for one in told if one.tokens), told[-1]
    assert (running.requests, running.sent, running.done, running.failed, running.tokens) == (1, 1, 0, 0, 1)
    assert (last.sent, last.done, last.failed, last.tokens) == (1, 1, 1, 2)


def test_a_defect_of_the_client_is_raised() -> None:
    def broken(progress: RunProgress) -> None:
        raise ZeroDivisionError

    async def measure() -> None:
        async with serving(hanging) as url:
            await run(Workload([request()]), Target(url), Open(), OPTIONS, broken)

    with pytest.raises(ZeroDivisionError):
        asyncio.run(measure())


@pytest.mark.parametrize(
    ("requests", "mode", "options", "endpoint", "problem"),
    [
        ([], Open(), OPTIONS, "completions", "no requests"),
        ([request()], Closed(0), OPTIONS, "completions", "number of clients is 0"),
        ([request()], Open(), Options("s", vocabulary=5000), "chat", "need --endpoint completions"),
    ],
)
def test_what_cannot_be_run(
    requests: list[WorkloadRequest], mode: Mode, options: Options, endpoint: str, problem: str
) -> None:
    with pytest.raises(InvalidParameterError, match=problem):
        measured(TWO, *requests, mode=mode, options=options, endpoint=endpoint)


def test_the_client_says_when_it_was_late() -> None:
    record = measured(TWO, request())
    early, late = summarise([0.0] * 200), summarise([0.0] * 100 + [2 * LATE_S] * 2)
    assert replace(record, lateness=early, lag=early).kept_pace
    assert replace(record, lateness=None, lag=None).kept_pace
    assert not replace(record, lateness=late, lag=early).kept_pace
    assert not replace(record, lateness=early, lag=late).kept_pace


# --- open files ---------------------------------------------------------------------------------------------------


@pytest.fixture
def few_files(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """A process that may have 100 files, and up to 1000 if it asks; what it asked for."""
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (100, 1000))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: asked.append(limits))
    return asked


def test_room_is_made_for_connections(few_files: list[tuple[int, int]]) -> None:
    assert workload_run.make_room(Closed(10), requests=5000) == 100 - workload_run.SPARE
    assert few_files == []
    assert workload_run.make_room(Closed(300), requests=5000) == 300
    assert workload_run.make_room(Open(), requests=5000) == 1000 - workload_run.SPARE
    assert few_files == [(300 + workload_run.SPARE, 1000), (1000, 1000)]
    assert workload_run.make_room(Closed(5000), requests=10) == 100 - workload_run.SPARE
    with pytest.raises(
        InvalidParameterError, match="5000 clients need 5064 open files; the limit of this process is 1000"
    ):
        workload_run.make_room(Closed(5000), requests=5000)


def test_no_room_for_any_connection_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, 64))
    with pytest.raises(
        InvalidParameterError, match="at least 65 open files are needed; the limit of this process is 64 "
    ):
        workload_run.make_room(Open(), requests=5000)


def test_too_many_outstanding_requests_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twostep.bench.load.workload_run.make_room", lambda mode, requests: 2)
    with pytest.raises(TargetError, match="2 requests are running"):
        measured(hanging, *(request() for _ in range(3)))


# --- prompts ------------------------------------------------------------------------------------------------------

BLOCKS = st.lists(st.integers(0, 3), max_size=6).map(tuple)
FITS = st.builds(Fit, st.floats(0, 40), st.floats(0.5, 4))


def words_of(prompt: object) -> list[str]:
    assert isinstance(prompt, str)
    return prompt.split(" ")


@given(FITS, st.integers(1, 200), BLOCKS)
def test_a_prompt_has_the_length_asked_for(fit: Fit, tokens: int, blocks: tuple[int, ...]) -> None:
    source = WordSource(fit, 16, "salt")
    words = words_of(source.prompt(0, WorkloadRequest(0, tokens, 1, blocks)))
    made = fit.overhead + fit.per_word * len(words)
    assert abs(made - tokens) <= fit.per_word / 2 + 1e-9 or len(words) == 1
    assert set(words) <= set(WORDS)


@given(FITS, BLOCKS, BLOCKS, st.integers(1, 150), st.integers(1, 150))
def test_equal_leading_blocks_are_equal_leading_text(
    fit: Fit, one: tuple[int, ...], other: tuple[int, ...], tokens: int, others: int
) -> None:
    source = WordSource(fit, 16, "salt")
    first = words_of(source.prompt(0, WorkloadRequest(0, tokens, 1, one)))
    second = words_of(source.prompt(1, WorkloadRequest(0, others, 1, other)))
    shared = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    reach = max(0, round((16 * shared - fit.overhead) / fit.per_word))
    reach = min(reach, len(first), len(second))
    assert first[:reach] == second[:reach]


def test_what_is_not_shared_differs() -> None:
    source, other = WordSource(ONE_EACH, 16, "salt"), WordSource(ONE_EACH, 16, "pepper")
    asked = [WorkloadRequest(0, 64, 1, blocks) for blocks in ((1, 2), (1, 3), (1, 2))]
    first, second, third = (words_of(source.prompt(i, one)) for i, one in enumerate(asked))
    assert first[:16] == second[:16]
    assert first[16:32] != second[16:32]
    assert first[:32] == third[:32]
    assert first[32:] != third[32:]
    assert source.prompt(0, asked[0]) == " ".join(first)
    assert words_of(other.prompt(0, asked[0]))[:16] != first[:16]


def test_text_goes_as_it_is() -> None:
    asked = WorkloadRequest(0, 64, 1, (1,), text="Was ist?")
    assert WordSource(ONE_EACH, 16, "salt").prompt(0, asked) == "Was ist?"
    assert IdSource(5000, 16, "salt").prompt(0, asked) == "Was ist?"


def test_token_ids_are_exact() -> None:
    source = IdSource(3000, 16, "salt")
    first = source.prompt(0, WorkloadRequest(0, 50, 1, (1, 2)))
    second = source.prompt(1, WorkloadRequest(0, 20, 1, (1, 2)))
    assert (len(first), len(second)) == (50, 20)
    assert first[:20] == second
    assert all(isinstance(id_, int) and FIRST_ID <= id_ < 3000 for id_ in first)
    with pytest.raises(InvalidParameterError, match="the vocabulary has 1500 tokens"):
        Options("salt", vocabulary=1500)


def test_words_are_fit_to_tokens() -> None:
    assert fitted(PROBES, [30 + 2 * words for words in PROBES]) == Fit(30, 2)
    assert fitted((10, 20, 30), [9, 20, 30]).overhead == 0


def test_the_server_is_asked_how_long_words_are() -> None:
    lengths: list[int] = []

    async def answer(peer: Peer) -> None:
        lengths.append(len(peer.body["prompt"].split()))
        await stream(text("a", "length"), usage(10 + 2 * lengths[-1], 1), DONE)(peer)

    record = measured(answer, WorkloadRequest(0, 50, 1), options=Options("salt"))
    assert lengths == [*PROBES, 20]
    assert record.fit is not None
    assert [record.fit.overhead, record.fit.per_word] == pytest.approx([10, 2])
    assert record.outcomes[0].input_tokens == 50


def test_a_server_that_does_not_count_prompts_is_refused() -> None:
    with pytest.raises(TargetError, match="does not report usage"):
        measured(stream(text("a", "length"), DONE), request(), options=Options("salt"))
    with pytest.raises(TargetError, match="a probe prompt of 20 words failed: no token"):
        measured(stream(text("", "stop"), DONE), request(), options=Options("salt"))


def test_given_text_needs_no_probe() -> None:
    record = measured(TWO, request(text="Once"), options=Options("salt"))
    assert (record.fit, record.outcomes[0].failure) == (None, None)


# --- the line for somebody who waits ------------------------------------------------------------------------------


def test_the_live_line() -> None:
    assert str(RunProgress(10, 5, 3, 1, 40, 2.0)) == "3/10 requests, 2 running, 1 failed, 40 tokens (20/s), 2 s"
    assert str(RunProgress(10, 0, 0, 0, 0, 0.0)) == "0/10 requests, 0 running, 0 tokens (0/s), 0 s"


def test_lines_that_stay_are_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, shown = 100.0, StringIO()
    monkeypatch.setattr("twostep.bench.load.workload_run.monotonic", lambda: now_s)
    line = LiveLine(StatusLine(shown))
    for second in range(31):
        now_s = 100.0 + second
        line(RunProgress(50, second, second, 0, second, second))
    line.clear()
    assert [said.split()[1] for said in shown.getvalue().splitlines()] == ["10/50", "20/50", "30/50"]


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_the_line_is_written_anew() -> None:
    shown = Terminal()
    line = LiveLine(StatusLine(shown))
    line(RunProgress(50, 25, 25, 0, 0, 1.0))
    line.clear()
    assert "\n" not in shown.getvalue()
    assert "25/50 requests" in shown.getvalue()


# --- our own server -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_against_our_own_server(server: Served, endpoint: str) -> None:
    """Lengths as asked, times in order, a shared beginning found in the prefix cache."""
    shared = [WorkloadRequest(0, 80, 6, blocks=(1, 2, 3)), WorkloadRequest(0, 80, 6, blocks=(1, 2, 3, 4), after=0)]
    workload = Workload([*shared, WorkloadRequest(0, 60, 3), WorkloadRequest(0.01, 40, 1)])
    target = Target(server.url, endpoint=endpoint, model=NAME)  # type: ignore[arg-type]
    record = asyncio.run(run(workload, target, Open(), Options(endpoint)))
    assert record.server.owner == "twostep"
    for outcome, asked in zip(record.outcomes, workload.requests, strict=True):
        assert (outcome.failure, outcome.counted) == (None, Counting.STATED)
        assert len(outcome.token_ns) == asked.output_tokens
        assert outcome.input_tokens == pytest.approx(asked.input_tokens, abs=3)
        times = [outcome.due_ns, outcome.sent_ns, *outcome.token_ns, outcome.ended_ns]
        assert all(before <= after for before, after in pairwise(times))
    assert (record.outcomes[1].cached_tokens or 0) >= 32


def test_token_ids_against_our_own_server(server: Served) -> None:
    workload = Workload([WorkloadRequest(0, 40, 2, blocks=(1,))])
    target = Target(server.url, model=NAME)
    record = asyncio.run(run(workload, target, Closed(1), Options("ids", vocabulary=20_000)))
    assert (record.outcomes[0].failure, record.outcomes[0].input_tokens) == (None, 40)
