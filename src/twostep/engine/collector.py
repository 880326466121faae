"""Gathers what the steps gave into answers: text, log-probabilities, and when everything happened."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from twostep.core.loop import Abort
from twostep.core.plan import Chunk, Finished, Preemption, Resolved, Step, StepResult
from twostep.core.request import BLOCK_TOKENS, FinishReason
from twostep.engine.answer import Answer
from twostep.engine.executor import Given
from twostep.engine.meter import Reading, StepMeter
from twostep.engine.outputs import ChoiceOutput, ChunkTime, DecodeTime, Held, RequestOutput, Timeline, TokenLogprobs
from twostep.engine.outputs import FinishReason as FinishName
from twostep.engine.outputs import Preemption as PreemptionTime
from twostep.engine.params import SamplingParams
from twostep.engine.queueing import QueueWatch, Wait
from twostep.engine.text import NoText, TextStream
from twostep.errors import SamplingError
from twostep.model.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of one choice of a request that streams; tokens may come without text yet."""

    id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]


Event = Delta | RequestOutput


class StepEnd(NamedTuple):
    """What is needed of a step after it has ended."""

    step: Step
    given: Sequence[Given]
    result: StepResult
    resolved: Resolved
    began_ns: int
    ended_ns: int


@dataclass
class _Choice:
    """One choice as it comes. `text` is made as tokens come if somebody waits for it, else at the end."""

    request: "_Request"
    index: int
    answer: Answer
    stream: TextStream | NoText
    wait: Wait | None
    """While it is in the queue."""
    first_scheduled_ns: int | None = None
    held: tuple[Held, ...] = ()
    chunks: list[ChunkTime] = field(default_factory=list)
    token_ns: list[int] = field(default_factory=list)
    decodes: list[DecodeTime] = field(default_factory=list)
    decoding: Reading | None = None
    """While it decodes: totals when it began."""
    decodes_since_ns: int = 0
    preemptions: list[PreemptionTime] = field(default_factory=list)
    kernel_ns: int = 0
    """Total when the last step with a token of it ended: what came since was without it."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    pushed: int = 0
    """Output tokens that `stream` has seen."""
    error: str | None = None

    def timeline(self, finish_ns: int) -> Timeline:
        return Timeline(
            arrival_ns=self.request.arrival_ns,
            first_scheduled_ns=self.first_scheduled_ns,
            chunks=tuple(self.chunks),
            token_ns=tuple(self.token_ns),
            preemptions=tuple(self.preemptions),
            finish_ns=finish_ns,
            held=self.held,
            decodes=tuple(self.decodes),
        )


@dataclass
class _Request:
    id: str
    prompt: Sequence[int]
    params: SamplingParams
    arrival_ns: int
    streams: bool
    open_choices: int
    attached: "list[_Choice]" = field(default_factory=list)
    """Choices that wait for the first one's prompt, to share its blocks."""
    cached_tokens: int | None = None
    done: list[ChoiceOutput] = field(default_factory=list)


