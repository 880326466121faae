"""Replays: a recorded run gives the same plans byte for byte, and what was changed in the file is found and named."""

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.recorded_run import Workload, record, replays

from twostep.cli.main import main
from twostep.core.policies import TimeBudget
from twostep.core.request import FinishReason
from twostep.errors import RecordingError
from twostep.recording.reader import Recording, Turn
from twostep.sim.recorded import Replay, replay

SEEDS = range(40)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The recordings of all seeds, each replayed to the end with the scheduler's own counters."""
    folder = tmp_path_factory.mktemp("runs")
    paths = {seed: folder / f"{seed}" for seed in SEEDS}
    for seed, path in paths.items():
        assert record(path, Workload(seed)).counters == replays(path).counters
    return paths


def test_everything_that_may_happen_happened_in_those_runs(runs: dict[int, Path]) -> None:
    """Otherwise that they are the same would say little."""
    seen = Counter[str]()
    for path in runs.values():
        replayed = replay(Recording(path), lambda turn: _note(turn, seen))
        seen.update({reason.name: count for reason, count in replayed.counters.finished.items()})
        seen["prefix hit"] += replayed.counters.prefix_hit_tokens
        seen["refused"] += replayed.refused
    wanted = [*(reason.name for reason in FinishReason), "prefix hit", "refused"]
    wanted += [
        "preempted",
        "arrived",
        "drafts",
        "forks",
        "held",
        "failed step",
        "heard during",
        "idle turn",
        "predicted",
    ]
    assert {name for name in wanted if not seen[name]} == set()


def _note(turn: Turn, seen: Counter[str]) -> None:
    seen["heard during"] += len(turn.during)
    seen["idle turn"] += turn.step is None
    if turn.step:
        plan = turn.step.plan
        seen["preempted"] += len(plan.preemptions)
        seen["arrived"] += sum(admission.arrived > 0 for admission in plan.admissions)
        seen["drafts"] += sum(chunk.drafts > 0 for chunk in plan.chunks)
        seen["forks"] += sum(len(chunk.forks) for chunk in plan.chunks)
        seen["held"] += len(plan.not_admitted)
        seen["failed step"] += turn.step.result.failed
        seen["predicted"] += plan.predicted_ns is not None


def test_a_replay_counts_what_the_executor_gave(tmp_path: Path) -> None:
    workload = Workload(7, step_failures=0)
    record(tmp_path / "run", workload)
    replayed = replays(tmp_path / "run")
    queued = workload.queued
    answers = sum(len(workload.executor.tokens[number]) - prompt for number, prompt in queued.items())
    assert replayed.output_tokens == answers > 0


Lines = list[Any]


def tampered_copy(path: Path, change: Callable[[Lines], object]) -> Path:
    """A copy of the recording whose lines, from the first turn on, were changed."""
    header, *lines = (json.loads(line) for line in path.read_bytes().splitlines())
    change(lines)
    copy = path.with_suffix(".tampered")
    copy.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in (header, *lines)))
    return copy


def tampered(path: Path, change: Callable[[Lines], object]) -> Replay:
    return replay(Recording(tampered_copy(path, change)))


def steps(lines: Lines) -> Lines:
    return [line for line in lines if len(line) == 5]


@pytest.fixture
def timed(runs: dict[int, Path]) -> Path:
    """A run whose chunks follow measured times, with chunks and requests that wait."""
    return next(path for path in runs.values() if Recording(path).header.settings.chunking == TimeBudget(30_000_000))


def test_a_changed_plan_is_found_at_its_step(timed: Path) -> None:
    def widen(lines: Lines) -> None:
        step = next(step for step in steps(lines)[3:] if step[4][6])
        step[4][6][0][2] += 1
        changed.append((step[4][0], step[4][6][0][2]))

    changed: list[tuple[int, int]] = []
    replayed = tampered(timed, widen)
    [(number, tokens)] = changed
    assert replayed.difference is not None
    assert (replayed.same, replayed.difference.step) == (number - 1, number)
    assert replayed.difference.field == "chunks"
    recorded, ours = (re.search(r"computes (\d+)", text) for text in _sides(replayed))
    assert (recorded and int(recorded[1]), ours and int(ours[1])) == (tokens, tokens - 1)
    assert replayed.steps == len(list(turn for turn in Recording(timed).turns() if turn.step))


def _sides(replayed: Replay) -> tuple[str, str]:
    assert replayed.difference is not None
    return replayed.difference.recorded, replayed.difference.replayed


def test_a_changed_time_is_found_in_the_next_prediction(timed: Path) -> None:
    def slow_down(lines: Lines) -> None:
        steps(lines)[5][3][0] *= 2

    difference = tampered(timed, slow_down).difference
    assert difference is not None
    assert difference.field in ("predicted_ns", "chunks")
    assert difference.step > steps_before(timed, 5)


def steps_before(path: Path, index: int) -> int:
    """The number of the step with this index in the recording."""
    return [turn.step.plan.step for turn in Recording(path).turns() if turn.step][index]


def test_an_end_that_is_gone_is_found(timed: Path) -> None:
    def revive(lines: Lines) -> None:
        step = next(step for step in steps(lines) if any(outcome[2] == "stop" for outcome in step[3][1]))
        step[3][1] = [outcome for outcome in step[3][1] if outcome[2] != "stop"]
        changed.append(step[4][0])

    changed: list[int] = []
    difference = tampered(timed, revive).difference
    assert difference is not None
    assert difference.step == changed[0] + 1


def test_a_request_that_is_gone_is_found_where_it_was(timed: Path) -> None:
    def lose(lines: Lines) -> None:
        index, line = next((i, line) for i, line in enumerate(lines, 2) if line[1] and line[1][0][0] == "+")
        del line[1][0]
        changed.append(index)

    changed: list[int] = []
    assert line_found(tampered_copy(timed, lose)) == changed[0]


