"""`twostep bench --offline`: runs a workload on the engine in this process, without HTTP.

The schedule and the figures are the same as for a server.
"""

import argparse
import asyncio
import secrets
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from itertools import islice
from time import monotonic_ns

from twostep.bench.client.outcome import Failure, FailureKind, Outcome
from twostep.bench.load.prompts import IdSource
from twostep.bench.load.run_record import End, RunRecord, Server
from twostep.bench.load.workload_run import LiveLine, RunProgress, sent
from twostep.bench.report.result import EngineStep
from twostep.engine.outputs import ChoiceOutput, RequestOutput, Timeline
from twostep.engine.params import SamplingParams
from twostep.errors import InvalidParameterError
from twostep.llm import LLM
from twostep.store.catalogue import DEFAULT_MODEL
from twostep.workload.definition import Workload, WorkloadRequest
from twostep.workload.schedule import Closed, Mode, schedule

SHOW_NS = 250_000_000
IDLE_S = 0.05
"""Between checks of the stop event while idle."""


class Offline:
    """One engine for all runs. Prompts are token ids, except where the workload has text."""

    def __init__(self, options: argparse.Namespace, settings: dict[str, object]) -> None:
        self._options = options
        self._llm = LLM(options.model or DEFAULT_MODEL, **settings)

    def close(self) -> None:
        self._llm.close()

    async def run(
        self, workload: Workload, mode: Mode, stop: asyncio.Event
    ) -> tuple[RunRecord, tuple[EngineStep, ...]]:
        """Raises `InvalidParameterError` if a request does not fit the engine."""
        self._check(workload)
        salt = self._options.salt or secrets.token_hex(4)
        warm = Workload([*islice(workload.requests, self._options.warmup)], workload.block_tokens)
        await _Run(self._llm, warm, Closed(1), self._prompts(warm, f"{salt}/warm"), None).run(stop)
        prompts = self._prompts(workload, salt)
        started_at = datetime.now(UTC)
        run = _Run(self._llm, workload, mode, prompts, LiveLine())
        end = await run.run(stop, self._options.time_limit_s)
        record = RunRecord(
            server=Server("offline", "engine", self._llm.model.path.stem),
            workload=workload.name,
            source=workload.source,
            mode=mode,
            started_at=started_at,
            outcomes=sent(run.outcomes()),
            end=end,
            lateness=None,  # requests that arrive during a step are read after it, as in a server
            lag=None,
            salt=salt,
            warmup=self._options.warmup,
        )
        return record, tuple(steps_of(run.timelines, run.origin_ns))

    def _check(self, workload: Workload) -> None:
        longest = self._llm.engine.sizing.longest
        for number, one in enumerate(workload.requests):
            tokens = one.input_tokens + one.output_tokens
            if tokens > longest:
                problem = f"request {number} has {tokens} tokens; the engine accepts at most {longest}"
                raise InvalidParameterError(f"{problem}: clip with --max-input and --max-output", "workload")

    def _prompts(self, workload: Workload, salt: str) -> list[Sequence[int]]:
        """Made before the run, so that making them does not disturb it."""
        source = IdSource(self._llm.model.network.shape.vocab, workload.block_tokens, salt)
        made = (source.prompt(number, one) for number, one in enumerate(workload.requests))
        return [self._llm.model.tokenizer.encode(one, special=True) if isinstance(one, str) else one for one in made]


