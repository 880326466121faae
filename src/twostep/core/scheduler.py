"""The state of scheduling: which sequences exist, where each stands, which blocks it has. `planning` decides; this
applies the decisions.

    scheduler.add(request, now)
    plan = scheduler.plan(now)              # reads only
    step = scheduler.advance(plan)          # counts move, blocks are taken: what an executor needs
    resolved = scheduler.resolve(result)    # what the step returned: which sequences ended, which have drafts to verify
    scheduler.abort(request_id)

One step is under way at a time, between `advance` and `resolve`. The next plan may be made meanwhile; it is void if the
end of the step, an arrival or an abort changes what it was made from (`changes` counts that).
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from twostep.core.cost import CostModel
from twostep.core.decode_batch import DecodeBatch
from twostep.core.kv_cache import BlockGroup, Copied, Counts, Granted, KvCache
from twostep.core.plan import Chunk, Finished, Plan, Preemption, Resolved, SliceOutcome, Step, StepResult
from twostep.core.planning import MOST_IN_PREFILL, Planner
from twostep.core.policies import Batching, ChunkPolicy, Continuous, Order, by_priority, fcfs
from twostep.core.promise import HostTime
from twostep.core.reasons import Reason, Why
from twostep.core.request import BLOCK_TOKENS, FinishReason, Request, Sequence, Stage

MOST_PRESSURE = 5
"""Steps out of blocks that widen the reserve; each doubles it, each sequence that ends halves it."""
ONE_TOKEN = SliceOutcome()
STARVED_PART = 5
"""A step whose kernels were kept from the cores for more than a 5th of its time says little about the next one: it does
not teach the cost model. A front end and clients on the same cores take less than that from most steps."""
MOST_STARVED = 64
"""After so many such steps in a row they do teach: that is how fast this machine is now."""
LEARN_EVERY_STEPS = 16
"""Steps that only decode are alike: unless chunks are sized by time, the cost model learns from one in so many."""


class NeverFitsError(ValueError):
    """A request that could not be served even alone: says which number is too large, and what is allowed."""


@dataclass(frozen=True)
class SchedulerConfig:
    """Frozen settings, without state. Raises `ValueError` for those that contradict each other.

    `max_num_seqs`: slots, hence sequences that run at a time. `max_num_batched_tokens`: most tokens of a step, what the
    executor's workspace holds. `max_model_len`: most tokens of a sequence. `watermark`: share of the blocks that
    admission leaves free.
    """

    groups: tuple[BlockGroup, ...]
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    chunking: ChunkPolicy
    batching: Batching = field(default_factory=Continuous)
    order: Order = by_priority
    priority_preempts: bool = False
    watermark: float = 0.01

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise ValueError(f"max_num_seqs is {self.max_num_seqs}; it has to be at least 1")
        if not self.groups or min(group.blocks for group in self.groups) < 1:
            raise ValueError(f"the KV cache has {self.groups}; it needs a group, and a block in each group")
        if self.priority_preempts and self.order is fcfs:
            raise ValueError("priority_preempts needs an order by priority: under fcfs the preempted come back first")
        needed = least_step_tokens(self.max_num_seqs, self.chunking)
        if self.max_num_batched_tokens < needed:
            shares = needed - self.max_num_seqs
            sum_ = f"{self.max_num_seqs} for decodes (max_num_seqs), {shares} for prompts in prefill"
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}; it has to be at least {needed}: {sum_}"
            )


def least_step_tokens(max_num_seqs: int, chunking: ChunkPolicy) -> int:
    """The least `max_num_batched_tokens`: a token for each sequence that decodes, and a share for each prompt in
    prefill."""
    return max_num_seqs + chunking.least_tokens * MOST_IN_PREFILL


def _in_range(request: Request) -> bool:
    """Whether each choice has at least a token left, and its KV is computed here."""
    return not request.arrived_tokens and min(request.given) >= 0 and max(request.given) < request.max_tokens


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


class WaitingQueue:
    """The sequences that wait for a slot, sorted by the admission policy's key, which does not change meanwhile."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._entries: list[tuple[tuple[int, ...], int, Sequence]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        """In the order of admission."""
        return (seq for _, _, seq in self._entries)

    def put(self, seq: Sequence) -> None:
        seq.stage = Stage.WAITING
        insort(self._entries, self._entry(seq))

    def remove(self, seq: Sequence) -> None:
        del self._entries[bisect_left(self._entries, self._entry(seq))]

    def _entry(self, seq: Sequence) -> tuple[tuple[int, ...], int, Sequence]:
        return self._order(seq), seq.number, seq


