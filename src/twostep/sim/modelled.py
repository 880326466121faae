"""Simulated execution: a cost model gives the duration of steps, the workload the length of answers.

The work per step follows what changes in the batch, not how many sequences are in it: tokens are counted in spans of
steps, and the times of a sequence's tokens are looked up when it ends.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from struct import Struct
from typing import NamedTuple

from twostep.core.cost import CostModel
from twostep.core.loop import Abort, Capabilities, Command
from twostep.core.plan import Finished, Plan, Resolved, SliceOutcome, Step, StepResult
from twostep.core.request import BLOCK_TOKENS, FinishReason, Request
from twostep.sim.noise import STILL, Sample

STOP = SliceOutcome(finished=FinishReason.STOP)
_OUTPUT_NAME = Struct("<qi4s")
"""Ends otherwise than the names of prompts (`sim.prompt_blocks`), so that they never meet."""


@dataclass
class VirtualClock:
    """Advances only when told to."""

    now_ns: int = 0

    def now(self) -> int:
        return self.now_ns


@dataclass(slots=True)
class _Progress:
    """The tokens of one sequence, counted in steps."""

    prompt_tokens: int
    caches: bool
    """Its full blocks enter the prefix cache."""
    length: int | None
    """Tokens after which it stops by itself."""
    tokens: int = 0
    """In `spans`."""
    spans: list[tuple[int, int]] = field(default_factory=list)
    """Steps that gave one token each: first, and the one after the last."""
    joined: int | None = None
    """While it decodes in the batch: the first step that did."""
    phase: int = 0
    """Of the steps that fill a block of its output, modulo the size of a block."""


class ModelledExecutor:
    """Computes nothing: a step ends at `ends_ns`. Knows the length of answers, which the scheduler does not. Output
    blocks are named as they fill, like those of a real executor; no prompt ever finds them."""

    capabilities = Capabilities(arrived_kv=True)

    def __init__(
        self, cost: CostModel, clock: VirtualClock, host_ns: int = 0, noise: Iterator[Sample] | None = None
    ) -> None:
        """`host_ns`: time between the kernels of two steps, as measured on a real host (`Measured.host_ns_per_step`).
        `noise`: what each step deviates by (`Noise.draws`)."""
        self._cost, self._clock, self._host_ns = cost, clock, host_ns
        self._noise = repeat(STILL) if noise is None else noise
        self._live: dict[int, _Progress] = {}
        self._ends_ns: list[int] = []
        """Of each step."""
        self._stopping: dict[int, list[int]] = {}
        """By step: the sequences in the batch that stop with it, if they are in it until then."""
        self._filling: list[dict[int, _Progress]] = [{} for _ in range(BLOCK_TOKENS)]
        """The batch by phase; only sequences whose blocks are cached."""
        self._sampled: list[int] = []
        """Sequences whose chunk samples in the step under way."""
        self._step_ns: int | None = None
        self._starved_ns = 0
        self.ends_ns = 0
        """When the current step ends."""

    def expect(self, number: int, request: Request, output_tokens: int | None = None) -> None:
        """A sequence of `request` exists. It stops with its `output_tokens`-th token; without that, or above its limit,
        the scheduler ends it at its limit."""
        self._live[number] = _Progress(request.prompt_tokens, bool(request.hashes), output_tokens)

    def forget(self, number: int) -> list[int]:
        """Forgets a sequence that has ended; returns when it got each token. A step under way gives it none."""
        seq = self._live.pop(number)
        if seq.joined is not None:
            self._leave(number, seq, len(self._ends_ns))
        times = [time_ns for first, after in seq.spans for time_ns in self._ends_ns[first:after]]
        if times and times[-1] > self._clock.now_ns:
            times.pop()
        return times

    def start(self, step: Step) -> None:
        this = len(self._ends_ns)
        for number in step.left:
            if (left := self._live.get(number)) and left.joined is not None:
                self._leave(number, left, this)
        for number, _ in step.joined:
            self._join(number, self._live[number], this)
        self._sampled = [n for chunk in step.plan.chunks if chunk.samples for n in (chunk.number, *chunk.forks)]
        for number in self._sampled:
            seq = self._live[number]
            seq.tokens += 1
            seq.spans.append((this, this + 1))
        factor, starved = next(self._noise)
        self._step_ns = round(self._cost.estimate(step.plan.shape).expected_ns * factor)
        self._starved_ns = int(self._step_ns * starved)
        self.ends_ns = self._clock.now_ns + self._host_ns + self._step_ns
        self._ends_ns.append(self.ends_ns)

    def poll(self) -> StepResult | None:
        step_ns = self._step_ns
        if step_ns is None or self._clock.now_ns < self.ends_ns:
            return None
        self._step_ns = None
        this = len(self._ends_ns) - 1
        stopped, filled = dict.fromkeys(self._stopped(this), STOP), dict(self._filled(this))
        return StepResult(step_ns, stopped, filled, starved_ns=self._starved_ns)

    def _join(self, number: int, seq: _Progress, this: int) -> None:
        seq.joined = this
        if seq.length is not None:
            self._stopping.setdefault(this + seq.length - seq.tokens - 1, []).append(number)
        if seq.caches:
            seq.phase = (this - seq.prompt_tokens - seq.tokens) % BLOCK_TOKENS
            self._filling[seq.phase][number] = seq

    def _leave(self, number: int, seq: _Progress, this: int) -> None:
        """It was in all steps of the batch before step `this`."""
        assert seq.joined is not None, "only members leave"
        if this > seq.joined:
            seq.tokens += this - seq.joined
            seq.spans.append((seq.joined, this))
        seq.joined = None
        if seq.caches:
            del self._filling[seq.phase][number]

    def _stopped(self, this: int) -> Iterator[int]:
        """Sequences that step `this` gave their last token."""
        for number in self._stopping.pop(this, ()):
            seq = self._live.get(number)
            if seq and seq.joined is not None and seq.tokens + this + 1 - seq.joined == seq.length:
                yield number
        for number in self._sampled:
            if (seq := self._live.get(number)) and seq.tokens == seq.length:
                yield number

    def _filled(self, this: int) -> Iterator[tuple[int, tuple[bytes, ...]]]:
        """Names of the output blocks whose last KV step `this` computed: positions before the token that it sampled."""
        for number, seq in self._filling[this % BLOCK_TOKENS].items():
            assert seq.joined is not None, "only members of the batch have a phase"
            yield number, (_output_name(number, seq.prompt_tokens + seq.tokens + this - seq.joined),)
        for number in self._sampled:
            if (one := self._live.get(number)) and one.caches and one.tokens > 1:
                positions = one.prompt_tokens + one.tokens - 1
                if positions % BLOCK_TOKENS == 0:
                    yield number, (_output_name(number, positions),)


def _output_name(number: int, positions: int) -> bytes:
    return _OUTPUT_NAME.pack(number, positions, b"out ")


class Arrival(NamedTuple):
    """A command at a time. `output_tokens`: natural answer length of each choice of a request; without it, or above
    `max_tokens`, the answer ends at its limit."""

    at_ns: int
    command: Command
    output_tokens: Sequence[int] = ()


@dataclass(slots=True)
class ChoiceTimes:
    """Times of one choice of a request, in ns of the virtual clock."""

    request_id: str
    choice: int
    arrival_ns: int
    chunks: list[tuple[int, int]] = field(default_factory=list)
    """Step start and tokens of each chunk of its prompt, or of tokens recomputed after a preemption."""
    token_ns: list[int] = field(default_factory=list)
    """Known when it has ended."""
    preempted_ns: list[int] = field(default_factory=list)
    finish_ns: int | None = None
    reason: FinishReason | str | None = None
    """A string is the reason for a refusal."""
    cached_tokens: int = 0
    """Prompt tokens that its first admission found in the prefix cache."""


class SimulatedStep(NamedTuple):
    """One step, in ns of the virtual clock."""

    start_ns: int
    end_ns: int
    prefill_tokens: int
    decode_tokens: int


class SimulatedClient:
    """Inbox and observer of a simulated loop: delivers arrivals and records the times of each choice."""

    def __init__(
        self,
        executor: ModelledExecutor,
        on_end: Callable[[ChoiceTimes], None] = lambda times: None,
        on_step: Callable[[Plan], None] = lambda plan: None,
    ) -> None:
        """`on_end` is called when a choice has ended or was refused, `on_step` when a step has."""
        self._executor, self._on_end, self._on_step = executor, on_end, on_step
        self._inbox: deque[Arrival] = deque()
        self._submitted: dict[str, Arrival] = {}
        self._live: dict[int, ChoiceTimes] = {}
        self._began_ns = 0
        self.times: list[ChoiceTimes] = []
        """One per choice, in the order in which they were queued; one for a refused request."""
        self.steps: list[SimulatedStep] = []

    @property
    def unread(self) -> int:
        """Commands in the inbox."""
        return len(self._inbox)

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
            length = arrival.output_tokens[choice] if choice < len(arrival.output_tokens) else None
            self._executor.expect(number, request, length)
            self._live[number] = ChoiceTimes(request.id, choice, arrival.at_ns)
            self.times.append(self._live[number])

    def refused(self, request: Request, why: str, now: int) -> None:
        arrival = self._submitted.pop(request.id)
        self.times.append(ChoiceTimes(request.id, 0, arrival.at_ns, finish_ns=now, reason=why))
        self._on_end(self.times[-1])

    def began(self, step: Step, now: int) -> None:
        self._began_ns = now
        for preemption in step.plan.preemptions:
            self._live[preemption.number].preempted_ns.append(now)
        for admission in step.plan.admissions:
            times = self._live[admission.number]
            if not times.chunks:
                times.cached_tokens = admission.cached * BLOCK_TOKENS
        for chunk in step.plan.chunks:
            self._live[chunk.number].chunks.append((now, chunk.tokens))

    def ended(self, step: Step, result: StepResult, resolved: Resolved, now: int) -> None:
        plan = step.plan
        self.steps.append(SimulatedStep(self._began_ns, now, plan.shape.tokens - plan.decoding, plan.decoding))
        self._on_step(plan)
        self._end(resolved.finished, now)

    def aborted(self, finished: tuple[Finished, ...], now: int) -> None:
        self._end(finished, now)

    def catch_up(self) -> None:
        pass

    def cut(self) -> Iterator[ChoiceTimes]:
        """At the end of a run that was cut short: the choices that have not ended, with the tokens so far."""
        for number, times in self._live.items():
            times.token_ns = self._executor.forget(number)
            yield times
        self._live = {}

    def _end(self, finished: tuple[Finished, ...], now: int) -> None:
        for number, reason, _ in finished:
            times = self._live.pop(number)
            times.token_ns = self._executor.forget(number)
            times.finish_ns, times.reason = now, reason
            self._on_end(times)
