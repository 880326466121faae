"""A scheduler hosted on a modelled clock: who comes when, what each step was, when each token left."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from support.checked_executor import CheckedExecutor, answer_alone, step_ns_of
from support.plan_rules import check_plan

from twostep.core.blocks import prompt_hashes, root_hash
from twostep.core.cost import Cost, StepShape, Terms
from twostep.core.kv_cache import BlockGroup
from twostep.core.loop import Abort, Command, EngineLoop
from twostep.core.plan import Finished, Plan, Preemption, Resolved, Step, StepResult
from twostep.core.policies import TokenBudget
from twostep.core.request import FinishReason, Request
from twostep.core.scheduler import Scheduler, SchedulerConfig

ROOT = root_hash("checked", "test")
MS = 1_000_000


class TrueModel:
    """Knows what the checked executor's steps take, and learns nothing."""

    def estimate(self, shape: StepShape) -> Cost:
        step_ns = step_ns_of(shape)
        return Cost(step_ns, step_ns, Terms(linear=step_ns))

    def observe(self, shape: StepShape, measured_ns: int) -> None:
        pass


def config(**changes: Any) -> SchedulerConfig:
    """A roomy one; `blocks` is short for one group of full attention."""
    blocks = changes.pop("blocks", 400)
    usual = {
        "groups": (BlockGroup(blocks),),
        "max_num_seqs": 16,
        "max_num_batched_tokens": 4096,
        "max_model_len": 4096,
        "chunking": TokenBudget(256),
    }
    return SchedulerConfig(**{**usual, **changes})


def text(tokens: int, seed: int = 0) -> list[int]:
    """Token ids that differ from those of another seed from the first one on."""
    return [(seed * 83 + 7 * i + i * i // 5) % 256 for i in range(tokens)]


@dataclass
class Life:
    """What became of one sequence. Times in ns of the modelled clock."""

    request: Request
    prompt: Sequence[int]
    choice: int
    arrival_ns: int
    token_ns: list[int] = field(default_factory=list)
    finished: Finished | None = None

    @property
    def ttft_ns(self) -> int:
        return self.token_ns[0] - self.arrival_ns

    @property
    def itl_ns(self) -> list[int]:
        return [after - before for before, after in zip(self.token_ns, self.token_ns[1:], strict=False)]


class Session:
    """Hosts an `EngineLoop` whose executor is the checked one; all rules are checked after each step."""

    def __init__(
        self,
        config: SchedulerConfig,
        executor: CheckedExecutor | None = None,
        scheduler: type[Scheduler] | None = None,
    ) -> None:
        self.scheduler = (scheduler or Watched)(config, TrueModel())
        self.executor = executor or CheckedExecutor(config.groups, stops=False)
        self.lives: dict[int, Life] = {}
        self.steps: list[Step] = []
        self.preemptions: list[Preemption] = []
        self.refusals: dict[str, str] = {}
        self.clock_ns = 0
        self._ahead: list[tuple[int, int, Command]] = []
        self._prompts: dict[str, Sequence[int]] = {}
        self._heard_until = 0
        self.loop = EngineLoop(self.scheduler, self.executor, clock=self, inbox=self, observer=self)

    # --- what the test says ---------------------------------------------------------------------------------------

    def ask(self, prompt: Sequence[int], max_tokens: int = 4, *, at_ns: int = 0, keep: bool = True, **more: Any) -> str:
        """A request comes at that time; returns its id. `keep`: its KV may be found and kept."""
        name = str(len(self._prompts))
        hashes = prompt_hashes(more.pop("root", ROOT), prompt) if keep else ()
        self._prompts[name] = prompt
        self._later(at_ns, Request(name, len(prompt), max_tokens, hashes, **more))
        return name

    def abort(self, request_id: str, at_ns: int, choice: int | None = None) -> None:
        self._later(at_ns, Abort(request_id, choice))

    def _later(self, at_ns: int, command: Command) -> None:
        self._ahead.append((at_ns, len(self._ahead), command))
        self._ahead.sort(key=lambda entry: entry[:2])

    def run(self, most_turns: int = 20_000) -> "Session":
        """Until all have ended."""
        for _ in range(most_turns):
            if not self.turn() and not self._ahead and self.loop.next_wake_ns is None:
                assert self.scheduler.idle, "somebody waits and nothing runs"
                return self
        raise AssertionError("no end")

    def turn(self) -> bool:
        worked = self.loop.turn()
        self.scheduler.check()
        if not worked:
            at_ns = [self._ahead[0][0]] if self._ahead else []
            at_ns += [self.loop.next_wake_ns] if self.loop.next_wake_ns is not None else []
            self.clock_ns = max(self.clock_ns, min(at_ns, default=0))
        return worked

    def life(self, request_id: str, choice: int = 0) -> Life:
        [life] = [life for life in self.lives.values() if (life.request.id, life.choice) == (request_id, choice)]
        return life

    def answer(self, request_id: str, choice: int = 0) -> list[int]:
        [number] = [n for n, life in self.lives.items() if (life.request.id, life.choice) == (request_id, choice)]
        return self.executor.tokens[number][len(self.lives[number].prompt) :]

    def check_answers(self, *, stops: bool = False) -> None:
        """Everybody's answer is what it would have been alone."""
        for life in self.lives.values():
            if life.finished and life.finished.reason in (FinishReason.STOP, FinishReason.LENGTH):
                alone = answer_alone(life.prompt, life.choice, life.request.max_tokens, stops=stops)
                assert self.answer(life.request.id, life.choice) == alone

    # --- clock, inbox, observer -----------------------------------------------------------------------------------

    def now(self) -> int:
        return self.clock_ns

    def receive(self) -> Iterable[Command]:
        """Also what comes while a step runs."""
        while self._ahead and self._ahead[0][0] <= max(self.clock_ns, self._heard_until):
            at_ns, _, command = self._ahead.pop(0)
            self.clock_ns = max(self.clock_ns, at_ns)
            yield command

    def added(self, request: Request, numbers: tuple[int, ...], now: int) -> None:
        for choice, number in enumerate(numbers):
            prompt = self._prompts[request.id]
            self.lives[number] = Life(request, prompt, choice, now)
            self.executor.add(number, prompt, choice, request.hashes)

    def refused(self, request: Request, why: str, now: int) -> None:
        self.refusals[request.id] = why

    def began(self, step: Step, now: int) -> None:
        self.steps.append(step)
        self._began, self._heard_until = now, now + step_ns_of(step.plan.shape)

    def ended(self, step: Step, result: StepResult, resolved: Resolved, now: int) -> None:
        self.clock_ns, self._heard_until = max(self.clock_ns, self._began + result.step_ns), 0
        for number, count in self.executor.sampled.items():
            if self.lives[number].finished is None:
                self.lives[number].token_ns += [self.clock_ns] * count
        self.preemptions += [*step.plan.preemptions, *resolved.preempted]
        self._note(resolved.finished)

    def aborted(self, finished: tuple[Finished, ...], now: int) -> None:
        self._note(finished)

    def catch_up(self) -> None:
        pass

    def _note(self, finished: tuple[Finished, ...]) -> None:
        for end in finished:
            assert self.lives[end.number].finished is None, "ended twice"
            self.lives[end.number].finished = end


class Watched(Scheduler):
    """A scheduler whose every plan is held against the rules before it is carried out."""

    def advance(self, plan: Plan) -> Step:
        check_plan(self, plan)
        return super().advance(plan)