class _Run:
    """Runs one workload. Requests are submitted between two steps, as by the engine of a server."""

    def __init__(
        self, llm: LLM, workload: Workload, mode: Mode, prompts: Sequence[Sequence[int]], line: LiveLine | None
    ) -> None:
        self.origin_ns = monotonic_ns()
        self.timelines: list[Timeline] = []
        self._engine, self._requests, self._prompts, self._line = llm.engine, workload.requests, prompts, line
        self._schedule = schedule(workload.requests, mode)
        self._sent: dict[int, tuple[int, int]] = {}
        """For each number, when the request was due and when it was submitted."""
        self._outcomes: dict[int, Outcome] = {}
        self._shown_ns = self._tokens = 0

    async def run(self, stop: asyncio.Event, limit_s: float | None = None) -> End:
        self.origin_ns = monotonic_ns()
        try:
            while len(self._outcomes) < len(self._requests):
                if stop.is_set():
                    return End.INTERRUPTED
                if limit_s is not None and self._now() > limit_s * 1e9:
                    return End.LIMIT
                await self._turn()
            return End.WHOLE
        finally:
            self._engine.abort_all()
            if self._line:
                self._line.clear()

    def outcomes(self) -> tuple[Outcome, ...]:
        """The outcomes of all submitted requests, ordered by number."""
        now = self._now()
        return tuple(self._outcomes.get(number) or self._cut(number, now) for number in sorted(self._sent))

    async def _turn(self) -> None:
        """Runs one step, or pauses if there is none."""
        for number, due_ns in self._schedule.take(self._now()):
            self._sent[number] = due_ns, self._now()
            asked = SamplingParams(max_tokens=self._requests[number].output_tokens, temperature=0, ignore_eos=True)
            self._engine.submit(self._prompts[number], asked, id=str(number))
        events = self._engine.turn()
        for event in events:
            if isinstance(event, RequestOutput):
                self._ended(int(event.id), event)
        self._show()
        await asyncio.sleep(0 if self._engine.outstanding else self._pause_s())

    def _pause_s(self) -> float:
        next_ns = self._schedule.next_ns()
        return 0 if next_ns is None else min(IDLE_S, max(0, next_ns - self._now()) / 1e9)

    def _ended(self, number: int, output: RequestOutput) -> None:
        [choice] = output.choices
        self.timelines.append(choice.timeline)
        self._tokens += len(choice.token_ids)
        self._outcomes[number] = self._outcome(number, choice, output)
        self._schedule.ended(number, self._outcomes[number].ended_ns)

    def _outcome(self, number: int, choice: ChoiceOutput, output: RequestOutput) -> Outcome:
        due_ns, sent_ns = self._sent[number]
        asked, line = self._requests[number], choice.timeline
        ended_ns = self._now() if line.finish_ns is None else line.finish_ns - self.origin_ns
        failed = None if choice.error is None else Failure(FailureKind.ERROR, choice.error)
        return Outcome(
            number=number,
            due_ns=due_ns,
            sent_ns=sent_ns,
            token_ns=tuple(at_ns - self.origin_ns for at_ns in line.token_ns),
            ended_ns=max(ended_ns, sent_ns),
            asked_input_tokens=asked.input_tokens,
            asked_output_tokens=asked.output_tokens,
            input_tokens=len(output.prompt_token_ids),
            cached_tokens=output.cached_tokens,
            failure=failed,
        )

    def _cut(self, number: int, now: int) -> Outcome:
        due_ns, sent_ns = self._sent[number]
        asked: WorkloadRequest = self._requests[number]
        cancelled = Failure(FailureKind.CANCELLED, "the run was stopped")
        return Outcome(number, due_ns, sent_ns, (), now, asked.input_tokens, asked.output_tokens, failure=cancelled)

    def _show(self) -> None:
        now = self._now()
        if self._line and now - self._shown_ns > SHOW_NS:
            self._shown_ns = now
            count, done = len(self._requests), len(self._outcomes)
            self._line(RunProgress(count, len(self._sent), done, 0, self._tokens, now / 1e9))

    def _now(self) -> int:
        return monotonic_ns() - self.origin_ns


def steps_of(timelines: Iterable[Timeline], origin_ns: int) -> list[EngineStep]:
    """Reconstructs engine steps from timelines: a step ends when its tokens arrive, and a step that only decodes starts
    when the previous one ends."""
    prefill, decode, starts = Counter[int](), Counter[int](), dict[int, int]()
    for line in timelines:
        for chunk in line.chunks:
            prefill[chunk.end_ns] += chunk.tokens
            starts[chunk.end_ns] = chunk.start_ns
        decode.update(line.token_ns[1:])
    steps, before_ns = list[EngineStep](), 0
    for end_ns in sorted(prefill.keys() | decode.keys()):
        start_ns = max(starts.get(end_ns, before_ns), before_ns)
        steps.append(EngineStep(start_ns - origin_ns, end_ns - origin_ns, prefill[end_ns], decode[end_ns]))
        before_ns = end_ns
    return steps
