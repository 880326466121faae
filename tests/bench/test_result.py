"""The result of a benchmark as a file: read back exactly, refused where it is not what it says; limits as people write
them."""

import json
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.bench_runs import CLIENT, S, outcome, queue, result, run

from twostep.bench.client.outcome import Counting, Failure, FailureKind, Outcome
from twostep.bench.load.goodput_limits import limit_words, parse_limits
from twostep.bench.load.run_record import End, Fit, RunRecord, Server
from twostep.bench.load.sweep import Ending, Judgement, Point, Search, Verdict
from twostep.bench.report.output_files import check_outputs, write_file
from twostep.bench.report.result import (
    EngineStep,
    Result,
    Run,
    WorkloadFacts,
    client_machine,
    parse_result,
    read_result,
    result_text,
    workload_facts,
    write_result,
)
from twostep.errors import InvalidParameterError, ResultError
from twostep.metrics.load import Limits
from twostep.metrics.summary import Summary
from twostep.workload.definition import Workload, WorkloadRequest
from twostep.workload.schedule import Closed, Open

# --- any result ---------------------------------------------------------------------------------------------------

numbers = st.integers(0, 10**12)
floats = st.floats(0, 1e9, allow_nan=False)
times = st.datetimes(datetime(2000, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC))
summaries = st.none() | st.builds(Summary, floats, floats, floats, floats, floats, numbers)
failures = st.none() | st.builds(Failure, st.sampled_from(FailureKind), st.text())


@st.composite
def outcomes(draw: st.DrawFn) -> Outcome:
    tokens = tuple(sorted(draw(st.lists(numbers, max_size=5))))
    return Outcome(
        *(draw(numbers) for _ in range(3)), tokens, *(draw(numbers) for _ in range(3)),
        draw(st.none() | numbers), draw(st.none() | numbers), draw(st.sampled_from(Counting)),
        draw(failures), draw(st.text()),
    )  # fmt: skip


records = st.builds(
    RunRecord,
    server=st.builds(Server, st.text(), st.text(), st.text(), st.text()),
    workload=st.text(),
    source=st.text(),
    mode=st.just(Open()) | st.builds(Closed, numbers),
    started_at=times,
    outcomes=st.lists(outcomes(), min_size=1, max_size=3).map(tuple),
    end=st.sampled_from(End),
    lateness=summaries,
    lag=summaries,
    salt=st.text(),
    fit=st.none() | st.builds(Fit, st.floats(-9, 9), floats),
    warmup=numbers,
)
limits = st.builds(Limits, *[st.none() | floats] * 4)
runs = st.builds(
    Run,
    records,
    st.builds(WorkloadFacts, numbers, numbers, numbers, numbers),
    limits,
    st.none() | floats,
    st.lists(st.builds(EngineStep, numbers, numbers, numbers, numbers), max_size=2).map(tuple),
)
points = st.lists(st.builds(Point, floats, floats, st.sampled_from(Judgement)), max_size=3).map(tuple)
verdicts = st.builds(
    Verdict, st.just(Search(0.5, 1, 64)), points, st.sampled_from(Ending), st.none() | floats, st.none() | floats
)
results = st.builds(
    Result,
    st.lists(st.text()).map(tuple),
    st.just(CLIENT),
    st.lists(runs, max_size=2).map(tuple),
    st.none() | verdicts,
)


@settings(deadline=None)
@given(results)
def test_any_result_is_read_back_exactly(found: Result) -> None:
    text = result_text(found)
    assert parse_result(text) == found
    assert result_text(parse_result(text)) == text


def test_a_file_has_one_request_a_line_and_figures_for_others(tmp_path: Path) -> None:
    limited = run(queue(4, requests=7), limits=parse_limits(["ttft:200"]))
    path = tmp_path / "result.json"
    write_result(result(limited), path)
    assert read_result(path) == result(limited)
    assert sum('"token_gaps_ns"' in line for line in path.read_text().splitlines()) == 7
    figures = json.loads(path.read_text())["runs"][0]["figures"]
    assert figures["ttft"] == asdict(limited.summary.ttft)  # type: ignore[arg-type]
    assert (figures["goodput"], figures["served"]) == (limited.summary.goodput, 7)


