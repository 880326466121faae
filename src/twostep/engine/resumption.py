"""Continues requests of an engine that died: rebuilds, from the tokens that were received, where each choice stood."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from twostep.engine.backend import ChoiceSoFar, RequestSoFar
from twostep.engine.outputs import ChoiceEnd, ChoiceOutput, Delta, LostTime, Timeline
from twostep.engine.params import SamplingParams
from twostep.engine.text.packed_logprobs import PackedLogprobs
from twostep.engine.text.text_stream import NoText, TextDelta, TextStream
from twostep.errors import InvalidParameterError


@dataclass
class Begun:
    """A choice that has begun: its text so far, its log-probabilities, and the times of its tokens."""

    stream: TextStream | NoText
    text: str = ""
    logprobs: PackedLogprobs = field(default_factory=PackedLogprobs)
    token_ns: tuple[int, ...] = ()


@dataclass
class Resumption:
    """A request as its next engine gets it. `done`: choices that have ended; `begun`: the others by index.

    `deltas` are what was not received of those that have ended.
    """

    so_far: RequestSoFar
    prompt_tokens: int
    begun: dict[int, Begun] = field(default_factory=dict)
    done: list[ChoiceOutput] = field(default_factory=list)
    deltas: list[Delta] = field(default_factory=list)

    def lost(self, token_ns: Sequence[int], resumed_ns: int) -> tuple[LostTime, ...]:
        """The spans on engines that died, of a choice that had these tokens then and is received by another now."""
        starts = [start for start, _ in self.so_far.engines]
        resumed = [*starts[1:], resumed_ns]
        return tuple(
            LostTime(start, end, later, self._computed(token_ns, end))
            for (start, end), later in zip(self.so_far.engines, resumed, strict=True)
        )

    def _computed(self, token_ns: Sequence[int], until_ns: int) -> int:
        """Each token is made from all tokens before it."""
        count = sum(at_ns <= until_ns for at_ns in token_ns)
        return self.prompt_tokens + count - 1 if count else 0


@dataclass(frozen=True)
class Resumer:
    """Rebuilds the choices of one request. `stop_ids` and `max_tokens`: where its answers end; `vocabulary`: number of
    tokens; `make_stream`: makes the text of a choice from its tokens."""

    id: str
    prompt_tokens: int
    params: SamplingParams
    max_tokens: int
    stop_ids: frozenset[int]
    vocabulary: int
    make_stream: Callable[[], TextStream | NoText]
    streams: bool

    def resumed(self, so_far: RequestSoFar, now_ns: int) -> Resumption:
        """Raises `InvalidParameterError` for what no engine with this model and these parameters can have given."""
        made = Resumption(so_far, self.prompt_tokens)
        if len(so_far.choices) not in ((0, self.params.n) if self.streams else (0,)):
            raise _refused(f"has {len(so_far.choices)} choices; the request has {self.params.n}, and needs a stream")
        _check_times(so_far)
        for index, choice in enumerate(so_far.choices):
            self._check(index, choice)
            self._add(made, index, choice, now_ns)
        if so_far.choices and not made.begun:
            self._leave_end_to_output(made)
        return made

    def _leave_end_to_output(self, made: Resumption) -> None:
        """The end of the choice that ends last is not in a delta."""
        if not made.deltas or made.deltas[-1].ended is None:
            raise _refused("has the end of every choice; that of the last one comes with the output")
        made.deltas.pop()

    def _add(self, made: Resumption, index: int, choice: ChoiceSoFar, now_ns: int) -> None:
        """Puts the choice among those that have ended, or have begun."""
        begun = Begun(self.make_stream(), logprobs=self._logprobs(index, choice), token_ns=choice.token_ns)
        delta = begun.stream.push(choice.token_ids)
        end = choice.ended or self._end(choice.token_ids, delta)
        if delta.tokens != len(choice.token_ids):
            raise _refused(f"has tokens of choice {index} after its stop string")
        if end is None:
            begun.text = delta.text
            if len(begun.text) != choice.characters:
                gives = f"its tokens give {len(begun.text)}"
                raise _refused(f"has {choice.characters} characters of choice {index}; {gives}")
            made.begun[index] = begun
            return
        text = delta.text + begun.stream.flush()
        if rest := text[choice.characters :]:
            made.deltas.append(Delta(self.id, index, rest, ()))
        if choice.ended is None:
            made.deltas.append(Delta(self.id, index, "", (), ended=end))
        ended_ns = choice.ended_ns if choice.ended else now_ns
        made.done.append(self._output(made, index, choice, end, text, begun.logprobs, ended_ns))

    def _end(self, token_ids: Sequence[int], delta: TextDelta) -> ChoiceEnd | None:
        """How these tokens end the choice, in the order in which an engine looks: None if they do not."""
        if delta.stop is not None:
            return ChoiceEnd("stop", delta.stop)
        if token_ids and (last := token_ids[-1]) in self.stop_ids:
            return ChoiceEnd("stop", last if last in self.params.stop_token_ids else None)
        return ChoiceEnd("length", None) if len(token_ids) == self.max_tokens else None

    def _output(
        self,
        made: Resumption,
        index: int,
        choice: ChoiceSoFar,
        end: ChoiceEnd,
        text: str,
        logprobs: PackedLogprobs,
        ended_ns: int,
    ) -> ChoiceOutput:
        spans = made.lost(choice.token_ns, ended_ns)
        lost = tuple(
            LostTime(one.start_ns, min(one.end_ns, ended_ns), min(one.resumed_ns, ended_ns), one.tokens_lost)
            for one in spans
            if one.start_ns <= ended_ns
        )
        return ChoiceOutput(
            index=index,
            text=text,
            token_ids=list(choice.token_ids),
            finish_reason=end.finish_reason,
            timeline=Timeline(made.so_far.engines[0][0], token_ns=choice.token_ns, finish_ns=ended_ns, lost=lost),
            stop_reason=end.stop_reason,
            logprobs=None if self.params.logprobs is None else logprobs,
            error=end.error,
        )

    # --- checks ---------------------------------------------------------------------------------------------------

    def _check(self, index: int, choice: ChoiceSoFar) -> None:
        ids, last = choice.token_ids, self.vocabulary - 1
        if len(ids) > self.max_tokens or len(ids) != len(choice.token_ns):
            counts = f"{len(ids)} tokens of choice {index} and {len(choice.token_ns)} times"
            raise _refused(f"has {counts}; there has to be one for each, for at most {self.max_tokens}")
        if ids and not 0 <= min(ids) <= max(ids) <= last:
            raise _refused(f"has token {min(ids) if min(ids) < 0 else max(ids)}; the vocabulary is 0 to {last}")
        if not self.stop_ids.isdisjoint(ids[:-1]):
            raise _refused(f"has tokens of choice {index} after one that ended it")

    def _logprobs(self, index: int, choice: ChoiceSoFar) -> PackedLogprobs:
        wanted = 0 if self.params.logprobs is None else len(choice.token_ids)
        try:
            parts = map(PackedLogprobs.from_bytes, choice.packed_logprobs)
            made = PackedLogprobs(entry for part in parts for entry in part)
        except ValueError as error:
            raise _refused(f"has log-probabilities that cannot be read: {error}") from None
        if len(made) != wanted:
            raise _refused(f"has {len(made)} log-probabilities of choice {index}; it needs {wanted}")
        return made


def _check_times(so_far: RequestSoFar) -> None:
    """Latency breakdowns need them in order."""
    times = [at_ns for span in so_far.engines for at_ns in span]
    if not times or any(later < earlier for earlier, later in pairwise(times)):
        raise _refused(f"has times of engines that are not in order: {times}")


def _refused(problem: str) -> InvalidParameterError:
    return InvalidParameterError(f"so_far {problem}", "so_far")
