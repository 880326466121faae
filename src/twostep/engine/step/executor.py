"""Computes the scheduler's steps with the kernels: arrays, forward, samples, and what that means for each answer."""

from collections.abc import Callable, Iterator
from time import perf_counter_ns
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from twostep.core.kv_cache import BlockGroup
from twostep.core.loop import Capabilities
from twostep.core.plan import Chunk, SliceOutcome, Step, StepResult
from twostep.core.request import FinishReason
from twostep.engine.step.rows import BlockTables, DecodeRows
from twostep.engine.step.worker import Worker
from twostep.engine.text.answer import Answer
from twostep.errors import SamplingError
from twostep.kernels.sampling import Sampled, Sampler
from twostep.kernels.step import Executor, StepArrays, StepCancelledError

Choice = Sampled | SamplingError


Asked = TypeVar("Asked")
Result = TypeVar("Result")


class CoreStarvationMeter:
    """Watches kernels that keep `threads` threads busy; 0: the number is unknown, and nothing is estimated.

    `lacked_ns`: how long those threads had no core inside steps so far, added up over all threads.
    """

    def __init__(self, threads: int, lacked_ns: Callable[[], int]) -> None:
        self._threads, self._lacked_ns = threads, lacked_ns

    def measure(self, compute: Callable[[Asked], Result], asked: Asked) -> tuple[Result, int]:
        """Returns the result of `compute`, and how long its threads had no core on average, in ns.

        A thread that is left out because others use its core (`native/attendance.h`) has none. It is tried again at
        least every two seconds, so for that long the value may exceed what the cores lack at the moment.
        """
        if not self._threads:
            return compute(asked), 0
        before_ns = self._lacked_ns()
        result = compute(asked)
        return result, (self._lacked_ns() - before_ns) // self._threads


class Computed(NamedTuple):
    """What the kernels gave for a step. `choices`: one for each sampled sequence, in the order of `Work.sampled`."""

    elapsed_ns: int
    choices: list[Choice]
    starved_ns: int = 0
    """See `CoreStarvationMeter.measure`."""
    failed: BaseException | None = None


class Work(NamedTuple):
    """A step made ready for the kernels. The last of `sampled` are forks: their rows are those of `fork_rows`."""

    step: Step
    arrays: StepArrays
    sampled: list[int]
    answers: list[Answer]
    """Of `sampled`; kept here, since one that is aborted meanwhile is dropped."""
    fork_rows: list[int]


class SampleResult(NamedTuple):
    """A token that a step gave to a sequence, or why it gave none."""

    number: int
    choice: Choice


