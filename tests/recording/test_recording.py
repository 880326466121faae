"""Recordings: the format is exact and checked, the file survives a kill, damage is named, nothing private is in it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.recorded_run import ABOUT, TOKENS, Host, Workload, record, recorded_loop, replays

from twostep.background import BackgroundWriter
from twostep.config.configs import SchedulerSettings
from twostep.core.blocks import HASH_BYTES
from twostep.core.cost import StepShape
from twostep.core.loop import Abort, Command
from twostep.core.plan import Admission, Chunk, NotAdmitted, Plan, Preemption, SliceOutcome, StepResult
from twostep.core.promise import Promise
from twostep.core.reasons import Reason, Why
from twostep.core.request import FinishReason, Request
from twostep.core.scheduler import Scheduler
from twostep.errors import RecordingError
from twostep.perf.linear import LinearCostModel
from twostep.recording.codec import (
    decode_command,
    decode_plan,
    decode_result,
    encode_command,
    encode_plan,
    encode_result,
    to_bytes,
)
from twostep.recording.header import Header, encode_header
from twostep.recording.plan_words import plan_words
from twostep.recording.reader import Recording
from twostep.recording.writer import Recorder

SETTINGS = SchedulerSettings(blocks=(40, 20), windows=(None, 64), chunking="tokens=100")

counts = st.integers(0, 2**60)
some = st.integers(1, 2**40)
hashes = st.lists(st.binary(min_size=HASH_BYTES, max_size=HASH_BYTES), max_size=4).map(tuple)


@st.composite
def reasons(draw: st.DrawFn) -> Reason:
    why = draw(st.sampled_from(Why))
    places = why.value.count("{")
    return Reason(why, tuple(draw(st.lists(counts, min_size=places, max_size=places))))


requests = st.builds(Request, st.text(), some, some, hashes, st.integers(), some, counts, st.lists(counts).map(tuple))
aborts = st.builds(Abort, st.text(), st.none() | counts)
outcomes = st.builds(SliceOutcome, some, st.none() | st.sampled_from(FinishReason), counts)
results = st.builds(
    StepResult,
    counts,
    st.dictionaries(some, outcomes),
    st.dictionaries(some, hashes),
    failed=st.booleans(),
    starved_ns=counts,
)
chunks = st.builds(Chunk, some, counts, some, st.booleans(), reasons(), counts, st.lists(some).map(tuple))
plans = st.builds(
    Plan,
    some,
    counts,
    counts,
    counts,
    st.lists(st.builds(Preemption, some, counts, reasons())).map(tuple),
    st.lists(st.builds(Admission, some, counts, counts, counts)).map(tuple),
    st.lists(chunks).map(tuple),
    st.lists(st.builds(NotAdmitted, some, reasons())).map(tuple),
    st.builds(StepShape, *[counts] * 7),
    st.none() | counts,
    st.none() | st.builds(Promise, counts, counts, counts),
)


def through_json(value: object) -> object:
    line = to_bytes(value)
    assert b"\n" not in line
    back: object = json.loads(line)
    assert to_bytes(back) == line
    return back


class TestFormat:
    @settings(deadline=None)
    @given(requests | aborts)
    def test_commands_come_back(self, command: Command) -> None:
        assert decode_command(through_json(encode_command(command))) == command

    @settings(deadline=None)
    @given(results)
    def test_results_come_back_in_order(self, result: StepResult) -> None:
        back = decode_result(through_json(encode_result(result)))
        assert back == result
        assert [*back.outcomes] == [*result.outcomes]
        assert [*back.hashes] == [*result.hashes]

    @settings(deadline=None)
    @given(plans)
    def test_plans_come_back(self, plan: Plan) -> None:
        assert decode_plan(through_json(encode_plan(plan))) == plan

    @settings(deadline=None)
    @given(plans)
    def test_a_plan_has_words_in_one_line(self, plan: Plan) -> None:
        assert plan_words(plan).startswith(f"step {plan.step}: ")
        assert "\n" not in plan_words(plan)

    def test_a_plan_in_words(self) -> None:
        chunk = Chunk(9, 32, 48, False, Reason(Why.TOKEN_BUDGET, (64,)))
        waiting = NotAdmitted(10, Reason(Why.NO_SLOT, (8,)))
        admitted = Admission(9, 2, 0, 90)
        plan = Plan(7, 0, 3, admissions=(admitted,), chunks=(chunk,), not_admitted=(waiting,), predicted_ns=38_900_000)
        assert plan_words(plan) == (
            "step 7: 3 decode; 9 is admitted with 90 tokens, 2 blocks of them cached; "
            "9 computes 48 from 32 (token budget of 64 a step); 10 must wait (all 8 slots are taken); "
            "predicted 38.9 ms"
        )

    def test_a_promise_in_words(self) -> None:
        kept = Plan(8, 0, 3, predicted_ns=30_000_000, promise=Promise(40_000_000, 500_000, 9_000_000))
        broken = replace(kept, predicted_ns=39_600_000)
        assert plan_words(kept) == "step 8: 3 decode; predicted 30.0 ms + 0.5 outside the kernels, budget 40.0 ms"
        assert plan_words(broken).endswith("predicted 39.6 ms + 0.5 outside the kernels, budget 40.0 ms, over budget")

    def test_a_hash_of_another_length_is_not_written(self) -> None:
        with pytest.raises(ValueError, match="16 bytes"):
            encode_command(Request("a", 20, 1, (b"short",)))


def no_file(path: Path) -> Path:
    return path / "run"


def written(path: Path, lines: Iterable[object] = ()) -> Path:
    """A recording with these values as its lines after the header."""
    file = no_file(path)
    Recorder(file, SETTINGS, ABOUT).close()
    with file.open("ab") as more:
        more.writelines(to_bytes(line) + b"\n" for line in lines)
    return file


def test_the_header_comes_back(tmp_path: Path) -> None:
    header = Recording(written(tmp_path)).header
    assert (header.settings, header.about) == (SETTINGS, ABOUT)


def test_a_recording_never_takes_the_place_of_a_file(tmp_path: Path) -> None:
    no_file(tmp_path).write_text("precious")
    with pytest.raises(RecordingError, match="exists"):
        Recorder(no_file(tmp_path), SETTINGS, ABOUT)
    assert no_file(tmp_path).read_text() == "precious"


def test_on_a_full_disk_the_recording_ends_with_one_error(tmp_path: Path) -> None:
    with Path("/dev/full").open("wb", buffering=0) as full:
        recorder = stuck(tmp_path, BackgroundWriter(full.fileno()))
    errors = raised(recorder, 5)
    assert errors == [f"{no_file(tmp_path)}: No space left on device; the recording ends here"]


def test_on_a_stuck_disk_the_recording_ends_with_one_error(tmp_path: Path) -> None:
    """Nothing waits for it, the end neither."""
    read, write = os.pipe()
    recorder = stuck(tmp_path, BackgroundWriter(write, 10_000))
    begun_s = time.monotonic()
    errors = raised(recorder, 20_000)
    assert errors == [f"{no_file(tmp_path)}: the disk is too slow; the recording ends here"]
    assert time.monotonic() - begun_s < 30
    os.close(read)
    os.close(write)


def test_what_a_stuck_disk_did_not_get_is_told_at_the_end(tmp_path: Path) -> None:
    read, write = os.pipe()
    recorder = stuck(tmp_path, BackgroundWriter(write, 1 << 20))
    for _ in range(20_000):
        recorder.turn((1,), ())
    with pytest.raises(RecordingError, match="the disk is too slow; the recording ends here"):
        recorder.close()
    os.close(read)
    os.close(write)


def stuck(folder: Path, writer: BackgroundWriter) -> Recorder:
    """Goes on with this writer."""
    recorder = Recorder(no_file(folder), SETTINGS, ABOUT)
    recorder._writer.close()
    recorder._writer = writer
    return recorder


def raised(recorder: Recorder, turns: int) -> list[str]:
    """Messages of the errors of so many turns and of closing."""
    errors = []
    for what in (*[lambda: recorder.turn((1,), ())] * turns, recorder.close):
        try:
            what()
        except RecordingError as error:
            errors.append(str(error))
    return errors


STEP = [[5], [], [], [1, [], [], 0, 0], [1, 0, 1, 0, [], [], [], [], [1, 0, 0, 1, 1, 0, 1], None, None]]
REQUEST = ["+", "a", 20, 4, "", 0, 1, 0]


def changed(place: list[int], value: object) -> object:
    """`STEP` with another value at a place."""
    step = json.loads(json.dumps(STEP))
    *way, last = place
    inner = step
    for index in way:
        inner = inner[index]
    inner[last] = value
    return step


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (7, "turn is 7, not a list of 2 or 5"),
        ([[1], [], []], "turn is [[1], [], []], not a list of 2 or 5"),
        ([[], []], "times is [], not a list with at least one time"),
        ([[-1], []], "times is -1, not a whole number from 0"),
        ([[1], [["?", "a"]]], "command is ['?', 'a'], not a request [\"+\", ...] or an abort [\"-\", id, choice]"),
        ([[1], [["-", 7, None]]], "abort: id is 7, not a string"),
        ([[1], [[*REQUEST, 0, 0]]], "request is ['a', 20, 4, '', 0, 1, ...], not a list of 7"),
        ([[1], [[*REQUEST, 0]]], "request: given is 0, not a list"),
        ([[1], [[*REQUEST, [-1]]]], "request: given is -1, not a whole number from 0"),
        ([[1], [["+", "a", True, 4, "", 0, 1, 0]]], "request: prompt tokens is True, not a whole number from 1"),
        ([[1], [["+", "a", 20, 4, "AAAA", 0, 1, 0]]], "request: hashes is 'AAAA', not base64 of hashes of 16 bytes"),
        ([[1], [["+", "a", 20, 4, "?", 0, 1, 0]]], "request: hashes is '?', not base64"),
        (changed([3, 0], 1.5), "result: ns is 1.5, not a whole number from 0"),
        (changed([3, 1], [[1, 1, "bored", 0]]), "outcome: finished is 'bored', not stop, length, abort, error"),
        (changed([3, 1], [[1, 0, None, 0]]), "outcome: tokens is 0, not a whole number from 1"),
        (changed([3, 3], 2), "result: failed is 2, not 0 or 1"),
        (changed([3, 4], -1), "result: starved ns is -1, not a whole number from 0"),
        (changed([4], []), "plan is [], not a list of 11"),
        (changed([4, 8], [1, 1]), "plan: shape is [1, 1], not a list of 7"),
        (changed([4, 10], [1]), "plan: promise is [1], not a list of 3"),
        (changed([4, 6], [[1, 0, 5, 1, ["WHOLE", 3], 0, []]]), "reason WHOLE is [3], not a list of 0"),
    ],
)
def test_what_is_wrong_in_a_line_is_named(tmp_path: Path, line: object, complaint: str) -> None:
    file = written(tmp_path, [STEP, line])
    with pytest.raises(RecordingError) as caught:
        list(Recording(file).turns())
    assert str(caught.value) == f"{file}, line 3: {complaint}"


def test_an_unknown_reason_is_named(tmp_path: Path) -> None:
    file = written(tmp_path, [changed([4, 7], [[1, ["BOREDOM"]]])])
    with pytest.raises(RecordingError, match=r"line 2: reason is \['BOREDOM'\], not one of WHOLE, TOKEN_BUDGET"):
        list(Recording(file).turns())


def test_a_line_that_is_not_json_is_named(tmp_path: Path) -> None:
    file = written(tmp_path)
    with file.open("ab") as more:
        more.write(b"[[1],[]\n")
    with pytest.raises(RecordingError, match="line 2: not JSON: "):
        list(Recording(file).turns())


@pytest.mark.parametrize("content", [b"", b"GGUF\0\1\2", b"{}\n", b"[]\n", b'{"model": 1}\n'])
def test_another_file_is_none(tmp_path: Path, content: bytes) -> None:
    no_file(tmp_path).write_bytes(content)
    with pytest.raises(RecordingError, match="line 1: not a recording of Twostep"):
        Recording(no_file(tmp_path))


def header(**changes: object) -> dict[str, object]:
    encoded = encode_header(Header(SchedulerSettings(blocks=(4,)), "0", {}))
    settings = {**cast(dict[str, object], encoded["settings"]), **changes}
    return {**encoded, "settings": settings}


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (
            {"twostep recording": 1},
            "format 1; this version of Twostep reads format 4: replay it with the version that wrote it, or record "
            "again",
        ),
        (
            {**header(), "twostep recording": 2},
            "format 2, written by Twostep 0; this version of Twostep reads format 4: replay it with the version that "
            "wrote it, or record again",
        ),
        (header(colour="red"), "settings: colour is unknown"),
        (header(max_num_seqs=True), "settings: max_num_seqs is True; it has to be an integer from 1"),
        (
            header(max_num_batched_tokens=None),
            "settings: max_num_batched_tokens is None; a recording has a value for each setting",
        ),
        (
            header(chunking="time=0"),
            "settings: chunking is 'time=0'; it has to be none, tokens=N, time=MILLISECONDS or time=auto",
        ),
        (header(blocks=[0]), "settings: blocks is 0, not a whole number from 1"),
        (header(blocks=[None]), "settings: blocks is None, not a whole number from 1"),
        ({**header(), "about": {"model": 7}}, "about: model is 7, not a string"),
    ],
)
def test_what_is_wrong_in_the_header_is_named(tmp_path: Path, value: object, complaint: str) -> None:
    no_file(tmp_path).write_bytes(to_bytes(value) + b"\n")
    with pytest.raises(RecordingError) as caught:
        Recording(no_file(tmp_path))
    assert str(caught.value) == f"{no_file(tmp_path)}, line 1: {complaint}"


def test_a_missing_setting_is_named(tmp_path: Path) -> None:
    value = header()
    value["settings"] = {"blocks": [4]}
    no_file(tmp_path).write_bytes(to_bytes(value) + b"\n")
    with pytest.raises(RecordingError, match="settings: admission is missing"):
        Recording(no_file(tmp_path))


def test_a_last_line_cut_off_anywhere_is_left_out_and_told(tmp_path: Path) -> None:
    file = written(tmp_path, [STEP, STEP])
    whole = file.read_bytes()
    last = len(to_bytes(STEP)) + 1
    for missing in range(1, last):
        file.write_bytes(whole[:-missing])
        recording = Recording(file)
        assert [turn.line for turn in recording.turns()] == [2]
        assert recording.torn_line == 3
    file.write_bytes(whole[:-last])
    recording = Recording(file)
    assert [turn.line for turn in recording.turns()] == [2]
    assert recording.torn_line is None


def test_a_header_cut_off_is_told(tmp_path: Path) -> None:
    file = written(tmp_path)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(RecordingError, match="incomplete first line"):
        Recording(file)


def test_a_killed_process_leaves_a_readable_file(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys, time\nfrom pathlib import Path\nfrom support.recorded_run import Workload, record\n"
        "turns = []\n"
        "def die():\n    turns.append(1)\n    if len(turns) < 20: return\n"
        "    while Path(sys.argv[1]).read_bytes().count(b'\\n') < 10: time.sleep(0.01)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "record(Path(sys.argv[1]), Workload(34), die)\n"
    )
    path = {"PYTHONPATH": ":".join(sys.path)}
    ended = subprocess.run([sys.executable, "-c", code, no_file(tmp_path)], env=path, timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL
    replayed = replays(no_file(tmp_path))
    assert replayed.ended_ns > 0
    assert 10 <= replayed.steps <= 20


def test_no_token_and_no_text_is_in_the_file(tmp_path: Path) -> None:
    """The ids of these prompts are larger than every count and every time but the first."""
    workload = Workload(4)
    record(no_file(tmp_path), workload)
    numbers = {int(digits) for digits in re.findall(rb"\d+", no_file(tmp_path).read_bytes())}
    assert len(numbers) > 100
    assert all(tokens for tokens in workload.prompts.values())
    assert not any(number in TOKENS for number in numbers)


class Interrupted(Host):
    """Somebody presses Ctrl-C at random moments."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self.interrupted = 0

    def catch_up(self) -> None:
        self._maybe()

    def receive(self) -> Iterable[Command]:
        yield from super().receive()
        self._maybe()

    def _maybe(self) -> None:
        if self._workload.rng.random() < 0.1:
            self.interrupted += 1
            raise KeyboardInterrupt


@pytest.mark.parametrize("seed", range(8))
def test_a_turn_taken_up_again_is_recorded_as_if_undisturbed(tmp_path: Path, seed: int) -> None:
    workload = Workload(seed, step_failures=0)
    scheduler, host = Scheduler(workload.settings.config(), LinearCostModel()), Interrupted(workload)
    with Recorder(no_file(tmp_path), workload.settings, ABOUT) as recorder:
        loop = recorded_loop(scheduler, workload.executor, host, recorder)
        while not scheduler.idle or workload.commands:
            with suppress(KeyboardInterrupt):
                loop.turn()
    assert host.interrupted > 0
    assert replays(no_file(tmp_path)).counters == scheduler.counters


def test_turns_without_anything_leave_no_trace(tmp_path: Path) -> None:
    workload = Workload(0)
    workload.commands.clear()
    with Recorder(no_file(tmp_path), workload.settings, ABOUT) as recorder:
        scheduler = Scheduler(workload.settings.config(), LinearCostModel())
        loop = recorded_loop(scheduler, workload.executor, Host(workload), recorder)
        for _ in range(5):
            assert not loop.turn()
    assert list(Recording(no_file(tmp_path)).turns()) == []
