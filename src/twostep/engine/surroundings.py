"""The engine's clock, inbox and observer of the loop."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from time import monotonic_ns

from twostep.core.cost import CostModel
from twostep.core.loop import Command
from twostep.core.plan import Finished, Resolved, Step, StepResult
from twostep.core.request import Request
from twostep.engine.collector import Collector
from twostep.engine.step.executor import KernelExecutor
from twostep.engine.text.answer import Answer
from twostep.engine.timing.timekeeper import StepEnd
from twostep.model.tokenizer import Tokenizer


@dataclass(frozen=True)
class Submission:
    """A request with what the scheduler need not know of it."""

    request: Request
    prompt: Sequence[int]
    answers: Sequence[Answer]
    """One a choice; made before the scheduler hears of the request, so that what cannot be made costs nobody else."""
    streams: bool


class EngineSurroundings:
    """Implements `Clock`, `Inbox` and `Observer` of `core.loop` in one process. Other threads may fill the inbox."""

    def __init__(self, executor: KernelExecutor, tokenizer: Tokenizer | None, cost: CostModel) -> None:
        self._inbox: deque[Command] = deque()
        self.collector = Collector(tokenizer, self._inbox.append, cost)
        self._executor = executor
        self._submitted: dict[str, Submission] = {}
        self._began_ns = 0

    def submit(self, submission: Submission) -> None:
        """Puts a request into the inbox."""
        self._submitted[submission.request.id] = submission
        self._inbox.append(submission.request)

    def ask(self, command: Command) -> None:
        """Puts a command into the inbox."""
        self._inbox.append(command)

    @property
    def has_input(self) -> bool:
        """Whether there are commands that the loop has not received yet."""
        return bool(self._inbox)

    # --- for the loop ---------------------------------------------------------------------------------------------

    def now(self) -> int:
        return monotonic_ns()

    def receive(self) -> Iterable[Command]:
        while self._inbox:
            yield self._inbox.popleft()

    def added(self, request: Request, numbers: tuple[int, ...], now: int) -> None:
        submission = self._submitted.pop(request.id)
        answers = dict(zip(numbers, submission.answers, strict=True))
        for number, answer in answers.items():
            self._executor.add(number, answer)
        self.collector.follow(request.id, submission.prompt, answers, now, streams=submission.streams)

    def refused(self, request: Request, why: str, now: int) -> None:
        submission = self._submitted.pop(request.id)
        self.collector.refused(request.id, submission.prompt, why, now)

    def began(self, step: Step, now: int) -> None:
        self._began_ns = now

    def ended(self, step: Step, result: StepResult, resolved: Resolved, now: int) -> None:
        self._drop(resolved.finished)
        given, starved_ns = self._executor.given, self._executor.starved_ns
        self.collector.note(StepEnd(step, given, result, starved_ns, resolved, self._began_ns, now))

    def aborted(self, finished: tuple[Finished, ...], now: int) -> None:
        self._drop(finished)
        self.collector.note_aborted(finished, now)

    def catch_up(self) -> None:
        self.collector.catch_up()

    def _drop(self, finished: Iterable[Finished]) -> None:
        for number, _, _ in finished:
            self._executor.drop(number)
