"""Recorded runs for tests: random workloads through the loop and the checked executor, and what a replay must show."""

from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random

from support.checked_executor import CheckedExecutor

from twostep.config.configs import SchedulerSettings
from twostep.core.blocks import prompt_hashes, root_hash
from twostep.core.loop import Abort, Command, EngineLoop, StepExecutor
from twostep.core.plan import Finished, Resolved, Step, StepResult
from twostep.core.request import Request
from twostep.core.scheduler import Scheduler
from twostep.perf.linear import LinearCostModel
from twostep.recording.reader import Recording
from twostep.recording.writer import RecordedSurroundings, Recorder
from twostep.sim.recorded import Replay, replay

TOKENS = range(10**9, 2**31)
"""Ids that no count and no time in a recording comes near, but for the first time."""
ABOUT = {"model": "checked", "machine": "none"}


def replays(path: Path) -> Replay:
    """Replays a recording of any executor, asserts that every plan is the same; returns what was seen."""
    replayed = replay(Recording(path))
    assert replayed.difference is None, replayed.difference.words()
    assert replayed.same == replayed.steps > 0
    return replayed


class Workload:
    """Requests and aborts drawn from a seed, with the settings that they run under."""

    def __init__(self, seed: int, *, step_failures: float = 0.02) -> None:
        self.rng = rng = Random(seed)
        self.settings = _settings(rng)
        self.prompts: dict[str, list[int]] = {}
        self.queued: dict[int, int] = {}
        """Prompt tokens of each sequence that was queued."""
        self.step_failures = step_failures
        self.commands: list[Command] = []
        self._shared = [rng.choice(TOKENS) for _ in range(400)]
        caching = rng.random() < 0.7
        for i in range(rng.randrange(4, 24)):
            self.commands.append(self._request(f"r{i}", caching))
            if rng.random() < 0.2:
                self.commands.append(Abort(f"r{i}", rng.choice([None, 0, 1])))
        rng.shuffle(self.commands)
        drafting = rng.random() < 0.4
        self.executor = CheckedExecutor(
            self.settings.config().groups,
            hashing=caching,
            drafts=(lambda number, known: number * known % 4) if drafting else (lambda number, known: 0),
        )

    def _request(self, name: str, caching: bool) -> Request:
        rng = self.rng
        tokens = rng.choice([1, 5, 16, 17, 33, 100, 300])
        shared = rng.choice([0, rng.randrange(tokens + 1)])
        prompt = self._shared[:shared] + [rng.choice(TOKENS) for _ in range(tokens - shared)]
        self.prompts[name] = prompt
        return Request(
            name,
            tokens,
            rng.choice([1, 2, 15, 40, 100]),
            prompt_hashes(root_hash("checked", "test"), prompt) if caching else (),
            priority=rng.choice([0, 0, -1, 1]),
            choices=rng.choice([1, 1, 1, 3]),
            arrived_tokens=rng.choice([0, 0, 0, tokens // 2]),
        )


def _settings(rng: Random) -> SchedulerSettings:
    windows = rng.choice([(None,), (None,), (None, 40), (None, 16)])
    admission = rng.choice(["fcfs", "priority", "shortest-prefill"])
    return SchedulerSettings(
        blocks=tuple(rng.choice([26, 30, 40, 100]) for _ in windows),
        windows=windows,
        max_num_seqs=rng.choice([1, 3, 8, 16]),
        max_num_batched_tokens=rng.choice([288, 700]),
        max_model_len=600,
        batching=rng.choice(["continuous", "continuous", "static=3"]),
        chunking=rng.choice(["tokens=16", "tokens=100", "time=5", "time=30", "time=80.5", "none"]),
        admission=admission,
        priority_preempts=admission != "fcfs" and rng.random() < 0.4,
    )


class Host:
    """Clock, inbox and observer that say the workload's commands at random moments, on a clock that steps move."""

    def __init__(self, workload: Workload) -> None:
        self._workload, self._now_ns = workload, 5 * 10**15

    def now(self) -> int:
        self._now_ns += 1000
        return self._now_ns

    def receive(self) -> Iterable[Command]:
        commands, rng = self._workload.commands, self._workload.rng
        while commands and rng.random() < 0.3:
            yield commands.pop()

    def added(self, request: Request, numbers: tuple[int, ...], now: int) -> None:
        for choice, number in enumerate(numbers):
            self._workload.queued[number] = request.prompt_tokens
            self._workload.executor.add(number, self._workload.prompts[request.id], choice, request.hashes)

    def refused(self, request: Request, why: str, now: int) -> None:
        pass

    def began(self, step: Step, now: int) -> None:
        pass

    def ended(self, step: Step, result: StepResult, resolved: Resolved, now: int) -> None:
        self._now_ns += result.step_ns

    def aborted(self, finished: tuple[Finished, ...], now: int) -> None:
        pass

    def catch_up(self) -> None:
        pass


def recorded_loop(scheduler: Scheduler, executor: StepExecutor, host: Host, recorder: Recorder) -> EngineLoop:
    around = RecordedSurroundings(host, host, host, recorder)
    return EngineLoop(scheduler, executor, clock=around, inbox=around, observer=around)


def record(path: Path, workload: Workload, after_turn: Callable[[], None] = lambda: None) -> Scheduler:
    """Runs the workload to its end; some steps fail, some of them blame a sequence."""
    scheduler, executor = Scheduler(workload.settings.config(), LinearCostModel()), workload.executor
    with Recorder(path, workload.settings, ABOUT) as recorder:
        loop = recorded_loop(scheduler, executor, Host(workload), recorder)
        while loop.turn() or workload.commands:
            after_turn()
            executor.fail_step = workload.rng.random() < workload.step_failures
            executor.failing = {number for number in scheduler.live if workload.rng.random() < 0.1}
    assert scheduler.idle
    return scheduler
