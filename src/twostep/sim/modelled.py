"""A run that has not been: steps take the time that a model of them says, answers end where a workload says."""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from twostep.core.loop import Abort, Command, EngineLoop
from twostep.core.plan import Finished, Outcome, Resolved, Step, StepResult
from twostep.core.request import FinishReason, Request
from twostep.core.step_time import StepShape


class PredictsSteps(Protocol):
    def predict_ns(self, shape: StepShape) -> int:
        """Time that such a step takes, at least 1."""
        ...


@dataclass
class VirtualClock:
    """Stands still but for who moves it."""

    now_ns: int = 0


class ModelledExecutor:
    """Computes nothing. It knows where answers end, which the scheduler does not; output blocks are not kept."""

    def __init__(self, model: PredictsSteps, clock: VirtualClock) -> None:
        self._model, self._clock = model, clock
        self._lengths: dict[int, int] = {}
        self._tokens: Counter[int] = Counter()
        self._standing: dict[int, None] = {}
        self._step_ns = 0
        self.sampled: tuple[int, ...] = ()
        """The sequences that got a token in the last step."""

    def expect(self, number: int, output_tokens: int) -> None:
        """Sequence `number` stops with its `output_tokens`-th token; those never announced go on to their limit."""
        self._lengths[number] = output_tokens

    def forget(self, number: int) -> None:
        """It has ended."""
        self._lengths.pop(number, None)
        del self._tokens[number]

    def start(self, step: Step) -> None:
        for number in step.left:
            del self._standing[number]
        self._standing.update(dict.fromkeys(number for number, _ in step.joined))
        sampling = (chunk for chunk in step.plan.chunks if chunk.samples)
        self.sampled = (*self._standing, *(n for chunk in sampling for n in (chunk.number, *chunk.forks)))
        self._tokens.update(self.sampled)
        self._step_ns = self._model.predict_ns(step.plan.shape)

    def finish(self) -> StepResult:
        """The clock moves to the end of the step."""
        self._clock.now_ns += self._step_ns
        stop = Outcome(finished=FinishReason.STOP)
        ended = (number for number in self.sampled if self._tokens[number] == self._lengths.get(number))
        return StepResult(self._step_ns, dict.fromkeys(ended, stop))


class Arrival(NamedTuple):
    """Something asked at a time. Of a request, `output_tokens` says how long each choice's answer is by itself; where
    there is none, or more than `max_tokens`, the answer ends at its limit."""

    at_ns: int
    command: Command
    output_tokens: Sequence[int] = ()


@dataclass
class Timeline:
    """When things happened to one choice of a request, in ns of the virtual clock."""

    request_id: str
    choice: int
    arrival_ns: int
    chunks: list[tuple[int, int]] = field(default_factory=list)
    """Time and tokens of each slice of its prompt, or of what a preemption lost; the time is the step's begin."""
    token_ns: list[int] = field(default_factory=list)
    preempted_ns: list[int] = field(default_factory=list)
    finish_ns: int | None = None
    reason: FinishReason | str | None = None
    """Text: why it was refused."""


class VirtualSurroundings:
    """Tells the loop each arrival when the clock is there; keeps what happened to each."""

    def __init__(self, arrivals: Iterable[Arrival], executor: ModelledExecutor, clock: VirtualClock) -> None:
        self._ahead = deque(sorted(arrivals, key=lambda arrival: arrival.at_ns))
        self._executor, self._clock = executor, clock
        self._asked: dict[str, Arrival] = {}
        self._live: dict[int, Timeline] = {}
        self.timelines: list[Timeline] = []
        """One a choice, in the order in which they were queued; one of a refused request."""

    def wait(self) -> bool:
        """Moves the clock to the next arrival. False if there is none."""
        if self._ahead:
            self._clock.now_ns = max(self._clock.now_ns, self._ahead[0].at_ns)
        return bool(self._ahead)

    def now(self) -> int:
        return self._clock.now_ns

    def hear(self) -> Iterable[Command]:
        while self._ahead and self._ahead[0].at_ns <= self._clock.now_ns:
            arrival = self._ahead.popleft()
            if not isinstance(arrival.command, Abort):
                self._asked[arrival.command.id] = arrival
            yield arrival.command

    def added(self, request: Request, numbers: tuple[int, ...], now: int) -> None:
        arrival = self._asked.pop(request.id)
        for choice, number in enumerate(numbers):
            if choice < len(arrival.output_tokens):
                self._executor.expect(number, arrival.output_tokens[choice])
            self._live[number] = Timeline(request.id, choice, arrival.at_ns)
            self.timelines.append(self._live[number])

    def refused(self, request: Request, why: str, now: int) -> None:
        arrival = self._asked.pop(request.id)
        self.timelines.append(Timeline(request.id, 0, arrival.at_ns, finish_ns=now, reason=why))

    def began(self, step: Step, now: int) -> None:
        for preemption in step.plan.preemptions:
            self._live[preemption.number].preempted_ns.append(now)
        for chunk in step.plan.chunks:
            self._live[chunk.number].chunks.append((now, chunk.tokens))

    def ended(self, step: Step, result: StepResult, resolved: Resolved, now: int) -> None:
        """Those aborted while the step ran are gone: its tokens are not theirs any more."""
        for number in self._executor.sampled:
            if timeline := self._live.get(number):
                timeline.token_ns.append(now)
        self._end(resolved.finished, now)

    def aborted(self, finished: tuple[Finished, ...], now: int) -> None:
        self._end(finished, now)

    def catch_up(self) -> None:
        pass

    def _end(self, finished: tuple[Finished, ...], now: int) -> None:
        for number, reason, _ in finished:
            timeline = self._live.pop(number)
            timeline.finish_ns, timeline.reason = now, reason
            self._executor.forget(number)


def rehearse(loop: EngineLoop, around: VirtualSurroundings) -> None:
    """Runs `loop` until nothing is left to serve and nobody is to come."""
    while loop.turn() or around.wait():
        pass
