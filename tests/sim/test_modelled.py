"""Simulated runs: a little run checked by hand, answers that end where the workload says, the same bytes each time,
and many loops on one event queue."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random

from support.recorded_run import ABOUT, replays

from twostep.config.configs import SchedulerSettings
from twostep.core.cost import Cost, StepShape, Terms
from twostep.core.loop import Abort, EngineLoop
from twostep.core.request import FinishReason, Request
from twostep.core.scheduler import Scheduler
from twostep.perf.linear import LinearCostModel
from twostep.recording.writer import RecordedSurroundings, Recorder
from twostep.sim.events import EventQueue, LoopHost
from twostep.sim.modelled import Arrival, ChoiceTimes, ModelledExecutor, SimulatedClient, VirtualClock

MS = 1_000_000


class OneMsAToken:
    def estimate(self, shape: StepShape) -> Cost:
        step_ns = shape.tokens * MS
        return Cost(step_ns, step_ns, Terms(linear=step_ns))

    def observe(self, shape: StepShape, measured_ns: int) -> None:
        pass


Done = dict[tuple[str, int], ChoiceTimes]
"""What happened to each choice of each request."""


def simulated(settings: SchedulerSettings, arrivals: list[Arrival], path: Path, host_ns: int = 0) -> Done:
    """One loop, recorded."""
    [done] = simulated_together([settings], [arrivals], [path], host_ns)
    return done


def simulated_together(
    settings: Sequence[SchedulerSettings], arrivals: Sequence[list[Arrival]], paths: Sequence[Path], host_ns: int = 0
) -> list[Done]:
    """Several loops on one event queue, each recorded."""
    queue = EventQueue(VirtualClock())
    clients, schedulers = list[SimulatedClient](), list[Scheduler]()
    with ExitStack() as stack:
        for setting, arriving, path in zip(settings, arrivals, paths, strict=True):
            recorder = stack.enter_context(Recorder(path, setting, ABOUT))
            executor = ModelledExecutor(OneMsAToken(), queue.clock, host_ns)
            clients.append(client := SimulatedClient(executor))
            schedulers.append(scheduler := Scheduler(setting.config(), LinearCostModel()))
            around = RecordedSurroundings(queue.clock, client, client, recorder)
            loop = EngineLoop(scheduler, executor, clock=around, inbox=around, observer=around)
            LoopHost(queue, loop, executor, client).expect(arriving)
        queue.run()
    assert all(scheduler.idle for scheduler in schedulers)
    return [{(times.request_id, times.choice): times for times in client.times} for client in clients]


SETTINGS = SchedulerSettings(blocks=(100,), max_num_seqs=4, max_num_batched_tokens=512, chunking="tokens=33")


def test_a_little_run_by_hand(tmp_path: Path) -> None:
    """a: 20 tokens at 10 ms, stops with its third; b: 40 tokens at 15 ms, two at most. 33 tokens a step, 1 ms each.

    10..30 ms: a's prompt and first token. 30..63: a's second, 32 tokens of b's prompt. 63..72: a's third, the other 8
    of b's prompt and its first token. 72..73: b's second.
    """
    arrivals = [Arrival(15 * MS, Request("b", 40, 2)), Arrival(10 * MS, Request("a", 20, 9), (3,))]
    done = simulated(SETTINGS, arrivals, tmp_path / "run")
    assert done["a", 0] == ChoiceTimes(
        "a", 0, 10 * MS, [(10 * MS, 20)], [30 * MS, 63 * MS, 72 * MS], [], 72 * MS, FinishReason.STOP
    )
    assert done["b", 0] == ChoiceTimes(
        "b", 0, 15 * MS, [(30 * MS, 32), (63 * MS, 8)], [72 * MS, 73 * MS], [], 73 * MS, FinishReason.LENGTH
    )


def test_the_clock_goes_on_to_the_next_arrival(tmp_path: Path) -> None:
    arrivals = [Arrival(0, Request("a", 4, 1)), Arrival(1000 * MS, Request("b", 4, 1))]
    done = simulated(SETTINGS, arrivals, tmp_path / "run")
    assert (done["a", 0].finish_ns, done["b", 0].finish_ns) == (4 * MS, 1004 * MS)


def test_each_choice_has_its_own_length(tmp_path: Path) -> None:
    arrivals = [Arrival(0, Request("a", 20, 5, choices=3), (1, 4))]
    done = simulated(SETTINGS, arrivals, tmp_path / "run")
    assert [len(times.token_ns) for times in done.values()] == [1, 4, 5]
    reasons = [times.reason for times in done.values()]
    assert reasons == [FinishReason.STOP, FinishReason.STOP, FinishReason.LENGTH]


def test_an_abort_ends_at_its_time(tmp_path: Path) -> None:
    """The step from 24 to 25 ms is the last that a's token comes from; heard at 25, it has six."""
    arrivals = [Arrival(0, Request("a", 20, 50)), Arrival(24 * MS + 1, Abort("a"))]
    times = simulated(SETTINGS, arrivals, tmp_path / "run")["a", 0]
    assert times.token_ns == [ms * MS for ms in range(20, 26)]
    assert (times.finish_ns, times.reason) == (25 * MS, FinishReason.ABORTED)


