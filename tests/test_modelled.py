"""Rehearsals: a little run checked by hand, answers that end where the workload says, the same bytes each time."""

from pathlib import Path
from random import Random

from support.recorded_run import ABOUT, replays

from twostep.core.loop import Abort, EngineLoop
from twostep.core.request import FinishReason, Request
from twostep.core.scheduler import Scheduler
from twostep.core.step_time import StepShape
from twostep.recording.writer import RecordedSurroundings, Recorder
from twostep.settings import Settings
from twostep.sim.modelled import Arrival, ModelledExecutor, Timeline, VirtualClock, VirtualSurroundings, rehearse

MS = 1_000_000


class OneMsAToken:
    def predict_ns(self, shape: StepShape) -> int:
        return shape.tokens * MS


def rehearsed(settings: Settings, arrivals: list[Arrival], path: Path) -> dict[tuple[str, int], Timeline]:
    """What happened to each choice of each request."""
    clock = VirtualClock()
    executor = ModelledExecutor(OneMsAToken(), clock)
    around = VirtualSurroundings(arrivals, executor, clock)
    with Recorder(path, settings, ABOUT) as recorder:
        scheduler = Scheduler(settings.config())
        rehearse(EngineLoop(scheduler, executor, RecordedSurroundings(around, recorder)), around)
    assert scheduler.idle
    return {(timeline.request_id, timeline.choice): timeline for timeline in around.timelines}


SETTINGS = Settings(blocks=(100,), seats=4, step_tokens=512, chunking="tokens=33")


def test_a_little_run_by_hand(tmp_path: Path) -> None:
    """a: 20 tokens at 10 ms, stops with its third; b: 40 tokens at 15 ms, two at most. 33 tokens a step, 1 ms each.

    10..30 ms: a's prompt and first token. 30..63: a's second, 32 tokens of b's prompt. 63..72: a's third, the other 8
    of b's prompt and its first token. 72..73: b's second.
    """
    arrivals = [Arrival(15 * MS, Request("b", 40, 2)), Arrival(10 * MS, Request("a", 20, 9), (3,))]
    done = rehearsed(SETTINGS, arrivals, tmp_path / "run")
    assert done["a", 0] == Timeline(
        "a", 0, 10 * MS, [(10 * MS, 20)], [30 * MS, 63 * MS, 72 * MS], [], 72 * MS, FinishReason.STOP
    )
    assert done["b", 0] == Timeline(
        "b", 0, 15 * MS, [(30 * MS, 32), (63 * MS, 8)], [72 * MS, 73 * MS], [], 73 * MS, FinishReason.LENGTH
    )


def test_the_clock_goes_on_to_the_next_arrival(tmp_path: Path) -> None:
    arrivals = [Arrival(0, Request("a", 4, 1)), Arrival(1000 * MS, Request("b", 4, 1))]
    done = rehearsed(SETTINGS, arrivals, tmp_path / "run")
    assert (done["a", 0].finish_ns, done["b", 0].finish_ns) == (4 * MS, 1004 * MS)


def test_each_choice_has_its_own_length(tmp_path: Path) -> None:
    arrivals = [Arrival(0, Request("a", 20, 5, choices=3), (1, 4))]
    done = rehearsed(SETTINGS, arrivals, tmp_path / "run")
    assert [len(timeline.token_ns) for timeline in done.values()] == [1, 4, 5]
    reasons = [timeline.reason for timeline in done.values()]
    assert reasons == [FinishReason.STOP, FinishReason.STOP, FinishReason.LENGTH]


def test_an_abort_ends_at_its_time(tmp_path: Path) -> None:
    """The step from 24 to 25 ms is the last that a's token comes from; heard at 25, it has six."""
    arrivals = [Arrival(0, Request("a", 20, 50)), Arrival(24 * MS + 1, Abort("a"))]
    timeline = rehearsed(SETTINGS, arrivals, tmp_path / "run")["a", 0]
    assert timeline.token_ns == [ms * MS for ms in range(20, 26)]
    assert (timeline.finish_ns, timeline.reason) == (25 * MS, FinishReason.ABORTED)


def test_what_never_fits_is_refused(tmp_path: Path) -> None:
    timeline = rehearsed(SETTINGS, [Arrival(3 * MS, Request("a", 10_000, 1))], tmp_path / "run")["a", 0]
    assert (timeline.arrival_ns, timeline.finish_ns, timeline.token_ns) == (3 * MS, 3 * MS, [])
    assert "the context has 8192" in str(timeline.reason)


def test_preemptions_are_noted_and_no_token_comes_twice(tmp_path: Path) -> None:
    tight = Settings(blocks=(12,), seats=4, step_tokens=512, chunking="tokens=64")
    arrivals = [Arrival(i, Request(str(i), 30, 70), (60 + i,)) for i in range(4)]
    done = rehearsed(tight, arrivals, tmp_path / "run")
    assert sum(len(timeline.preempted_ns) for timeline in done.values()) > 0
    assert [len(timeline.token_ns) for timeline in done.values()] == [60, 61, 62, 63]
    assert all(timeline.token_ns == sorted(set(timeline.token_ns)) for timeline in done.values())


def random_arrivals(seed: int) -> list[Arrival]:
    rng = Random(seed)
    at = [rng.randrange(3000 * MS) for _ in range(60)]
    requests = [Request(str(i), rng.randrange(1, 200), 50, priority=rng.randrange(3)) for i in range(60)]
    arrivals = [Arrival(ns, request, (rng.randrange(1, 60),)) for ns, request in zip(at, requests, strict=True)]
    return [*arrivals, *(Arrival(at[i] + rng.randrange(200 * MS), Abort(str(i))) for i in range(0, 60, 7))]


def test_the_same_seed_gives_the_same_bytes_and_replays(tmp_path: Path) -> None:
    settings = Settings(blocks=(40,), seats=8, step_tokens=512, chunking="time=40")
    files = [tmp_path / name for name in ("first", "again", "other")]
    for file, seed in zip(files, (1, 1, 2), strict=True):
        rehearsed(settings, random_arrivals(seed), file)
    first, again, other = (file.read_bytes() for file in files)
    assert first == again != other
    assert replays(files[0]).counters.preemptions > 0
