"""Simulated runs: a cost model gives the duration of steps, the workload the length of answers."""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import NamedTuple

from twostep.core.cost import CostModel
from twostep.core.loop import Abort, Capabilities, Command
from twostep.core.plan import Finished, Resolved, SliceOutcome, Step, StepResult
from twostep.core.request import FinishReason, Request
from twostep.sim.noise import STILL, Sample


@dataclass
class VirtualClock:
    """Advances only when told to."""

    now_ns: int = 0

    def now(self) -> int:
        return self.now_ns


class ModelledExecutor:
    """Computes nothing: a step ends at `ends_ns`. Knows the length of answers, which the scheduler does not. The KV of
    output tokens is not shared."""

    capabilities = Capabilities(arrived_kv=True)

    def __init__(
        self, cost: CostModel, clock: VirtualClock, host_ns: int = 0, noise: Iterator[Sample] | None = None
    ) -> None:
        """`host_ns`: time between the kernels of two steps, as measured on a real host
        (`Measured.host_ns_per_step`). `noise`: what each step deviates by, `Noise.draws`."""
        self._cost, self._clock, self._host_ns = cost, clock, host_ns
        self._noise = repeat(STILL) if noise is None else noise
        self._lengths: dict[int, int] = {}
        self._tokens: Counter[int] = Counter()
        self._batch: dict[int, None] = {}
        self._step_ns: int | None = None
        self._starved_ns = 0
        self.ends_ns = 0
        """When the current step ends."""
        self.sampled: tuple[int, ...] = ()
        """The sequences that got a token in the last step."""

    def expect(self, number: int, output_tokens: int) -> None:
        """Makes sequence `number` stop at its `output_tokens`-th token; other sequences continue to their limit."""
        self._lengths[number] = output_tokens

    def forget(self, number: int) -> None:
        """Forgets a sequence that has ended."""
        self._lengths.pop(number, None)
        del self._tokens[number]

    def start(self, step: Step) -> None:
        for number in step.left:
            del self._batch[number]
        self._batch.update(dict.fromkeys(number for number, _ in step.joined))
        sampling = (chunk for chunk in step.plan.chunks if chunk.samples)
        self.sampled = (*self._batch, *(n for chunk in sampling for n in (chunk.number, *chunk.forks)))
        self._tokens.update(self.sampled)
        factor, starved = next(self._noise)
        self._step_ns = int(self._cost.estimate(step.plan.shape).expected_ns * factor)
        self._starved_ns = int(self._step_ns * starved)
        self.ends_ns = self._clock.now_ns + self._host_ns + self._step_ns

    def poll(self) -> StepResult | None:
        step_ns = self._step_ns
        if step_ns is None or self._clock.now_ns < self.ends_ns:
            return None
        self._step_ns = None
        stop = SliceOutcome(finished=FinishReason.STOP)
        ended = (number for number in self.sampled if self._tokens[number] == self._lengths.get(number))
        return StepResult(step_ns, dict.fromkeys(ended, stop), starved_ns=self._starved_ns)


class Arrival(NamedTuple):
    """A command at a time. `output_tokens`: natural answer length of each choice of a request; without it, or above
    `max_tokens`, the answer ends at its limit."""

    at_ns: int
    command: Command
    output_tokens: Sequence[int] = ()


@dataclass
class ChoiceTimes:
    """Times of one choice of a request, in ns of the virtual clock."""

    request_id: str
    choice: int
    arrival_ns: int
    chunks: list[tuple[int, int]] = field(default_factory=list)
    """Step start and tokens of each chunk of its prompt, or of tokens recomputed after a preemption."""
    token_ns: list[int] = field(default_factory=list)
    preempted_ns: list[int] = field(default_factory=list)
    finish_ns: int | None = None
    reason: FinishReason | str | None = None
    """A string is the reason for a refusal."""


class SimulatedClient:
    """Inbox and observer of a simulated loop: delivers arrivals and records the times of each choice."""

    def __init__(self, executor: ModelledExecutor) -> None:
        self._executor = executor
        self._inbox: deque[Arrival] = deque()
        self._submitted: dict[str, Arrival] = {}
        self._live: dict[int, ChoiceTimes] = {}
        self.times: list[ChoiceTimes] = []
        """One per choice, in the order in which they were queued; one for a refused request."""

    def submit(self, arrival: Arrival) -> None:
        """Puts the command into the inbox."""
        self._inbox.append(arrival)

    def receive(self) -> Iterable[Command]:
        while self._inbox:
            arrival = self._inbox.popleft()
            if not isinstance(arrival.command, Abort):
                self._submitted[arrival.command.id] = arrival
            yield arrival.command

    def added(self, request: Request, numbers: tuple[int, ...], now: int) -> None:
        arrival = self._submitted.pop(request.id)
        for choice, number in enumerate(numbers):
            if choice < len(arrival.output_tokens):
                self._executor.expect(number, arrival.output_tokens[choice])
            self._live[number] = ChoiceTimes(request.id, choice, arrival.at_ns)
            self.times.append(self._live[number])

    def refused(self, request: Request, why: str, now: int) -> None:
        arrival = self._submitted.pop(request.id)
        self.times.append(ChoiceTimes(request.id, 0, arrival.at_ns, finish_ns=now, reason=why))

    def began(self, step: Step, now: int) -> None:
        for preemption in step.plan.preemptions:
            self._live[preemption.number].preempted_ns.append(now)
        for chunk in step.plan.chunks:
            self._live[chunk.number].chunks.append((now, chunk.tokens))

    def ended(self, step: Step, result: StepResult, resolved: Resolved, now: int) -> None:
        """Sequences aborted while the step ran get no token from it."""
        for number in self._executor.sampled:
            if times := self._live.get(number):
                times.token_ns.append(now)
        self._end(resolved.finished, now)

    def aborted(self, finished: tuple[Finished, ...], now: int) -> None:
        self._end(finished, now)

    def catch_up(self) -> None:
        pass

    def _end(self, finished: tuple[Finished, ...], now: int) -> None:
        for number, reason, _ in finished:
            times = self._live.pop(number)
            times.finish_ns, times.reason = now, reason
            self._executor.forget(number)