class Scheduler:
    """Decides each step from counts and hashes. The same calls lead to the same plans, byte for byte."""

    def __init__(self, config: SchedulerConfig, cost: CostModel | None = None) -> None:
        """`cost`: the engine's cost model; this scheduler teaches it. Raises `ValueError` if chunks are sized by time
        and there is none."""
        self.config = config
        self.cost = cost
        self.sizer = config.chunking.sizer(cost)
        self.cache = KvCache(config.groups, config.max_num_batched_tokens)
        self.counters = Counters()
        self.waiting = WaitingQueue(config.order)
        self.decode_batch = DecodeBatch()
        self.prefill: dict[int, Sequence] = {}
        self.pending: dict[int, Sequence] = {}
        self.by_rank: list[tuple[tuple[int, int], Sequence]] = []
        """The running sequences, the latest and least urgent last."""
        self.live: dict[int, Sequence] = {}
        self.changes = 0
        self.batch_left = 0
        """Admissions that the batching policy allowed in the last step, less those made."""
        self._numbers: dict[str, list[int]] = {}
        self._next_number = 1
        self._pressure = 0
        self._under_way: Plan | None = None
        self._left: list[int] = []
        self._joined: dict[int, Sequence] = {}
        self._decoding_learned = self._steps_until_learning = 0
        self._starved = 0
        """Starved steps in a row."""
        self._host = HostTime()
        self._ended_ns: int | None = None
        self._gave_first = False
        """Whether the step before gave first tokens."""
        self._gives_first = False
        """Whether the last step that began gives first tokens."""

    # --- questions ------------------------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Slots taken."""
        return len(self.decode_batch) + len(self.prefill) + len(self.pending)

    @property
    def idle(self) -> bool:
        """Whether no sequence is left to serve."""
        return not self.live

    def computed(self, seq: Sequence) -> int:
        """Tokens of `seq` whose KV is in the cache, or will be when the step under way ends."""
        return self.decode_batch.computed(seq) if seq.stage is Stage.DECODE else seq.computed

    def reserved_blocks(self) -> Counts:
        """Blocks that admission leaves to running sequences: the watermark, wider after preemptions."""
        blocks = [group.blocks for group in self.config.groups]
        marks = [max(1, int(count * self.config.watermark)) for count in blocks]
        return tuple(min(count // 4, mark << self._pressure) for count, mark in zip(blocks, marks, strict=True))

    def overhead_ns(self) -> int:
        """The bound of the time outside the kernels from the last step that began to the next one."""
        return self._host.bound_ns(after_first_tokens=self._gives_first)

    def plan(self, now: int) -> Plan:
        """The next step, decided at time `now` (ns). Changes nothing."""
        return Planner(self, now).plan()

    # --- coming and going -----------------------------------------------------------------------------------------

    def add(self, request: Request, now: int) -> tuple[int, ...]:
        """Queues a request; returns the numbers of its sequences, one per choice.

        Raises `NeverFitsError` if it could not be served even alone, `ValueError` if its id is in use.
        """
        self.check_fits(request)
        numbers = range(self._next_number, self._next_number + request.choices)
        self._next_number = numbers.stop
        given = request.given or (0,) * request.choices
        choices = [
            Sequence(n, now, request, choice, request.prompt_tokens + given[choice], hashes=list(request.hashes))
            for choice, n in enumerate(numbers)
        ]
        self.live.update(zip(numbers, choices, strict=True))
        self._numbers[request.id] = list(numbers)
        self._queue(choices)
        self.changes += 1
        return tuple(numbers)

    def _queue(self, choices: list[Sequence]) -> None:
        """Choices that have output already differ: each computes its own, as after a preemption. Others are forked."""
        first, *others = choices
        first.arrived = first.request.arrived_tokens
        self.waiting.put(first)
        if first.request.given:
            for other in others:
                self.waiting.put(other)
            return
        first.siblings = others
        for other in others:
            other.stage = Stage.FORK_WAITING

    def check_fits(self, request: Request) -> None:
        """Raises as `add` does; changes nothing."""
        if request.id in self._numbers:
            raise ValueError(f"request id {request.id!r} is in use")
        sizes = (request.prompt_tokens, request.max_tokens, request.choices)
        if min(sizes) < 1 or not 0 <= request.arrived_tokens < request.prompt_tokens:
            raise ValueError(f"prompt, answer and choices: at least one token each, and one left to compute: {request}")
        if request.given and (len(request.given) != request.choices or not _in_range(request)):
            raise ValueError(f"given: a count below max_tokens for each choice, and no KV from elsewhere: {request}")
        total = request.prompt_tokens + request.max_tokens
        sum_ = f"prompt of {request.prompt_tokens} + max_tokens of {request.max_tokens} = {total} tokens"
        if total > self.config.max_model_len:
            raise NeverFitsError(f"{sum_}; the context has {self.config.max_model_len}")
        if not self.config.chunking.least_tokens and total > self.config.max_num_batched_tokens:
            raise NeverFitsError(f"{sum_}; prompts are not cut, and a step has {self.config.max_num_batched_tokens}")
        for group, needed in zip(self.config.groups, self.cache.most_needed(total - 1), strict=True):
            if needed > group.blocks:
                raise NeverFitsError(f"{sum_} need {needed} KV blocks; the whole cache has {group.blocks}")

    def abort(self, request_id: str, choice: int | None = None) -> tuple[Finished, ...]:
        """Ends a request, or one choice of it. The whole blocks that it has computed stay in the prefix cache.

        May be called while a step is under way: what that computes of it is dropped. Unknown ids are ignored.
        """
        sequences = [self.live[n] for n in self._numbers.get(request_id, ())]
        asked = [seq for seq in sequences if choice in (None, seq.choice)]
        return tuple(self._end(seq, FinishReason.ABORTED, drop=self._under_way is not None) for seq in asked)

    # --- a step begins --------------------------------------------------------------------------------------------

    def advance(self, plan: Plan) -> Step:
        """Applies `plan`; returns what an executor needs. Raises `ValueError` if it is void, or a step is under way."""
        if plan.changes != self.changes or self._under_way is not None:
            raise ValueError(f"plan of step {plan.step} is void, or the step before it has not ended")
        self.counters.steps += 1
        self.changes += 1
        self.batch_left = plan.open - len(plan.admissions)
        if plan.preemptions:
            self._apply_preemptions(plan.preemptions)
        for admission in plan.admissions:
            self.cache.adopt(self.live[admission.number], admission.cached, admission.start)
        granted = list(self._extend_decodes())
        if plan.admissions:
            granted += self._admit(plan)
        left, joined = self._batch_changes()
        self.decode_batch.advance()
        for seq in self.decode_batch.finishing():
            self._leave_batch(seq)
            self._await(seq, seq.known - 1)
        copied: list[Copied] = []
        for chunk in plan.chunks:
            for change in self._advance_chunk(chunk):
                if isinstance(change, Granted):
                    granted.append(change)
                else:
                    copied.append(change)
        self._under_way = plan
        self._gave_first = self._gives_first
        self._gives_first = bool(plan.chunks) and any(chunk.samples and not chunk.drafts for chunk in plan.chunks)
        return Step(plan, left, joined, tuple(granted), tuple(copied))

    def _apply_preemptions(self, preemptions: tuple[Preemption, ...]) -> None:
        """Preempts, counts, and widens the reserve if it was for lack of blocks."""
        out_of_blocks = any(preemption.reason.why is Why.OUT_OF_BLOCKS for preemption in preemptions)
        self._pressure = min(MOST_PRESSURE, self._pressure + out_of_blocks)
        for number, lost, _ in preemptions:
            self._preempt(self.live[number])
            self.counters.preemptions += 1
            self.counters.preempted_tokens += lost

    def _preempt(self, seq: Sequence) -> None:
        self._leave_slot(seq)
        seq.computed = seq.arrived = seq.drafts = 0
        self.waiting.put(seq)

    def _extend_decodes(self) -> Iterator[Granted]:
        for seq in self.decode_batch.starting_a_block():
            if self.cache.capacity(seq) <= (computed := self.decode_batch.computed(seq)):
                yield from self.cache.extend(seq, computed, 1)

    def _admit(self, plan: Plan) -> Iterator[Granted]:
        for admission in plan.admissions:
            seq = self.live[admission.number]
            self.waiting.remove(seq)
            self.prefill[seq.number] = seq
            seq.stage = Stage.PREFILL
            insort(self.by_rank, (seq.rank, seq))
            yield from self.cache.enter(seq, admission.start, seq.known)
            seq.computed = admission.start
            seq.arrived = 0
            self.counters.admitted += 1
            if seq.hashes:
                self.counters.prefix_queried_tokens += seq.known
                self.counters.prefix_hit_tokens += admission.cached * BLOCK_TOKENS

    def _batch_changes(self) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
        """Which sequences left the decode batch, and which joined, since the last step began."""
        left, self._left = tuple(self._left), []
        joined, self._joined = tuple([(n, self.decode_batch.computed(seq)) for n, seq in self._joined.items()]), {}
        return left, joined

    def _advance_chunk(self, chunk: Chunk) -> Iterator[Granted | Copied]:
        """Counts its tokens as computed; a sequence that has caught up decodes from the next step on."""
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
                insort(self.by_rank, (sibling.rank, sibling))
                self._caught_up(sibling)
            else:
                self.waiting.put(sibling)
        if chunk.drafts:
            self._await(seq, seq.known)
        else:
            self._caught_up(seq)

    def _caught_up(self, seq: Sequence) -> None:
        """Its last row will be sampled: it decodes from now on, unless that is its last token."""
        if seq.known + 1 >= seq.limit:
            self._await(seq, seq.known)
        else:
            seq.known += 1
            self.decode_batch.join(seq)
            self._joined[seq.number] = seq

    def _await(self, seq: Sequence, known: int) -> None:
        """Its outcome is pending until the step ends."""
        seq.known = known
        seq.stage = Stage.PENDING
        self.pending[seq.number] = seq

    def _leave_batch(self, seq: Sequence) -> None:
        self.decode_batch.leave(seq)
        if self._joined.pop(seq.number, None) is None:
            self._left.append(seq.number)

    # --- a step ends ----------------------------------------------------------------------------------------------

    def resolve(self, result: StepResult, now: int | None = None) -> Resolved:
        """Applies what the step under way returned. Outcomes of sequences that have ended are ignored.

        `now`: when it ended, to learn what passes between steps; None if there is no clock."""
        plan = self._under_way
        if plan is None:
            raise ValueError("no step is under way")
        self._under_way = None
        before_ns, self._ended_ns = self._ended_ns, now
        if result.failed:
            return self._undo(plan, result)
        self._publish(plan, result)
        finished = [*self._settle_pending(result), *self._settle_others(result)]
        if self._teaches(result):
            self._learn(plan, result.step_ns)
            if plan.promise and before_ns is not None and now is not None:  # the engine was not idle between
                took_ns = now - before_ns - result.step_ns
                self._host.observe(took_ns, after_first_tokens=self._gave_first)
        if self.waiting and (plan.chunks or result.hashes):
            self.changes += 1
        return Resolved(tuple(finished))

    def _teaches(self, result: StepResult) -> bool:
        """Whether the step's time says what the next one will take: it had its cores, or has not had them for long."""
        if result.starved_ns * STARVED_PART <= result.step_ns:
            self._starved = 0
            return True
        self._starved += 1
        return self._starved > MOST_STARVED

    def _learn(self, plan: Plan, step_ns: int) -> None:
        """Teaches the cost model what the step took."""
        if self.cost is None:
            return
        self._steps_until_learning -= 1
        alike = not (self.sizer.learns or plan.chunks) and plan.decoding == self._decoding_learned
        if alike and self._steps_until_learning > 0:
            return
        self._steps_until_learning = LEARN_EVERY_STEPS
        self._decoding_learned = 0 if plan.chunks else plan.decoding
        self.cost.observe(plan.shape, step_ns)

    def _publish(self, plan: Plan, result: StepResult) -> None:
        """Puts whole blocks that the step completed into the prefix cache."""
        for number, hashes in result.hashes.items():
            if seq := self.live.get(number):
                seq.hashes.extend(hashes)
                self.cache.publish(seq, self.computed(seq))
        for chunk in plan.chunks:
            if (seq := self.live.get(chunk.number)) and seq.tables and not chunk.drafts:
                self.cache.publish(seq, chunk.start + chunk.tokens)

    def _settle_pending(self, result: StepResult) -> Iterator[Finished]:
        """Adds last tokens, and as many drafted ones as were accepted; the KV of the others will be overwritten."""
        for seq in list(self.pending.values()):
            outcome = result.outcomes.get(seq.number, ONE_TOKEN)
            seq.known += outcome.tokens
            seq.computed = seq.known - 1
            del self.pending[seq.number]
            self.changes += 1
            if outcome.finished or seq.known >= seq.limit:
                yield self._end(seq, outcome.finished or FinishReason.LENGTH)
            else:
                self._resume(seq, outcome.drafts)

    def _settle_others(self, result: StepResult) -> Iterator[Finished]:
        for number, outcome in result.outcomes.items():
            if (seq := self.live.get(number)) is None:
                continue
            if outcome.finished:
                yield self._end(seq, outcome.finished)
            elif outcome.drafts and seq.stage is Stage.DECODE:
                self._leave_batch(seq)
                self._resume(seq, outcome.drafts)
                self.changes += 1

    def _resume(self, seq: Sequence, drafts: int) -> None:
        """It decodes, or verifies `drafts`, at most as many as it may have tokens after the first."""
        seq.drafts = max(0, min(drafts, seq.limit - seq.known - 1))
        if seq.drafts:
            seq.stage = Stage.PREFILL
            self.prefill[seq.number] = seq
        else:
            self.decode_batch.join(seq)
            self._joined[seq.number] = seq

    def _undo(self, plan: Plan, result: StepResult) -> Resolved:
        """A failed step returned nothing: sequences that caused it end, others start again from the prefix cache."""
        blamed = [n for n, outcome in result.outcomes.items() if outcome.finished is FinishReason.FAILED]
        finished = tuple(self._end(self.live[n], FinishReason.FAILED, drop=True) for n in blamed if n in self.live)
        preempted = []
        chunked = (self.live[chunk.number] for chunk in plan.chunks if chunk.number in self.live)
        for seq in dict.fromkeys((*self.decode_batch.members, *self.pending.values(), *chunked)):
            unsampled = seq.stage is Stage.DECODE
            preempted.append(Preemption(seq.number, self.computed(seq), Reason(Why.STEP_FAILED)))
            self._preempt(seq)
            seq.known -= unsampled
        self.changes += 1
        return Resolved(finished, tuple(preempted))

    def _end(self, seq: Sequence, reason: FinishReason, *, drop: bool = False) -> Finished:
        """Removes it from wherever it is; its blocks are free at once. `drop`: what the step samples is dropped."""
        dropped = drop and seq.stage is Stage.DECODE
        numbers = self._numbers[seq.request.id]
        if seq.stage is Stage.WAITING:
            self.waiting.remove(seq)
        elif seq.stage is Stage.FORK_WAITING:
            self.live[numbers[0]].siblings.remove(seq)
        self._leave_slot(seq)
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

    def _leave_slot(self, seq: Sequence) -> None:
        """Frees its slot and its blocks, if it has them."""
        if seq.stage is Stage.DECODE:
            self._leave_batch(seq)
        self.prefill.pop(seq.number, None)
        self.pending.pop(seq.number, None)
        if seq.tables:
            del self.by_rank[bisect_left(self.by_rank, (seq.rank, seq))]
            self.cache.release(seq)

    # --- invariants -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises `AssertionError` that names the invariant which does not hold; tests call it between all calls."""
        self._check_places()
        self._check_counts()
        self.decode_batch.check()
        self.cache.check(list(self.live.values()))
        assert self.running <= self.config.max_num_seqs, "more sequences run than there are slots"

    def _check_places(self) -> None:
        """Each live sequence is in exactly the one place that its stage names."""
        places = {
            Stage.WAITING: list(self.waiting),
            Stage.PREFILL: list(self.prefill.values()),
            Stage.DECODE: list(self.decode_batch.members),
            Stage.PENDING: list(self.pending.values()),
            Stage.FORK_WAITING: [sibling for seq in self.live.values() for sibling in seq.siblings],
        }
        found = [seq.number for sequences in places.values() for seq in sequences]
        assert sorted(found) == sorted(self.live), "a live sequence is in no place, or in two"
        assert all(seq.stage is stage for stage, here in places.items() for seq in here), "a stage is not the place"

    def _check_counts(self) -> None:
        """No negative counts, no token computed that is not known, and blocks for all that is computed."""
        for seq in self.live.values():
            if seq.stage in (Stage.WAITING, Stage.FORK_WAITING):
                assert (seq.computed, seq.tables) == (0, ()), f"{seq.number} waits, but holds blocks"
                continue
            computed = self.computed(seq)
            known = computed + 1 if seq.stage is Stage.DECODE else seq.known
            assert 0 <= computed <= known + seq.drafts <= seq.limit + seq.drafts, f"{seq.number}: counts"
            assert computed <= self.cache.capacity(seq), f"{seq.number}: positions without a block"
