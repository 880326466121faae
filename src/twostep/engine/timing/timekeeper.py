"""Times of the events of every sequence: collected while it is served, returned as a `Timeline` at its end.

Memory grows with chunks and preemptions, and by one number per token; decodes are differences of running totals.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from twostep.core.cost import CostModel, LeastTimes
from twostep.core.plan import Chunk, Preemption, Resolved, Step, StepResult
from twostep.engine.outputs import ChunkTime, DecodeTime, LostTime, PreemptionTime, Timeline, WaitTime
from twostep.engine.resumption import Resumption
from twostep.engine.step.executor import SampleResult
from twostep.engine.timing.meter import Reading, StepMeter
from twostep.engine.timing.queueing import QueueWatch, Wait


class StepEnd(NamedTuple):
    """The data of a finished step."""

    step: Step
    given: Sequence[SampleResult]
    result: StepResult
    resolved: Resolved
    began_ns: int
    ended_ns: int


@dataclass(eq=False)
class Times:
    """Of one sequence, so far."""

    arrival_ns: int
    attached: "list[Times]"
    """Choices of the same request that wait for the prefill of the first one, to share its blocks."""
    wait: Wait | None = None
    """While it is in the queue."""
    first_scheduled_ns: int | None = None
    waits: tuple[WaitTime, ...] = ()
    chunks: list[ChunkTime] = field(default_factory=list)
    token_ns: list[int] = field(default_factory=list)
    decodes: list[DecodeTime] = field(default_factory=list)
    decoding: Reading | None = None
    """While it decodes: the totals at its start."""
    decodes_since_ns: int = 0
    preemptions: list[PreemptionTime] = field(default_factory=list)
    kernel_ns: int = 0
    """Total at the end of the last step with one of its tokens; time since then is of steps without it."""
    lost: tuple[LostTime, ...] = ()
    """Spans on engines that died."""

    def timeline(self, finish_ns: int) -> Timeline:
        """The times so far, as values."""
        return Timeline(
            arrival_ns=self.lost[0].start_ns if self.lost else self.arrival_ns,
            first_scheduled_ns=None if any(one.tokens_lost for one in self.lost) else self.first_scheduled_ns,
            chunks=tuple(self.chunks),
            token_ns=tuple(self.token_ns),
            preemptions=tuple(self.preemptions),
            finish_ns=finish_ns,
            waits=self.waits,
            decodes=tuple(self.decodes),
            lost=self.lost,
        )


class Timekeeper:
    """Is told of every step in order: `planned`, then `token` for each generated token, then `ended`."""

    def __init__(self, cost: CostModel) -> None:
        self.meter = StepMeter(cost)
        self._times: dict[int, Times] = {}
        self._queue = QueueWatch(lambda number: times.wait if (times := self._times.get(number)) else None)
        self._before_ns: list[int] = []

    def follow(self, numbers: Iterable[int], arrival_ns: int) -> list[Times]:
        """Adds the choices of a queued request by number: the first waits for a slot, the others for its prefill."""
        attached: list[Times] = []
        first, *others = [self._times.setdefault(number, Times(arrival_ns, attached)) for number in numbers]
        first.wait = self._queue.begin(arrival_ns)
        attached += others
        return [first, *others]

    def resume(
        self, numbers: Collection[int], arrival_ns: int, resumption: Resumption, token_ns: Sequence[Sequence[int]]
    ) -> list[Times]:
        """As `follow`, for the choices of a request whose engine died: with the times of the tokens that they had. If
        none had any, they begin together as those of a new request."""
        if any(token_ns):
            followed = [self._times.setdefault(number, Times(arrival_ns, [])) for number in numbers]
            for times in followed:
                times.wait = self._queue.begin(arrival_ns)
        else:
            followed = self.follow(numbers, arrival_ns) if numbers else []
        for times, had_ns in zip(followed, token_ns, strict=True):
            times.token_ns, times.lost = list(had_ns), resumption.lost(had_ns, arrival_ns)
        return followed

    def finish(self, number: int, finish_ns: int) -> Timeline:
        """The sequence has ended; returns its timeline."""
        times = self._times.pop(number)
        self._decoded(times)
        self._waited(times, finish_ns)
        if times in times.attached:
            times.attached.remove(times)
        else:
            self._release(times.attached, finish_ns)
        return times.timeline(finish_ns)

    # --- a step ---------------------------------------------------------------------------------------------------

    def planned(self, end: StepEnd) -> None:
        """Handles the plan of a finished step: preemptions and chunks."""
        plan = end.step.plan
        self._queue.step(plan, end.began_ns)
        self._preempted(plan.preemptions, end.began_ns)
        self.meter.add(plan, end.result.step_ns, end.result.starved_ns, end.ended_ns, failed=end.result.failed)
        for chunk in plan.chunks:
            if times := self._times.get(chunk.number):
                self._chunk(times, chunk, end)

    def token(self, times: Times, now: int) -> None:
        """The step generated a token of this sequence."""
        if times.token_ns:
            self._before_ns.append(times.token_ns[-1])
        else:
            self.meter.first_tokens += 1
        times.token_ns.append(now)
        if times.decoding is None:
            times.decoding, times.decodes_since_ns = self.meter.now, now

    def ended(self, end: StepEnd) -> None:
        """All tokens of the step are handled. After a failed step its sequences count as preempted."""
        self.meter.gave(self._before_ns)
        self._before_ns.clear()
        self._preempted(end.resolved.preempted, end.ended_ns)

    # --- prompts --------------------------------------------------------------------------------------------------

    def _chunk(self, times: Times, chunk: Chunk, end: StepEnd) -> None:
        self._scheduled(times, end.began_ns)
        times.chunks.append(self._chunk_time(times, chunk, end))
        times.kernel_ns = self.meter.now.kernel_ns
        for number in chunk.forks:
            if fork := self._times.get(number):
                self._fork(times, fork)
        if chunk.samples:
            self._release(times.attached, end.began_ns)

    def _chunk_time(self, times: Times, chunk: Chunk, end: StepEnd) -> ChunkTime:
        alone_ns, attention_ns = self.meter.alone_ns(chunk, end.result.step_ns)
        return ChunkTime(
            start_ns=end.began_ns,
            end_ns=end.ended_ns,
            tokens=chunk.tokens,
            step=end.step.plan.step,
            position=chunk.start,
            kernel_ns=end.result.step_ns,
            others=end.step.plan.shape.tokens - chunk.tokens,
            alone_ns=alone_ns,
            reason=chunk.reason,
            without_ns=self.meter.before.kernel_ns - times.kernel_ns,
            starved_ns=end.result.starved_ns,
            attention_ns=attention_ns,
            least=self.meter.least,
        )

    def _scheduled(self, times: Times, now: int) -> None:
        """Ends its wait, if it waited."""
        if times.first_scheduled_ns is None:
            times.first_scheduled_ns = now
        if times.wait is not None:
            self._waited(times, now)
            times.kernel_ns = self.meter.before.kernel_ns

    def _fork(self, first: Times, fork: Times) -> None:
        """A fork shares the prefill of the first choice."""
        first.attached.remove(fork)
        fork.chunks, fork.first_scheduled_ns = list(first.chunks), first.first_scheduled_ns
        fork.waits, fork.kernel_ns = first.waits, first.kernel_ns

    def _release(self, attached: list[Times], now: int) -> None:
        """Choices that could not be forked wait in the queue from now on."""
        for times in attached:
            times.wait = self._queue.begin(now)
        attached.clear()

    # --- waiting and decoding -------------------------------------------------------------------------------------

    def _waited(self, times: Times, now: int) -> None:
        """Adds its waits to the preemption that made it wait, or else to its arrival."""
        if times.wait is None:
            return
        waits, times.wait = self._queue.end(times.wait, now), None
        if times.preemptions:
            times.preemptions[-1] = replace(times.preemptions[-1], waits=waits)
        else:
            times.waits = waits

    def _preempted(self, preemptions: Iterable[Preemption], now: int) -> None:
        for preemption in preemptions:
            if times := self._times.get(preemption.number):
                self._decoded(times)
                times.preemptions.append(PreemptionTime(now, preemption.lost, preemption.reason))
                times.wait = self._queue.begin(now)

    def _decoded(self, times: Times) -> None:
        """Ends its decoding, if it decoded. Its last token is of the last step, unless that failed."""
        began, times.decoding = times.decoding, None
        if began is None or times.token_ns[-1] == times.decodes_since_ns:
            return
        meter, end_ns = self.meter, times.token_ns[-1]
        took = (meter.now if end_ns == meter.ended_ns else meter.before).since(began)
        times.decodes.append(
            DecodeTime(
                start_ns=times.decodes_since_ns,
                end_ns=end_ns,
                steps=took.steps,
                mixed_steps=took.mixed_steps,
                kernel_ns=took.kernel_ns,
                tokens=took.tokens,
                alone_ns=took.alone_ns,
                prefill_ns=took.prefill_ns,
                starved_ns=took.starved_ns,
                attention_ns=took.attention_ns,
                least=LeastTimes(took.least_arithmetic_ns, took.least_bandwidth_ns),
            )
        )