def test_figures_that_contradict_the_requests_are_not_believed() -> None:
    told = json.loads(result_text(result(run([outcome(0, 0, S, 2 * S)]))))
    told["runs"][0]["figures"]["served"] = 99
    assert parse_result(json.dumps(told)).runs[0].summary.served == 1


# --- what is no result --------------------------------------------------------------------------------------------


def changed(*path: Any, value: object) -> str:
    told = json.loads(result_text(result(run([outcome(0, 0, S, 2 * S)]))))
    place = told
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return json.dumps(told)


OUTCOME = ("runs", 0, "record", "outcomes", 0)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "not a result of twostep bench"),
        ("{}", "not a result of twostep bench"),
        (changed("twostep bench result", value=1), "has an unknown format"),
        (changed("runs", value={}), r"result.runs is \{\}, not a list"),
        (changed("runs", 0, value=3), r"result.runs\[0\] is 3, not an object"),
        (changed("more", value=3), "result has an unknown field 'more'"),
        (changed("client", value={}), "result.client has no 'cpu'"),
        (changed(*OUTCOME, "due_ns", value=-1), r"outcomes\[0\].due_ns is -1, not a whole number from 0"),
        (changed(*OUTCOME, "due_ns", value=True), "due_ns is True"),
        (changed(*OUTCOME, "counted", value=True), "counted is True, not one of stated, spread, assumed"),
        (changed(*OUTCOME, "request_id", value=1), "request_id is 1, not a string"),
        (changed(*OUTCOME, "token_gaps_ns", value=[5, -1]), r"token_gaps_ns\[1\] is -1, not a whole number from 0"),
        (changed(*OUTCOME, "token_gaps_ns", value=None), "token_gaps_ns is None"),
        (changed(*OUTCOME, "token_ns", value=[1]), r"outcomes\[0\] has an unknown field 'token_ns'"),
        (changed(*OUTCOME, "failure", value={"kind": "bad", "detail": ""}), "failure.kind is 'bad', not one of conn"),
        (changed("runs", 0, "record", "mode", value={"kind": "shut"}), "mode.kind is 'shut', not open or closed"),
        (changed("runs", 0, "record", "mode", value=3), "mode.kind is None, not open or closed"),
        (changed("runs", 0, "record", "started_at", value="now"), "started_at is 'now', not a time"),
        (changed("runs", 0, "record", "outcomes", value=[]), r"result.runs\[0\]: a run without requests"),
        (changed("runs", 0, "rate", value="4"), "rate is '4', not a number"),
        (changed("runs", 0, "rate", value=float("inf")), "rate is inf, not a number"),
    ],
)
def test_what_is_no_result_is_refused_by_name(text: str, complaint: str) -> None:
    with pytest.raises(ResultError, match=complaint):
        parse_result(text)


def test_a_search_that_cannot_be_is_refused() -> None:
    found = result(run([outcome(0, 0, S)]), sweep=Verdict(Search(1, 1, 8), (), Ending.RUNS, None, None))
    told = json.loads(result_text(found))
    told["sweep"]["search"]["resolution"] = 2
    with pytest.raises(ResultError, match=r"result\.sweep\.search: sweep: resolution 2, allowed: between 0 and 1"):
        parse_result(json.dumps(told))


def test_files_that_cannot_be_read_or_written_are_named(tmp_path: Path) -> None:
    with pytest.raises(ResultError, match=r"none.json: cannot be read: No such file"):
        read_result(tmp_path / "none.json")
    with pytest.raises(ResultError, match="cannot be written: Is a directory"):
        write_result(result(), tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ResultError, match="binary: "):
        read_result(tmp_path / "binary")


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, link = tmp_path / "result.json", tmp_path / "link"
    path.write_text("old")
    link.symlink_to(path)
    write_file(link, b"new")
    assert (path.read_text(), link.is_symlink()) == ("new", True)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(ResultError, match="cannot be written: No space left"):
        write_file(path, b"half")
    assert path.read_text() == "new"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["link", "result.json"]