def line_found(path: Path) -> int:
    """Where a replay ends early: at a difference or at what cannot be."""
    try:
        difference = replay(Recording(path)).difference
    except RecordingError as error:
        return int(re.findall(r"line (\d+): ", str(error))[0])
    assert difference is not None
    return difference.line


def test_a_time_that_is_gone_is_found(timed: Path) -> None:
    with pytest.raises(RecordingError, match=r"line \d+: times: fewer than the loop reads"):
        tampered(timed, lambda lines: steps(lines)[2][0].pop())


def test_a_line_that_is_gone_is_found(timed: Path) -> None:
    difference = tampered(timed, lambda lines: lines.remove(steps(lines)[4])).difference
    assert difference is not None
    assert difference.field == "step"


def test_a_step_more_than_recorded_is_found(timed: Path) -> None:
    def drop_step(lines: Lines) -> None:
        first = lines.index(steps(lines)[0])
        lines[first] = lines[first][:2]

    difference = tampered(timed, drop_step).difference
    assert difference is not None
    assert (difference.field, difference.recorded) == ("plan", "nothing")
    assert difference.replayed.startswith("step 1: ")


def test_a_step_less_than_recorded_is_found(timed: Path) -> None:
    difference = tampered(timed, lambda lines: lines.append([[1, 1, 1], *lines[-1][1:]])).difference
    assert difference is not None
    assert difference.replayed == "nothing"


def test_what_cannot_have_been_is_the_file_s_fault(timed: Path) -> None:
    def twice(lines: Lines) -> None:
        line = next(line for line in lines if line[1])
        line[1] += line[1]
        line[0] += [0] * len(line[1])

    with pytest.raises(RecordingError, match=r"line \d+: inconsistent recording: request id '\w+' is in use"):
        tampered(timed, twice)


def test_a_setting_that_is_not_allowed_is_named(timed: Path) -> None:
    copy = timed.with_suffix(".settings")
    copy.write_bytes(timed.read_bytes().replace(b'"time=30"', b'"time=soon"', 1))
    with pytest.raises(RecordingError, match="line 1: settings: chunking is 'time=soon'; it has to be"):
        replay(Recording(copy))


def test_settings_that_contradict_each_other_are_named(timed: Path) -> None:
    copy = timed.with_suffix(".contradiction")
    wide = re.sub(rb'"max_num_batched_tokens":\d+', b'"max_num_batched_tokens":9', timed.read_bytes(), count=1)
    copy.write_bytes(wide)
    with pytest.raises(RecordingError, match="settings in line 1: max_num_batched_tokens is 9; it has to be"):
        replay(Recording(copy))


class TestCommand:
    def test_summary(self, timed: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["replay", str(timed)]) == 0
        shown, said = capsys.readouterr()
        replayed = replays(timed)
        assert said == ""
        assert shown.endswith(f"identical plans, byte for byte: {replayed.same} of {replayed.same}\n")
        assert "recorded by twostep " in shown
        assert "model checked; machine none" in shown
        assert "chunking time=30" in shown
        assert f"{replayed.output_tokens} of output" in shown
        assert re.search(r"step time +prediction error \d+\.\d% \(p50\), \d+\.\d% \(p90\) of the measured time", shown)

    def test_plans(self, timed: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["replay", str(timed), "--plans"]) == 0
        shown = capsys.readouterr().out.splitlines()
        plans = [line for line in shown if re.match(r"step \d+: ", line)]
        assert len(plans) == replays(timed).steps
        assert all(re.search(r", took \d+\.\d ms$", line) for line in plans)

    def test_a_difference_ends_with_one(self, timed: Path, capsys: pytest.CaptureFixture[str]) -> None:
        def crowd(lines: Lines) -> None:
            steps(lines)[0][4][2] = 99

        copy = tampered_copy(timed, crowd)
        assert main(["replay", str(copy)]) == 1
        shown, said = capsys.readouterr()
        assert re.search(r"identical plans, byte for byte: 0 of \d+\n$", shown)
        assert re.fullmatch(rf"twostep: {copy}, line \d+: step 1, decoding: recorded 99; replayed 0\n", said)

    def test_a_line_cut_off_is_told(self, timed: Path, capsys: pytest.CaptureFixture[str]) -> None:
        copy = timed.with_suffix(".torn")
        copy.write_bytes(timed.read_bytes()[:-5])
        assert main(["replay", str(copy)]) == 0
        assert re.search(r"cut off +line \d+, the last, is incomplete and was skipped", capsys.readouterr().out)

    def test_no_file(self, tmp_path: Path) -> None:
        code = "import sys; from twostep.cli.main import main; sys.exit(main())"
        command = [sys.executable, "-c", code, "replay", str(tmp_path / "none")]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        complaint = f"twostep: No such file or directory: {tmp_path / 'none'}\n"
        assert (ended.returncode, ended.stdout, ended.stderr) == (1, "", complaint)

    def test_another_file(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "other").write_bytes(b"GGUF")
        assert main(["replay", str(tmp_path / "other")]) == 1
        assert capsys.readouterr() == ("", f"twostep: {tmp_path / 'other'}, line 1: not a recording of Twostep\n")


def test_a_recording_from_a_pipe(runs: dict[int, Path]) -> None:
    command = [Path(sys.executable).parent / "twostep", "replay", "-"]
    with runs[0].open("rb") as file:
        content = file.read()
    shown = subprocess.run(command, input=content, capture_output=True, check=True).stdout.decode()
    assert re.search(r"byte for byte: ([1-9]\d*) of \1$", shown, re.MULTILINE)
