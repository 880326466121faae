"""Builds outputs from the results of steps: text, log-probabilities and timelines."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from twostep.core.cost import CostModel
from twostep.core.loop import Abort
from twostep.core.plan import Admission, Finished
from twostep.core.request import BLOCK_TOKENS, FinishReason
from twostep.engine.outputs import ChoiceEnd, ChoiceOutput, Delta, Event, RequestOutput, Timeline
from twostep.engine.outputs import FinishReason as FinishName
from twostep.engine.params import SamplingParams
from twostep.engine.resumption import Begun, Resumption
from twostep.engine.text.answer import Answer
from twostep.engine.text.packed_logprobs import PackedLogprobs, TokenLogprobs
from twostep.engine.text.text_stream import NoText, TextStream, text_stream
from twostep.engine.timing.timekeeper import StepEnd, Timekeeper, Times
from twostep.errors import SamplingError
from twostep.model.tokenizer import Tokenizer


@dataclass
class _Choice:
    """One choice. Its text is made as tokens arrive if the request streams or has stop strings, otherwise at the
    end."""

    request: "_Request"
    place: int
    """Among the choices that the scheduler has of the request."""
    answer: Answer
    stream: TextStream | NoText
    times: Times
    logprobs: PackedLogprobs = field(default_factory=PackedLogprobs)
    texts: list[str] = field(default_factory=list)
    pushed: int = 0
    """Output tokens that `stream` has got."""
    error: str | None = None

    @property
    def index(self) -> int:
        """Among all choices of the request."""
        return self.answer.choice


@dataclass
class _Request:
    id: str
    prompt: Sequence[int]
    params: SamplingParams
    streams: bool
    open_choices: int
    cached_tokens: int | None = None
    done: list[ChoiceOutput] = field(default_factory=list)


class Collector:
    """Follows every sequence to its output. `abort` is called to end a choice at a stop string. `cost`, which the
    scheduler fits, divides the time of steps among the sequences in them."""

    def __init__(self, tokenizer: Tokenizer | None, abort: Callable[[Abort], None], cost: CostModel) -> None:
        self.events: list[Event] = []
        self.times = Timekeeper(cost)
        self._tokenizer, self._abort = tokenizer, abort
        self._choices: dict[int, _Choice] = {}
        self._ends: list[StepEnd | tuple[Sequence[Finished], int]] = []

    def follow(
        self,
        id_: str,
        prompt: Sequence[int],
        params: SamplingParams,
        answers: dict[int, Answer],
        arrival_ns: int,
        *,
        streams: bool,
        resumption: Resumption | None = None,
    ) -> None:
        """Adds a queued request with these answers by sequence number: those of its choices that have not ended."""
        request = _Request(id_, prompt, params, streams, len(answers))
        if resumption is not None:
            self._resume(request, answers, arrival_ns, resumption)
            return
        all_times = self.times.follow(answers, arrival_ns)
        for place, (number, times) in enumerate(zip(answers, all_times, strict=True)):
            stream = text_stream(self._tokenizer, params)
            self._choices[number] = _Choice(request, place, answers[number], stream, times)

    def _resume(self, request: _Request, answers: dict[int, Answer], arrival_ns: int, resumption: Resumption) -> None:
        """Choices that an engine had begun before it died go on with their text and times."""
        request.cached_tokens = resumption.so_far.cached_tokens
        request.done = resumption.done
        self.events += resumption.deltas
        begun = [resumption.begun.get(answer.choice) or self._begun(request) for answer in answers.values()]
        all_times = self.times.resume(answers, arrival_ns, resumption, [one.token_ns for one in begun])
        for place, (number, times, one) in enumerate(zip(answers, all_times, begun, strict=True)):
            choice = _Choice(request, place, answers[number], one.stream, times, one.logprobs, [one.text])
            choice.pushed = len(one.token_ns)
            self._choices[number] = choice
        if not answers:
            self._output(request)

    def _begun(self, request: _Request) -> Begun:
        return Begun(text_stream(self._tokenizer, request.params))

    def refused(self, id_: str, prompt: Sequence[int], why: str, now: int) -> None:
        """Adds the output of a request that could not be queued."""
        nothing = ChoiceOutput(0, "", (), "error", Timeline(now, finish_ns=now), error=why)
        self.events.append(RequestOutput(id_, prompt, (nothing,), 0))

    def note(self, end: StepEnd) -> None:
        """Notes that a step ended; `catch_up` processes it."""
        self._ends.append(end)

    @property
    def has_first_token(self) -> bool:
        """Whether a noted step generated the first token of a streaming answer."""
        return any(
            (choice := self._choices.get(chunk.number)) is not None and choice.request.streams
            for end in self._ends
            if isinstance(end, StepEnd)
            for chunk in end.step.plan.chunks
            if chunk.samples
        )

    def note_aborted(self, finished: Sequence[Finished], now: int) -> None:
        """Notes that sequences were aborted; `catch_up` processes it."""
        self._ends.append((finished, now))

    def catch_up(self) -> None:
        """Processes what was noted, in order, and appends to `events`."""
        ends, self._ends = self._ends, []
        for end in ends:
            if isinstance(end, StepEnd):
                self._step(end)
            else:
                self._finish_all(*end)

    def _step(self, end: StepEnd) -> None:
        self._note_cached(end.step.plan.admissions)
        self.times.planned(end)
        for number, given in end.given:
            if choice := self._choices.get(number):
                self._take(number, choice, given, end.ended_ns)
        self.times.ended(end)
        self._finish_all(end.resolved.finished, end.ended_ns)

    def _note_cached(self, admissions: Iterable[Admission]) -> None:
        """Keeps the prefix-cache hit of each request's first admission."""
        for admission in admissions:
            choice = self._choices.get(admission.number)
            if choice and choice.place == 0 and choice.request.cached_tokens is None:
                choice.request.cached_tokens = admission.cached * BLOCK_TOKENS

    # --- tokens ---------------------------------------------------------------------------------------------------

    def _take(self, number: int, choice: _Choice, given: object, now: int) -> None:
        if isinstance(given, SamplingError):
            choice.error = str(given)
            return
        self.times.token(choice.times, now)
        if choice.request.params.logprobs is not None:
            choice.logprobs.append(TokenLogprobs(*given))  # type: ignore[misc]
        if choice.request.streams or choice.request.params.stop_strings:
            self._push(number, choice, now)

    def _push(self, number: int, choice: _Choice, now: int) -> None:
        """Makes the text of new tokens; ends the choice at a stop string."""
        new = choice.answer.output[choice.pushed : len(choice.times.token_ns)].tolist()
        delta = choice.stream.push(new)
        choice.texts.append(delta.text)
        if choice.request.streams:
            known = choice.request.params.logprobs is not None
            packed = choice.logprobs.to_bytes(choice.pushed, choice.pushed + delta.tokens) if known else b""
            tokens = tuple(new[: delta.tokens])
            cached = None if choice.pushed else choice.request.cached_tokens
            self.events.append(Delta(choice.request.id, choice.index, delta.text, tokens, packed, None, cached))
        choice.pushed += delta.tokens
        if delta.stop is not None:
            self._complete(number, choice, "stop", delta.stop, now)
            self._abort(Abort(choice.request.id, choice.place))

    # --- ends -----------------------------------------------------------------------------------------------------

    def _finish_all(self, finished: Iterable[Finished], now: int) -> None:
        for number, reason, _ in finished:
            if choice := self._choices.get(number):
                self._finish(number, choice, reason, now)

    def _finish(self, number: int, choice: _Choice, reason: FinishReason, now: int) -> None:
        if choice.pushed < len(choice.times.token_ns):
            self._push(number, choice, now)
        if reason is FinishReason.FAILED and choice.error is None:
            choice.error = "there was no memory for a step of this request"
        held_back = choice.stream.flush()
        choice.texts.append(held_back)
        if held_back and choice.request.streams:
            self.events.append(Delta(choice.request.id, choice.index, held_back, ()))
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
            timeline=self.times.finish(number, now),
            stop_reason=stop,
            logprobs=None if request.params.logprobs is None else choice.logprobs.truncated(tokens),
            error=choice.error,
        )
        request.done.append(output)
        request.open_choices -= 1
        if request.open_choices == 0:
            self._output(request)
        elif request.streams:
            ended = ChoiceEnd(reason, stop, choice.error)
            self.events.append(Delta(request.id, choice.index, "", (), ended=ended))

    def _output(self, request: _Request) -> None:
        choices = tuple(sorted(request.done, key=lambda done: done.index))
        self.events.append(RequestOutput(request.id, request.prompt, choices, request.cached_tokens or 0))