def test_what_never_fits_is_refused(tmp_path: Path) -> None:
    times = simulated(SETTINGS, [Arrival(3 * MS, Request("a", 10_000, 1))], tmp_path / "run")["a", 0]
    assert (times.arrival_ns, times.finish_ns, times.token_ns) == (3 * MS, 3 * MS, [])
    assert "the context has 8192" in str(times.reason)


def test_preemptions_are_noted_and_no_token_comes_twice(tmp_path: Path) -> None:
    tight = SchedulerSettings(blocks=(12,), max_num_seqs=4, max_num_batched_tokens=512, chunking="tokens=64")
    arrivals = [Arrival(i, Request(str(i), 30, 70), (60 + i,)) for i in range(4)]
    done = simulated(tight, arrivals, tmp_path / "run")
    assert sum(len(times.preempted_ns) for times in done.values()) > 0
    assert [len(times.token_ns) for times in done.values()] == [60, 61, 62, 63]
    assert all(times.token_ns == sorted(set(times.token_ns)) for times in done.values())


def random_arrivals(seed: int) -> list[Arrival]:
    rng = Random(seed)
    at = [rng.randrange(3000 * MS) for _ in range(60)]
    requests = [Request(str(i), rng.randrange(1, 200), 50, priority=rng.randrange(3)) for i in range(60)]
    arrivals = [Arrival(ns, request, (rng.randrange(1, 60),)) for ns, request in zip(at, requests, strict=True)]
    return [*arrivals, *(Arrival(at[i] + rng.randrange(200 * MS), Abort(str(i))) for i in range(0, 60, 7))]


def test_the_same_seed_gives_the_same_bytes_and_replays(tmp_path: Path) -> None:
    settings = SchedulerSettings(blocks=(40,), max_num_seqs=8, max_num_batched_tokens=512, chunking="time=40")
    files = [tmp_path / name for name in ("first", "again", "other")]
    for file, seed in zip(files, (1, 1, 2), strict=True):
        simulated(settings, random_arrivals(seed), file)
    first, again, other = (file.read_bytes() for file in files)
    assert first == again != other
    assert replays(files[0]).counters.preemptions > 0


# --- one event queue, many loops ----------------------------------------------------------------------------------

THREE = (
    SchedulerSettings(blocks=(40,), max_num_seqs=8, max_num_batched_tokens=512, chunking="time=40"),
    SchedulerSettings(blocks=(60,), max_num_seqs=4, max_num_batched_tokens=512, chunking="tokens=33"),
    SchedulerSettings(blocks=(80,), max_num_seqs=6, max_num_batched_tokens=512, chunking="none", batching="static=3"),
)


def test_one_event_queue_hosts_three_loops_which_run_as_each_would_alone(tmp_path: Path) -> None:
    """Their steps interleave on one virtual clock; each loop's recording is byte for byte that of its run alone, and
    replays."""
    loads = [random_arrivals(seed) for seed in (1, 2, 3)]
    together, again = ([tmp_path / f"{name}{i}" for i in range(3)] for name in ("together", "again"))
    done = simulated_together(THREE, loads, together)
    assert simulated_together(THREE, loads, again) == done
    for i, (settings, load) in enumerate(zip(THREE, loads, strict=True)):
        assert simulated(settings, load, tmp_path / f"alone{i}") == done[i]
        recorded = {path.read_bytes() for path in (together[i], again[i], tmp_path / f"alone{i}")}
        assert len(recorded) == 1
        replays(together[i])
    ends = [sorted(ns for times in one.values() for ns in times.token_ns) for one in done]
    assert all(first[0] < second[-1] for first in ends for second in ends), "they ran one after the other"


def test_events_of_one_moment_run_in_the_order_in_which_they_were_scheduled() -> None:
    queue, seen = EventQueue(VirtualClock(5)), list[tuple[int, str]]()

    def note(name: str) -> None:
        seen.append((queue.clock.now_ns, name))

    def first() -> None:
        note("first")
        queue.at(3, lambda: note("third"))

    queue.at(9, lambda: note("late"))
    queue.at(7, first)
    queue.at(7, lambda: note("second"))
    queue.run()
    assert seen == [(7, "first"), (7, "second"), (7, "third"), (9, "late")]


def test_a_static_batch_that_is_not_full_begins_when_its_patience_ends(tmp_path: Path) -> None:
    """Nothing else happens then: the plan itself says when to look again, 100 ms after the first of them arrived."""
    settings = SchedulerSettings(
        blocks=(100,), max_num_seqs=4, max_num_batched_tokens=512, chunking="tokens=33", batching="static=3"
    )
    arrivals = [Arrival(10 * MS, Request("a", 4, 1)), Arrival(50 * MS, Request("b", 4, 1))]
    done = simulated(settings, arrivals, tmp_path / "run")
    assert [times.finish_ns for times in done.values()] == [118 * MS, 118 * MS]
    replays(tmp_path / "run")


def test_what_the_host_does_between_steps_makes_each_step_longer(tmp_path: Path) -> None:
    done = simulated(SETTINGS, [Arrival(0, Request("a", 4, 3))], tmp_path / "run", host_ns=MS // 2)
    assert done["a", 0].token_ns == [4 * MS + MS // 2, 6 * MS, 7 * MS + MS // 2]
