"""The books: which sequences there are, where each stands, which blocks it has. `planning` decides; here it is done.

    scheduler.add(request, now)
    plan = scheduler.plan(now)              # reads only
    step = scheduler.advance(plan)          # counts move, blocks are taken: what an executor needs
    resolved = scheduler.resolve(result)    # what the step gave: who ended, who has drafts to verify
    scheduler.abort(request_id)

One step is under way at a time, between `advance` and `resolve`. The next plan may be made meanwhile; it is void if the
step's end, an arrival or an abort changes what it was made from (`changes` counts that).
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from twostep.core.invariants import check_books
from twostep.core.kv_cache import BlockGroup, Copied, Counts, Granted, KvCache
from twostep.core.plan import Chunk, Finished, Outcome, Plan, Preemption, Resolved, Step, StepResult
from twostep.core.planning import MOST_IN_PREFILL, Planner
from twostep.core.policies import Batching, Chunking, Continuous, Order, by_priority, fcfs
from twostep.core.reasons import Reason, Why
from twostep.core.request import BLOCK_TOKENS, FinishReason, Request, Sequence, Stage
from twostep.core.standing import Standing
from twostep.core.waiting import WaitingQueue

MOST_PRESSURE = 5
"""Steps out of blocks that widen the reserve; each doubles it, each sequence that ends halves it."""


class NeverFitsError(ValueError):
    """A request that could not be served even alone: says which number is too large, and what is allowed."""


@dataclass(frozen=True)
class SchedulerConfig:
    """Frozen settings. Raises `ValueError` for those that contradict each other.

    `seats`: sequences that run at a time. `step_tokens`: most tokens of a step, what the executor's workspace holds.
    `context_tokens`: most tokens of a sequence. `watermark`: share of the blocks that admission leaves free.
    """

    groups: tuple[BlockGroup, ...]
    seats: int
    step_tokens: int
    context_tokens: int
    chunking: Chunking
    batching: Batching = field(default_factory=Continuous)
    order: Order = by_priority
    priority_preempts: bool = False
    watermark: float = 0.01

    def __post_init__(self) -> None:
        least = least_step_tokens(self.seats, self.chunking)
        if not self.groups or min(group.blocks for group in self.groups) < 1 or self.seats < 1:
            raise ValueError(f"{self.seats} seats, {self.groups}: at least one seat, and a block in each group")
        if self.priority_preempts and self.order is fcfs:
            raise ValueError("priority_preempts needs an order by priority: under fcfs the preempted come back first")
        if self.step_tokens < least:
            shares = least - self.seats
            needed = f"{least}: {self.seats} seats that decode, {shares} for prompts in mid-prefill"
            raise ValueError(f"a step of {self.step_tokens} tokens is too narrow; it needs at least {needed}")


def least_step_tokens(seats: int, chunking: Chunking) -> int:
    """Tokens that a step has to hold at least: one for each sequence that decodes, and a share for each prompt in
    mid-prefill."""
    return seats + chunking.least_tokens * MOST_IN_PREFILL


@dataclass(slots=True)
class Counters:
    """Totals since the start, in tokens where the name says so."""

    steps: int = 0
    admitted: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    preempted_tokens: int = 0
    finished: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))


class Scheduler:
    """Decides each step from counts and hashes. Same calls, same plans, byte for byte."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.cache = KvCache(config.groups, config.step_tokens)
        self.counters = Counters()
        self.waiting = WaitingQueue(config.order)
        self.standing = Standing()
        self.prefill: dict[int, Sequence] = {}
        self.pending: dict[int, Sequence] = {}
        self.seated: list[tuple[tuple[int, int], Sequence]] = []
        self.live: dict[int, Sequence] = {}
        self.changes = 0
        self.batch_left = 0
        self._numbers: dict[str, list[int]] = {}
        self._next_number = 1
        self._pressure = 0
        self._under_way: Plan | None = None
        self._left: list[int] = []
        self._joined: dict[int, Sequence] = {}

    # --- questions ------------------------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Seats taken."""
        return len(self.standing) + len(self.prefill) + len(self.pending)

    @property
    def idle(self) -> bool:
        """Whether nobody is left to serve."""
        return not self.live

    def computed(self, seq: Sequence) -> int:
        """Tokens of `seq` whose KV is in the cache, or will be when the step under way ends."""
        return self.standing.computed(seq) if seq.stage is Stage.STANDING else seq.computed

    def kept_free(self) -> Counts:
        """Blocks that admission leaves to those that run: the watermark, wider after preemptions."""
        blocks = [group.blocks for group in self.config.groups]
        marks = [max(1, int(count * self.config.watermark)) for count in blocks]
        return tuple(min(count // 4, mark << self._pressure) for count, mark in zip(blocks, marks, strict=True))

    def plan(self, now: int) -> Plan:
        """The next step, decided at time `now` (ns). Changes nothing."""
        return Planner(self, now).plan()

    # --- coming and going -----------------------------------------------------------------------------------------

    def add(self, request: Request, now: int) -> tuple[int, ...]:
        """Queues a request; returns the numbers of its sequences, one a choice.

        Raises `NeverFitsError` if it could not be served even alone, `ValueError` if its id is in use.
        """
        self.check_fits(request)
        numbers = range(self._next_number, self._next_number + request.choices)
        self._next_number = numbers.stop
        choices = [
            Sequence(n, now, request, choice, request.prompt_tokens, hashes=list(request.hashes))
            for choice, n in enumerate(numbers)
        ]
        first, *others = choices
        first.siblings, first.arrived = others, request.arrived_tokens
        for other in others:
            other.stage = Stage.ATTACHED
        self.live.update(zip(numbers, choices, strict=True))
        self._numbers[request.id] = list(numbers)
        self.waiting.put(first)
        self.changes += 1
        return tuple(numbers)

    def check_fits(self, request: Request) -> None:
        """Raises as `add` does; changes nothing."""
        if request.id in self._numbers:
            raise ValueError(f"request id {request.id!r} is in use")
        sizes = (request.prompt_tokens, request.max_tokens, request.choices)
        if min(sizes) < 1 or not 0 <= request.arrived_tokens < request.prompt_tokens:
            raise ValueError(f"prompt, answer and choices: at least one token each, and one left to compute: {request}")
        total = request.prompt_tokens + request.max_tokens
        sum_ = f"prompt of {request.prompt_tokens} + max_tokens of {request.max_tokens} = {total} tokens"
        if total > self.config.context_tokens:
            raise NeverFitsError(f"{sum_}; the context has {self.config.context_tokens}")
        if not self.config.chunking.least_tokens and total > self.config.step_tokens:
            raise NeverFitsError(f"{sum_}; prompts are not cut, and a step has {self.config.step_tokens}")
        for group, needed in zip(self.config.groups, self.cache.most_needed(total - 1), strict=True):
            if needed > group.blocks:
                raise NeverFitsError(f"{sum_} need {needed} KV blocks; the whole cache has {group.blocks}")

    def abort(self, request_id: str, choice: int | None = None) -> tuple[Finished, ...]:
        """Ends a request, or one choice of it. What it has computed in whole blocks stays findable.

        May be called while a step is under way: what that computes of it is dropped. Unknown ids are none of ours any
        more: nothing happens.
        """
        sequences = [self.live[n] for n in self._numbers.get(request_id, ())]
        asked = [seq for seq in sequences if choice in (None, seq.choice)]
        return tuple(self._end(seq, FinishReason.ABORTED, in_vain=self._under_way is not None) for seq in asked)

    # --- a step begins --------------------------------------------------------------------------------------------

    def advance(self, plan: Plan) -> Step:
        """Carries `plan` out on the books. Raises `ValueError` if it is void, or a step is under way."""
        if plan.changes != self.changes or self._under_way is not None:
            raise ValueError(f"plan of step {plan.step} is void, or the step before it has not ended")
        self.counters.steps += 1
        self.changes += 1
        self.batch_left = plan.open - len(plan.admissions)
        out_of_blocks = any(preemption.reason.why is Why.OUT_OF_BLOCKS for preemption in plan.preemptions)
        self._pressure = min(MOST_PRESSURE, self._pressure + out_of_blocks)
        for number, lost, _ in plan.preemptions:
            self._preempt(self.live[number])
            self.counters.preemptions += 1
            self.counters.preempted_tokens += lost
        for admission in plan.admissions:
            self.cache.adopt(self.live[admission.number], admission.cached, admission.start)
        granted = [*self._extend_standing(), *self._admit(plan)]
        left, joined = self._changes_of_standing()
        self.standing.advance()
        for seq in self.standing.finishing():
            self._leave_standing(seq)
            self._await(seq, seq.known - 1)
        changes = [change for chunk in plan.chunks for change in self._advance_chunk(chunk)]
        granted += [change for change in changes if isinstance(change, Granted)]
        copied = tuple(change for change in changes if isinstance(change, Copied))
        self._under_way = plan
        return Step(plan, left, joined, tuple(granted), copied)

    def _preempt(self, seq: Sequence) -> None:
        self._give_up_seat(seq)
        seq.computed = seq.arrived = seq.drafts = 0
        self.waiting.put(seq)

    def _extend_standing(self) -> Iterator[Granted]:
        for seq in self.standing.starting_a_block():
            if self.cache.capacity(seq) <= (computed := self.standing.computed(seq)):
                yield from self.cache.extend(seq, computed, 1)

    def _admit(self, plan: Plan) -> Iterator[Granted]:
        for admission in plan.admissions:
            seq = self.live[admission.number]
            self.waiting.remove(seq)
            self.prefill[seq.number] = seq
            seq.stage = Stage.PREFILL
            insort(self.seated, (seq.rank, seq))
            yield from self.cache.enter(seq, admission.start, seq.known)
            seq.computed = admission.start
            seq.arrived = 0
            self.counters.admitted += 1
            if seq.hashes:
                self.counters.prefix_queried_tokens += seq.known
                self.counters.prefix_hit_tokens += admission.cached * BLOCK_TOKENS

    def _changes_of_standing(self) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
        """Who left and who joined since the last step began."""
        left, self._left = tuple(self._left), []
        joined, self._joined = tuple((n, self.standing.computed(seq)) for n, seq in self._joined.items()), {}
        return left, joined

    def _advance_chunk(self, chunk: Chunk) -> Iterator[Granted | Copied]:
        """Its tokens count as computed; a sequence that has caught up decodes from the next step on."""
        seq = self.live[chunk.number]
        yield from self.cache.extend(seq, chunk.start, chunk.tokens)
        seq.computed = chunk.start + chunk.tokens
        seq.drafts = chunk.drafts
        seq.advanced = self.counters.steps
        if not chunk.samples:
            return
        del self.prefill[seq.number]
        siblings, seq.siblings = seq.siblings, []
        for sibling in siblings:
            if sibling.number in chunk.forks:
                yield from self.cache.fork(seq, sibling, seq.computed)
                sibling.computed = seq.computed
                insort(self.seated, (sibling.rank, sibling))
                self._caught_up(sibling)
            else:
                self.waiting.put(sibling)
        if chunk.drafts:
            self._await(seq, seq.known)
        else:
            self._caught_up(seq)

    def _caught_up(self, seq: Sequence) -> None:
        """Its last row will be sampled: it decodes, unless that gives its last token."""
        if seq.known + 1 >= seq.limit:
            self._await(seq, seq.known)
        else:
            seq.known += 1
            self.standing.join(seq)
            self._joined[seq.number] = seq

    def _await(self, seq: Sequence, known: int) -> None:
        """How many tokens it will know is settled when the step ends."""
        seq.known = known
        seq.stage = Stage.PENDING
        self.pending[seq.number] = seq

    def _leave_standing(self, seq: Sequence) -> None:
        self.standing.leave(seq)
        if self._joined.pop(seq.number, None) is None:
            self._left.append(seq.number)

    # --- a step ends ----------------------------------------------------------------------------------------------

    def resolve(self, result: StepResult) -> Resolved:
        """Takes in what the step under way gave. Outcomes of sequences that are gone are ignored."""
        plan = self._under_way
        if plan is None:
            raise ValueError("no step is under way")
        self._under_way = None
        if result.failed:
            return self._undo(plan, result)
        self._publish(plan, result)
        finished = [*self._settle_pending(result), *self._settle_others(result)]
        self.config.chunking.observe(plan.shape, result.step_ns)
        if self.waiting and (plan.chunks or result.hashes):
            self.changes += 1
        return Resolved(tuple(finished))

    def _publish(self, plan: Plan, result: StepResult) -> None:
        """Whole blocks that the step completed can be found from now on."""
        for number, hashes in result.hashes.items():
            if seq := self.live.get(number):
                seq.hashes.extend(hashes)
                self.cache.publish(seq, self.computed(seq))
        for chunk in plan.chunks:
            if (seq := self.live.get(chunk.number)) and seq.tables and not chunk.drafts:
                self.cache.publish(seq, chunk.start + chunk.tokens)

    def _settle_pending(self, result: StepResult) -> Iterator[Finished]:
        """Last tokens have come; of drafts it is known how many hold: KV beyond those is overwritten."""
        for seq in list(self.pending.values()):
            outcome = result.outcomes.get(seq.number, Outcome())
            seq.known += outcome.tokens
            seq.computed = seq.known - 1
            del self.pending[seq.number]
            self.changes += 1
            if outcome.finished or seq.known >= seq.limit:
                yield self._end(seq, outcome.finished or FinishReason.LENGTH)
            else:
                self._go_on(seq, outcome.drafts)

    def _settle_others(self, result: StepResult) -> Iterator[Finished]:
        for number, outcome in result.outcomes.items():
            if (seq := self.live.get(number)) is None:
                continue
            if outcome.finished:
                yield self._end(seq, outcome.finished)
            elif outcome.drafts and seq.stage is Stage.STANDING:
                self._leave_standing(seq)
                self._go_on(seq, outcome.drafts)
                self.changes += 1

    def _go_on(self, seq: Sequence, drafts: int) -> None:
        """Decodes, or verifies `drafts`, no more than it may still have tokens after the first."""
        seq.drafts = max(0, min(drafts, seq.limit - seq.known - 1))
        if seq.drafts:
            seq.stage = Stage.PREFILL
            self.prefill[seq.number] = seq
        else:
            self.standing.join(seq)
            self._joined[seq.number] = seq

    def _undo(self, plan: Plan, result: StepResult) -> Resolved:
        """A failed step gave nothing: who is to blame ends, the others begin again from what is findable."""
        blamed = [n for n, outcome in result.outcomes.items() if outcome.finished is FinishReason.FAILED]
        finished = tuple(self._end(self.live[n], FinishReason.FAILED, in_vain=True) for n in blamed if n in self.live)
        preempted = []
        chunked = (self.live[chunk.number] for chunk in plan.chunks if chunk.number in self.live)
        for seq in dict.fromkeys((*self.standing.members, *self.pending.values(), *chunked)):
            unsampled = seq.stage is Stage.STANDING
            preempted.append(Preemption(seq.number, self.computed(seq), Reason(Why.STEP_FAILED)))
            self._preempt(seq)
            seq.known -= unsampled
        self.changes += 1
        return Resolved(finished, tuple(preempted))

    def _end(self, seq: Sequence, reason: FinishReason, *, in_vain: bool = False) -> Finished:
        """Takes it from wherever it is; its blocks are back at once. `in_vain`: what the step samples is dropped."""
        dropped = in_vain and seq.stage is Stage.STANDING
        numbers = self._numbers[seq.request.id]
        if seq.stage is Stage.WAITING:
            self.waiting.remove(seq)
        elif seq.stage is Stage.ATTACHED:
            self.live[numbers[0]].siblings.remove(seq)
        self._give_up_seat(seq)
        for sibling in seq.siblings:
            self.waiting.put(sibling)
        seq.siblings = []
        seq.stage = Stage.ENDED
        del self.live[seq.number]
        numbers.remove(seq.number)
        if not numbers:
            del self._numbers[seq.request.id]
        self._pressure = max(0, self._pressure - 1)
        self.counters.finished[reason] += 1
        self.changes += 1
        return Finished(seq.number, reason, seq.known - dropped)

    def _give_up_seat(self, seq: Sequence) -> None:
        """If it has one; with its blocks."""
        if seq.stage is Stage.STANDING:
            self._leave_standing(seq)
        self.prefill.pop(seq.number, None)
        self.pending.pop(seq.number, None)
        if seq.tables:
            del self.seated[bisect_left(self.seated, (seq.rank, seq))]
            self.cache.release(seq)

    def check(self) -> None:
        """Raises `AssertionError` where the books do not balance."""
        check_books(self)
