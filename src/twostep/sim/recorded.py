"""Replays a recorded run: the same loop gets the same input and must make the same plans, byte for byte."""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import NoReturn

from twostep.core.cost import CostModel
from twostep.core.loop import Capabilities, Command, EngineLoop
from twostep.core.plan import Finished, Plan, Resolved, Step, StepResult
from twostep.core.request import Request
from twostep.core.scheduler import Counters, Scheduler
from twostep.errors import RecordingError
from twostep.perf.linear import LinearCostModel
from twostep.perf.step_time_model import ModelDataError, StepCosts, StepTimeModel
from twostep.recording.codec import encode_plan, to_bytes
from twostep.recording.plan_words import item_words, plan_words
from twostep.recording.reader import Recording, Turn


@dataclass(frozen=True)
class Difference:
    """The first plan that differs from the recorded one. `recorded` and `replayed` are the `field` of each, as text."""

    line: int
    step: int
    field: str
    recorded: str
    replayed: str

    def words(self) -> str:
        return f"step {self.step}, {self.field}: recorded {self.recorded}; replayed {self.replayed}"


@dataclass
class Replay:
    """The result of a replay. Of the recorded `steps`, the first `same` had identical plans."""

    steps: int = 0
    same: int = 0
    difference: Difference | None = None
    requests: int = 0
    """Queued requests."""
    refused: int = 0
    prompt_tokens: int = 0
    """Prompt tokens of queued requests."""
    computed_tokens: int = 0
    output_tokens: int = 0
    started_ns: int | None = None
    ended_ns: int = 0
    counters: Counters = field(default_factory=Counters)
    prediction_errors: "array[float]" = field(default_factory=lambda: array("d"))
    """|predicted - measured| / measured of each predicted step; predictions include their margin."""

    @property
    def virtual_s(self) -> float:
        """From the first to the last recorded time."""
        return (self.ended_ns - (self.started_ns or 0)) / 1e9


def replay(recording: Recording, watch: Callable[[Turn], None] = lambda turn: None) -> Replay:
    """Replays up to the first difference. Calls `watch` with each turn that matched the recording.

    Raises `RecordingError` naming the line if the file is damaged or inconsistent.
    """
    seen = Replay()
    tape = _Tape(seen)
    turns = recording.turns()
    loop = None
    for turn in turns:
        with recording.naming(turn.line):
            tape.put(turn)
            loop = loop or _loop(recording, tape)
            _repeat(loop, tape)
        if seen.difference:
            break
        watch(turn)
    seen.steps += sum(turn.step is not None for turn in turns)
    return seen


def _loop(recording: Recording, tape: "_Tape") -> EngineLoop:
    try:
        scheduler = Scheduler(recording.header.settings.config(), _cost_model(recording))
    except ValueError as error:
        raise RecordingError(f"settings in line 1: {error}") from error
    tape.seen.counters = scheduler.counters
    return EngineLoop(scheduler, tape, clock=tape, inbox=tape, observer=tape)


def _cost_model(recording: Recording) -> CostModel:
    costs = recording.header.costs
    try:
        return LinearCostModel() if costs is None else StepTimeModel(StepCosts.from_json(costs))
    except ModelDataError as error:
        raise RecordingError(f"costs in line 1: {error}") from None


def _repeat(loop: EngineLoop, tape: "_Tape") -> None:
    """Replays one turn. An error of the scheduler means an invalid file: a run with such an error is not recorded."""
    try:
        served = loop.turn()
    except _DiffersError:
        return
    except (AssertionError, LookupError, ValueError) as error:
        raise RecordingError(f"inconsistent recording: {error or type(error).__name__}") from error
    tape.end(served)


class _DiffersError(Exception):
    """Ends the replay: the recorded result does not belong to a different plan."""


class _Tape:
    """Clock, inbox, observer and executor of the loop, which return the values recorded for the current turn."""

    capabilities = Capabilities(drafts=True, arrived_kv=True)

    def __init__(self, seen: Replay) -> None:
        self.seen = seen
        self._times_ns: Iterator[int] = iter(())
        self._received: Iterator[Sequence[Command]] = iter(())

    def put(self, turn: Turn) -> None:
        """Loads the next turn."""
        self._turn = turn
        self._times_ns, self._received = iter(turn.times_ns), iter((turn.before, turn.during))
        if self.seen.started_ns is None:
            self.seen.started_ns = turn.times_ns[0]
        self.seen.ended_ns = turn.times_ns[-1]
        self.seen.steps += turn.step is not None

    def end(self, served: bool) -> None:
        """Ends the turn; `served`: the loop ran a step."""
        step = self._turn.step
        if step and not served:
            self.seen.difference = Difference(self._turn.line, step.plan.step, "plan", plan_words(step.plan), "nothing")
        elif next(self._times_ns, None) is not None:
            raise RecordingError("times: more than the loop reads")

    # --- executor -------------------------------------------------------------------------------------------------

    def start(self, step: Step) -> None:
        recorded = self._turn.step
        if recorded is None:
            self._differ(Difference(self._turn.line, step.plan.step, "plan", "nothing", plan_words(step.plan)))
        if to_bytes(encode_plan(recorded.plan)) != to_bytes(encode_plan(step.plan)):
            self._differ(_difference(self._turn.line, recorded.plan, step.plan))
        self.seen.same += 1

    def poll(self) -> StepResult:
        assert self._turn.step is not None, "`start` goes first"
        return self._turn.step.result

    def _differ(self, difference: Difference) -> NoReturn:
        self.seen.difference = difference
        raise _DiffersError

    # --- clock, inbox, observer -----------------------------------------------------------------------------------

    def now(self) -> int:
        now = next(self._times_ns, None)
        if now is None:
            raise RecordingError("times: fewer than the loop reads")
        return now

    def receive(self) -> Iterable[Command]:
        return next(self._received)

    def added(self, request: Request, numbers: tuple[int, ...], now: int) -> None:
        self.seen.requests += 1
        self.seen.prompt_tokens += request.prompt_tokens

    def refused(self, request: Request, why: str, now: int) -> None:
        self.seen.refused += 1

    def began(self, step: Step, now: int) -> None:
        pass

    def ended(self, step: Step, result: StepResult, resolved: Resolved, now: int) -> None:
        plan = step.plan
        if result.failed:
            return
        self.seen.computed_tokens += plan.shape.tokens
        self.seen.output_tokens += _sampled(plan, result)
        if plan.predicted_ns is not None and result.step_ns:
            self.seen.prediction_errors.append(abs(plan.predicted_ns - result.step_ns) / result.step_ns)

    def aborted(self, finished: tuple[Finished, ...], now: int) -> None:
        pass

    def catch_up(self) -> None:
        pass


def _sampled(plan: Plan, result: StepResult) -> int:
    """Output tokens: one per slice that samples, plus accepted drafts."""
    slices = plan.decoding + sum(1 + len(chunk.forks) for chunk in plan.chunks if chunk.samples)
    return slices + sum(outcome.tokens - 1 for outcome in result.outcomes.values())


def _difference(line: int, recorded: Plan, replayed: Plan) -> Difference:
    """The first differing field; `changes`, the least informative one, is compared last."""
    names = sorted((item.name for item in fields(Plan)), key=lambda name: name == "changes")
    name = next(name for name in names if getattr(recorded, name) != getattr(replayed, name))
    words = [_field_words(getattr(plan, name)) for plan in (recorded, replayed)]
    return Difference(line, recorded.step, name, *words)


def _field_words(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(item_words, value)) or "none"
    return str(value)
