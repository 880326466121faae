"""Gathers what the steps gave into answers: text, log-probabilities, and when everything happened."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from twostep.core.loop import Abort
from twostep.core.plan import Finished, Preemption, Resolved, Step
from twostep.core.request import BLOCK_TOKENS, FinishReason
from twostep.engine.answer import Answer
from twostep.engine.executor import Given
from twostep.engine.outputs import ChoiceOutput, ChunkTime, RequestOutput, Timeline, TokenLogprobs
from twostep.engine.outputs import FinishReason as FinishName
from twostep.engine.outputs import Preemption as PreemptionTime
from twostep.engine.params import SamplingParams
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
    first_scheduled_ns: int | None = None
    chunks: list[ChunkTime] = field(default_factory=list)
    token_ns: list[int] = field(default_factory=list)
    preemptions: list[PreemptionTime] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    pushed: int = 0
    """Output tokens that `stream` has seen."""
    error: str | None = None

    def timeline(self, finish_ns: int) -> Timeline:
        times = tuple(self.chunks), tuple(self.token_ns), tuple(self.preemptions)
        return Timeline(self.request.arrival_ns, self.first_scheduled_ns, *times, finish_ns)


@dataclass
class _Request:
    id: str
    prompt: Sequence[int]
    params: SamplingParams
    arrival_ns: int
    streams: bool
    open_choices: int
    cached_tokens: int | None = None
    done: list[ChoiceOutput] = field(default_factory=list)


class Collector:
    """Follows every sequence from its number to its answer. `abort` ends a choice early: a stop string was found."""

    def __init__(self, tokenizer: Tokenizer | None, abort: Callable[[Abort], None]) -> None:
        self.events: list[Event] = []
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
            self._choices[number] = _Choice(request, index, answer, stream)

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
        for number, given in end.given:
            if choice := self._choices.get(number):
                self._take(number, choice, given, end.ended_ns)
        self._preempted(end.resolved.preempted, end.ended_ns)
        self._finish_all(end.resolved.finished, end.ended_ns)

    # --- times ----------------------------------------------------------------------------------------------------

    def _time_plan(self, end: StepEnd) -> None:
        plan = end.step.plan
        self._preempted(plan.preemptions, end.began_ns)
        for admission in plan.admissions:
            choice = self._choices.get(admission.number)
            if choice and choice.index == 0 and choice.request.cached_tokens is None:
                choice.request.cached_tokens = admission.cached * BLOCK_TOKENS
        for chunk in plan.chunks:
            time = ChunkTime(end.began_ns, end.ended_ns, chunk.tokens, plan.step)
            self._time_chunk(chunk.number, time)
            for fork in chunk.forks:
                self._time_fork(chunk.number, fork)

    def _time_chunk(self, number: int, time: ChunkTime) -> None:
        if choice := self._choices.get(number):
            choice.chunks.append(time)
            if choice.first_scheduled_ns is None:
                choice.first_scheduled_ns = time.start_ns

    def _time_fork(self, parent: int, fork: int) -> None:
        """A fork shares the prefill of the choice it comes from."""
        choice, first = self._choices.get(fork), self._choices.get(parent)
        if choice and first:
            choice.chunks, choice.first_scheduled_ns = list(first.chunks), first.first_scheduled_ns

    def _preempted(self, preemptions: Iterable[Preemption], now: int) -> None:
        for preemption in preemptions:
            if choice := self._choices.get(preemption.number):
                choice.preemptions.append(PreemptionTime(now, preemption.lost))

    # --- tokens ---------------------------------------------------------------------------------------------------

    def _take(self, number: int, choice: _Choice, given: object, now: int) -> None:
        if isinstance(given, SamplingError):
            choice.error = str(given)
            return
        choice.token_ns.append(now)
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