def test_what_is_no_file_is_written_to() -> None:
    """Not replaced: it stays a device."""
    check_outputs(Path("/dev/null"))
    write_file(Path("/dev/null"), b"gone")
    assert Path("/dev/null").is_char_device()


def test_outputs_are_tried_before(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    check_outputs(file, None)
    assert not list(tmp_path.iterdir())
    for paths, complaint in [
        ((tmp_path,), "is a folder"),
        ((Path(""),), "is a folder"),
        ((tmp_path / "none" / "a",), "no such folder"),
        ((file, tmp_path / "." / "a.json"), "given for two outputs"),
        ((tmp_path / ("a" * 300),), "cannot be written: File name too long"),
    ]:
        with pytest.raises(ResultError, match=complaint):
            check_outputs(*paths)


def test_a_run_has_requests() -> None:
    with pytest.raises(ValueError, match="without requests"):
        run([])


# --- what is known of a run ---------------------------------------------------------------------------------------


def test_levels_and_pace() -> None:
    served = [outcome(0, 0, S)]
    assert run(served, rate=2.5).level == 2.5
    assert run(served, rate=None).level is None
    assert run(served, mode=Closed(16)).level == 16
    assert run(served).kept_pace
    assert not run(served, late=Summary(0.1, 0.1, 0.1, 0.1, 0.1, 1)).kept_pace


CUT = Failure(FailureKind.CANCELLED, "")


def test_what_was_cut_or_not_sent_is_in_no_figure_but_its_own() -> None:
    ended = run([outcome(0, 0, S), outcome(1, 0, failure=CUT)], limits=Limits(ttft_s=2))
    found = replace(ended, workload=replace(ended.workload, requests=5))
    assert (found.summary.requests, found.summary.served, found.summary.met) == (1, 1, 1)
    assert (found.summary.cut, found.not_sent, found.summary.failures) == (1, 3, {})
    assert parse_result(result_text(result(found))) == result(found)


def test_only_an_open_loop_can_fall_behind() -> None:
    waiting = [outcome(i, i, S) for i in range(50)]
    assert run(waiting, mode=Closed(50)).kept_up
    assert not run(waiting).kept_up
    assert run(waiting, mode=Closed(50)).offered is None
    assert run([outcome(i, i * S, 9 * S) for i in range(3)]).offered == 1


def test_facts_of_a_workload() -> None:
    first = WorkloadRequest(0.0, 40, 5, blocks=(1, 2))
    again = replace(first, arrival_s=1.0, input_tokens=33, blocks=(1, 3))
    assert workload_facts(Workload([first, again])) == WorkloadFacts(2, 73, 16, 10)
    assert workload_facts(Workload([first, replace(again, text="Once")])).texts == 1


def test_this_machine_is_described() -> None:
    machine = client_machine()
    assert machine.cpu
    assert machine.cpus >= 1


# --- limits -------------------------------------------------------------------------------------------------------


def test_limits_are_in_milliseconds() -> None:
    limits = parse_limits(["ttft:200", "e2e:5000", "itl:0.5"])
    assert limits == Limits(ttft_s=0.2, itl_s=0.0005, e2e_s=5)
    assert limit_words(limits) == "TTFT <= 200 ms, ITL <= 0.5 ms, E2E <= 5000 ms"
    assert limit_words(parse_limits([])) == ""


@pytest.mark.parametrize(
    "word", ["ttft", "ttft=200", "ttft:", "ttft:0", "ttft:-1", "ttft:nan", "ttft:inf", "p99:1", ""]
)
def test_what_is_no_limit_is_refused_with_what_is(word: str) -> None:
    with pytest.raises(InvalidParameterError, match="NAME:MILLISECONDS with a name of ttft, itl, tpot, e2e"):
        parse_limits([word])


def test_a_limit_is_given_once() -> None:
    with pytest.raises(InvalidParameterError, match="ttft is given more than once"):
        parse_limits(["ttft:1", "ttft:2"])