class Collector:
    """Follows every sequence from its number to its answer. `abort` ends a choice early: a stop string was found."""

    def __init__(self, tokenizer: Tokenizer | None, abort: Callable[[Abort], None]) -> None:
        self.events: list[Event] = []
        self.meter = StepMeter()
        self._queue = QueueWatch(lambda number: choice.wait if (choice := self._choices.get(number)) else None)
        self._tokenizer, self._abort = tokenizer, abort
        self._choices: dict[int, _Choice] = {}
        self._ends: list[StepEnd | tuple[Sequence[Finished], int]] = []

    def follow(
        self,
        id_: str,
        prompt: Sequence[int],
        answers: dict[int, Answer],
        arrival_ns: int,
        *,
        streams: bool,
    ) -> None:
        """A request of these answers, by number, is queued."""
        params = next(iter(answers.values())).params
        request = _Request(id_, prompt, params, arrival_ns, streams, len(answers))
        for index, (number, answer) in enumerate(answers.items()):
            stream = TextStream(self._tokenizer, params) if self._tokenizer else NoText()
            wait = None if index else self._queue.begin(arrival_ns)
            choice = self._choices[number] = _Choice(request, index, answer, stream, wait)
            if index:
                request.attached.append(choice)

    def refused(self, id_: str, prompt: Sequence[int], why: str, now: int) -> None:
        """A request could not be queued after all."""
        nothing = ChoiceOutput(0, "", (), "error", Timeline(now, finish_ns=now), error=why)
        self.events.append(RequestOutput(id_, prompt, (nothing,), 0))

    def note(self, end: StepEnd) -> None:
        """A step ended; what it means is worked out in `catch_up`."""
        self._ends.append(end)

    def note_aborted(self, finished: Sequence[Finished], now: int) -> None:
        """Sequences were aborted; likewise."""
        self._ends.append((finished, now))

    def catch_up(self) -> None:
        """Works through what was noted, in order."""
        ends, self._ends = self._ends, []
        for end in ends:
            if isinstance(end, StepEnd):
                self._step(end)
            else:
                self._finish_all(*end)

    def _step(self, end: StepEnd) -> None:
        self._time_plan(end)
        before_ns: list[int] = []
        for number, given in end.given:
            if choice := self._choices.get(number):
                self._take(number, choice, given, end.ended_ns, before_ns)
        self.meter.gave(before_ns)
        self._preempted(end.resolved.preempted, end.ended_ns)
        self._finish_all(end.resolved.finished, end.ended_ns)

    # --- times ----------------------------------------------------------------------------------------------------

    def _time_plan(self, end: StepEnd) -> None:
        plan = end.step.plan
        self._queue.step(plan, end.began_ns)
        self._preempted(plan.preemptions, end.began_ns)
        self.meter.add(plan, end.result.step_ns, end.ended_ns, failed=end.result.failed)
        for admission in plan.admissions:
            choice = self._choices.get(admission.number)
            if choice and choice.index == 0 and choice.request.cached_tokens is None:
                choice.request.cached_tokens = admission.cached * BLOCK_TOKENS
        for chunk in plan.chunks:
            if choice := self._choices.get(chunk.number):
                self._time_chunk(choice, chunk, end)

    def _time_chunk(self, choice: _Choice, chunk: Chunk, end: StepEnd) -> None:
        self._seated(choice, end.began_ns)
        choice.chunks.append(self._chunk_time(choice, chunk, end))
        choice.kernel_ns = self.meter.now.kernel_ns
        for fork in chunk.forks:
            if forked := self._choices.get(fork):
                self._time_fork(choice, forked)
        if chunk.samples and choice.index == 0:
            self._release(choice.request, end.began_ns)

    def _chunk_time(self, choice: _Choice, chunk: Chunk, end: StepEnd) -> ChunkTime:
        return ChunkTime(
            start_ns=end.began_ns,
            end_ns=end.ended_ns,
            tokens=chunk.tokens,
            step=end.step.plan.step,
            position=chunk.start,
            kernel_ns=end.result.step_ns,
            others=end.step.plan.shape.tokens - chunk.tokens,
            alone_ns=self.meter.alone_ns(chunk, end.result.step_ns),
            reason=chunk.reason,
            without_ns=self.meter.before.kernel_ns - choice.kernel_ns,
        )

    def _seated(self, choice: _Choice, now: int) -> None:
        """It waits no longer, if it did."""
        if choice.first_scheduled_ns is None:
            choice.first_scheduled_ns = now
        if choice.wait is None:
            return
        self._waited(choice, now)
        choice.kernel_ns = self.meter.before.kernel_ns

    def _waited(self, choice: _Choice, now: int) -> None:
        """What it waited for goes to the preemption that made it wait, or to its arrival."""
        if choice.wait is None:
            return
        held, choice.wait = self._queue.end(choice.wait, now), None
        if choice.preemptions:
            choice.preemptions[-1] = replace(choice.preemptions[-1], held=held)
        else:
            choice.held = held

    def _time_fork(self, first: _Choice, fork: _Choice) -> None:
        """A fork shares the prefill of the choice it comes from."""
        fork.request.attached.remove(fork)
        fork.chunks, fork.first_scheduled_ns = list(first.chunks), first.first_scheduled_ns
        fork.held, fork.kernel_ns = first.held, first.kernel_ns

    def _release(self, request: _Request, now: int) -> None:
        """Choices that could not be forked wait in the queue from now on."""
        for choice in request.attached:
            choice.wait = self._queue.begin(now)
        request.attached.clear()

    def _preempted(self, preemptions: Iterable[Preemption], now: int) -> None:
        for preemption in preemptions:
            if choice := self._choices.get(preemption.number):
                self._decoded(choice)
                choice.preemptions.append(PreemptionTime(now, preemption.lost, preemption.reason))
                choice.wait = self._queue.begin(now)

    def _decoded(self, choice: _Choice) -> None:
        """It decodes no longer, if it did. Its last token came with the last step, unless that failed."""
        began, choice.decoding = choice.decoding, None
        if began is None or choice.token_ns[-1] == choice.decodes_since_ns:
            return
        meter, end_ns = self.meter, choice.token_ns[-1]
        took = (meter.now if end_ns == meter.ended_ns else meter.before).since(began)
        choice.decodes.append(
            DecodeTime(
                start_ns=choice.decodes_since_ns,
                end_ns=end_ns,
                steps=took.steps,
                mixed_steps=took.mixed_steps,
                kernel_ns=took.kernel_ns,
                tokens=took.tokens,
                alone_ns=took.alone_ns,
                prefill_ns=took.prefill_ns,
            )
        )

    # --- tokens ---------------------------------------------------------------------------------------------------

    def _take(self, number: int, choice: _Choice, given: object, now: int, before_ns: list[int]) -> None:
        """The time of the token before it, if there is one, goes to `before_ns`."""
        if isinstance(given, SamplingError):
            choice.error = str(given)
            return
        if choice.token_ns:
            before_ns.append(choice.token_ns[-1])
        else:
            self.meter.first_tokens += 1
        choice.token_ns.append(now)
        if choice.decoding is None:
            choice.decoding, choice.decodes_since_ns = self.meter.now, now
        if choice.request.params.logprobs is not None:
            choice.logprobs.append(TokenLogprobs(*given))  # type: ignore[misc]
        if choice.request.streams or choice.request.params.stop_strings:
            self._push(number, choice, now)

    def _push(self, number: int, choice: _Choice, now: int) -> None:
        """Makes the text of new tokens; ends the choice where a stop string does."""
        new = choice.answer.output[choice.pushed : len(choice.token_ns)].tolist()
        delta = choice.stream.push(new)
        choice.texts.append(delta.text)
        if choice.request.streams:
            logprobs = tuple(choice.logprobs[choice.pushed : choice.pushed + delta.tokens])
            tokens = tuple(new[: delta.tokens])
            self.events.append(Delta(choice.request.id, choice.index, delta.text, tokens, logprobs))
        choice.pushed += delta.tokens
        if delta.stop is not None:
            self._complete(number, choice, "stop", delta.stop, now)
            self._abort(Abort(choice.request.id, choice.index))

    # --- ends -----------------------------------------------------------------------------------------------------

    def _finish_all(self, finished: Iterable[Finished], now: int) -> None:
        for number, reason, _ in finished:
            if choice := self._choices.get(number):
                self._finish(number, choice, reason, now)

    def _finish(self, number: int, choice: _Choice, reason: FinishReason, now: int) -> None:
        if choice.pushed < len(choice.token_ns):
            self._push(number, choice, now)
        if reason is FinishReason.FAILED and choice.error is None:
            choice.error = "there was no memory for a step of this request"
        held_back = choice.stream.flush()
        choice.texts.append(held_back)
        if held_back and choice.request.streams:
            self.events.append(Delta(choice.request.id, choice.index, held_back, (), ()))
        self._complete(number, choice, reason.value, self._stop_reason(choice, reason), now)

    def _stop_reason(self, choice: _Choice, reason: FinishReason) -> int | None:
        if reason is not FinishReason.STOP:
            return None
        last = int(choice.answer.output[-1])
        return last if last in choice.request.params.stop_token_ids else None

    def _complete(self, number: int, choice: _Choice, reason: FinishName, stop: str | int | None, now: int) -> None:
        del self._choices[number]
        self._decoded(choice)
        self._waited(choice, now)
        if choice.index == 0:
            self._release(choice.request, now)
        request, tokens = choice.request, choice.pushed
        output = ChoiceOutput(
            index=choice.index,
            text="".join(choice.texts),
            token_ids=choice.answer.output[:tokens].tolist(),
            finish_reason=reason,
            timeline=choice.timeline(now),
            stop_reason=stop,
            logprobs=None if request.params.logprobs is None else tuple(choice.logprobs[:tokens]),
            error=choice.error,
        )
        request.done.append(output)
        request.open_choices -= 1
        if request.open_choices == 0:
            choices = tuple(sorted(request.done, key=lambda done: done.index))
            self.events.append(RequestOutput(request.id, request.prompt, choices, request.cached_tokens or 0))