class KernelExecutor:
    """A `StepExecutor` over real kernels. Steps are computed beside the caller if `overlap`, else within `poll`."""

    def __init__(
        self,
        kernels: Executor,
        sampler: Sampler,
        slots: int,
        blocks: int,
        *,
        overlap: bool,
        threads: int,
        lacked_ns: Callable[[], int],
        notify: Callable[[], None] | None = None,
    ) -> None:
        """`blocks`: of the longest sequence. `threads`: of the kernels, 0 if not known. `lacked_ns`: see
        `CoreStarvationMeter`. `notify`: called in another thread after each step that is computed there, so that a host
        can wait for its end beside other things."""
        self.answers: dict[int, Answer] = {}
        self.given: list[SampleResult] = []
        """Tokens of the step that finished last."""
        self._kernels, self._sampler, self._cores = kernels, sampler, CoreStarvationMeter(threads, lacked_ns)
        self._tables = BlockTables(slots, blocks, len(kernels.capabilities.layout.groups))
        self._rows = DecodeRows(slots)
        memory = zip(kernels.capabilities.blocks, kernels.capabilities.layout.windows, strict=True)
        self.capabilities = Capabilities(tuple(BlockGroup(*group) for group in memory))
        """Neither drafts nor KV from elsewhere, though the kernels could: rows and answers do not take them yet."""
        self._work: Work | None = None
        self._worker = Worker(self._compute, overlap=overlap, notify=notify)

    def add(self, number: int, answer: Answer) -> None:
        """The tokens of a sequence that may be planned from now on."""
        self.answers[number] = answer

    def drop(self, number: int) -> None:
        """The sequence has ended."""
        del self.answers[number]
        self._tables.drop(number)

    def close(self) -> None:
        """Ends the thread beside the caller, after its step."""
        self._worker.close()

    # --- a step begins --------------------------------------------------------------------------------------------

    def start(self, step: Step) -> None:
        """See `StepExecutor.start`."""
        for number in step.left:
            self._rows.leave(number)
        for preemption in step.plan.preemptions:
            self._tables.drop(preemption.number)
        for granted in step.granted:
            self._tables.grant(granted)
        for number, position in step.joined:
            token = self.answers[number].tokens[position]
            self._rows.join(number, token, position, self._tables.start(number))
        self._work = self._made_ready(step)
        self._worker.start(self._work)
        for answer in self._work.answers:
            answer.prepare()

    def _made_ready(self, step: Step) -> Work:
        chunks = step.plan.chunks
        arrays = self._rows.step(self._tables.flat, (self._piece(chunk) for chunk in chunks))
        sampled = [*self._rows.numbers, *(chunk.number for chunk in chunks if chunk.samples)]
        forks = [(fork, sampled.index(chunk.number)) for chunk in chunks for fork in chunk.forks]
        sampled += [fork for fork, _ in forks]
        return Work(step, arrays, sampled, [self.answers[number] for number in sampled], [row for _, row in forks])

    def _piece(self, chunk: Chunk) -> tuple[NDArray[np.int32], int, int, bool]:
        tokens = self.answers[chunk.number].tokens[chunk.start : chunk.start + chunk.tokens]
        return tokens, chunk.start, self._tables.start(chunk.number), chunk.samples

    # --- beside the caller ----------------------------------------------------------------------------------------

    def _compute(self, work: Work) -> Computed:
        """Forward, copies, samples. Reads answers, changes none: the caller does that in `poll`."""
        started = perf_counter_ns()
        try:
            choices, starved_ns = self._forward(work)
        except (MemoryError, StepCancelledError) as error:
            return Computed(perf_counter_ns() - started, [], failed=error)
        return Computed(perf_counter_ns() - started, choices, starved_ns)

    def _forward(self, work: Work) -> tuple[list[Choice], int]:
        """Choices, and how long the kernels had no core: in `forward_arrays`, since between calls threads may sleep."""
        if not len(work.arrays.tokens):
            return [], 0
        logits, starved_ns = self._cores.measure(self._kernels.forward_arrays, work.arrays)
        for copied in work.step.copied:
            self._kernels.copy_block(copied.source, copied.target, copied.group)
        rows = [answer.row() for answer in work.answers]
        own = len(rows) - len(work.fork_rows)
        choices = self._sampler.sample(logits, rows[:own])
        if work.fork_rows:
            choices += self._sampler.sample(np.ascontiguousarray(logits[work.fork_rows]), rows[own:])
        return choices, starved_ns

    # --- a step ends ----------------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Until the step under way, if there is one, has ended."""
        if self._work is not None:
            self._worker.wait()

    def poll(self) -> StepResult | None:
        """See `StepExecutor.poll`. Running out of memory blames the widest slice; all others go on."""
        work = self._work
        if work is None or not self._worker.done:
            return None
        computed = self._worker.result()
        self._work = None
        if computed.failed is not None:
            return self._failed(work, computed.elapsed_ns, computed.failed)
        chosen = zip(work.sampled, work.answers, computed.choices, strict=True)
        self.given = [SampleResult(number, answer.explained(choice)) for number, answer, choice in chosen]
        outcomes: dict[int, SliceOutcome] = {}
        hashes: dict[int, tuple[bytes, ...]] = {}
        for number, choice in self.given:
            self._take(number, choice, outcomes, hashes)
        standing = len(self._rows.numbers)
        self._rows.advance([getattr(choice, "token", 0) for choice in computed.choices[:standing]])
        return StepResult(computed.elapsed_ns, outcomes, hashes, starved_ns=computed.starved_ns)

    def _failed(self, work: Work, elapsed_ns: int, error: BaseException) -> StepResult:
        """All who were in the step lose their slots, hence their tables too."""
        self.given = []
        for number in (*work.sampled, *(chunk.number for chunk in work.step.plan.chunks)):
            self._tables.drop(number)
        return StepResult(elapsed_ns, dict(_blamed(work, error)), failed=True)

    def _take(
        self, number: int, choice: Choice, outcomes: dict[int, SliceOutcome], hashes: dict[int, tuple[bytes, ...]]
    ) -> None:
        answer = self.answers.get(number)
        if answer is None:
            return
        if isinstance(choice, SamplingError):
            outcomes[number] = SliceOutcome(finished=FinishReason.FAILED)
            return
        if answer.append(choice.token):
            outcomes[number] = SliceOutcome(finished=FinishReason.STOP)
        if new := answer.new_hashes():
            hashes[number] = new


def _blamed(work: Work, error: BaseException) -> Iterator[tuple[int, SliceOutcome]]:
    """Who cannot go on after a failed step: nobody if it was cancelled, else whoever made it wide."""
    if isinstance(error, MemoryError):
        widest = max(work.step.plan.chunks, key=lambda chunk: chunk.tokens, default=None)
        yield (widest.number if widest else work.sampled[-1]), SliceOutcome(finished=FinishReason.FAILED)
