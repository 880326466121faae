"""Decides the next step: which sequences compute which tokens, and why. Reads the scheduler, changes nothing in it.

A plan is made in three phases. All take what they use from one `Ledger`, and each returns what it decided:

1. Decodes. Every member of the decode batch computes one token, and every sequence with drafts verifies them. Where
   blocks are lacking for that, the latest sequence is preempted.
2. Least shares. Prompts in prefill get a small chunk in turn, so that decodes never starve them: whatever the token
   budget; under a time budget what it leaves, or a token or a few (`core/promise.py`).
3. The rest of the budget goes to the most urgent, among equals to the prompt nearest to its first token: prompts in
   prefill, and waiting ones that find a slot and blocks, in the order of admission. No request is admitted in a step
   that preempts another.

docs/scheduling.md works an example by hand, and says where a new policy belongs.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter, sub
from typing import TYPE_CHECKING, NamedTuple

from twostep.core.cost import StepShape, decode_shape
from twostep.core.kv_cache import Counts
from twostep.core.plan import Admission, Chunk, NotAdmitted, Plan, Preemption
from twostep.core.policies import MOST_PASSES, ChunkSizer, Grant
from twostep.core.promise import Promise
from twostep.core.reasons import WHOLE, Reason, Why
from twostep.core.request import BLOCK_TOKENS, Sequence, Stage

if TYPE_CHECKING:
    from twostep.core.scheduler import Scheduler

SHARE_EVERY_STEPS = 4
"""A prompt in prefill gets at least its least share once in so many steps, and so does the first that is admitted."""
MANY_IN_PREFILL, MOST_IN_PREFILL = 8, 16
"""With 8 prompts in prefill only one that is shorter than all of them is admitted; with 16 none."""


class Ledger:
    """What the step being planned may still use: free blocks of each group, slots, tokens, and time.

    Blocks and slots are taken and refunded by number. Tokens and time are used by the slices in `load`: what is left of
    them for one more slice is what `grant` answers.
    """

    __slots__ = ("_cuts", "_max_tokens", "_sizer", "blocks", "decodes", "load", "promise", "slots")

    def __init__(
        self, blocks: Counts, slots: int, max_tokens: int, sizer: ChunkSizer, load: StepShape, *, cuts: bool
    ) -> None:
        """`max_tokens`: of the step, whatever the policy. `cuts`: whether a slice may be shorter than wanted."""
        self.blocks = list(blocks)
        self.slots = slots
        self.load = load
        """The slices decided so far."""
        self.decodes = load
        """Of it, the decodes and drafts: what phase 1 decided."""
        self.promise: Promise | None = None
        """What the step keeps to if sequences decode in it, which a wider one would delay; phase 1 decides."""
        self._max_tokens, self._sizer, self._cuts = max_tokens, sizer, cuts

    def fits(self, blocks: Counts, slots: int = 0) -> bool:
        """Whether so many blocks of each group, and so many slots, are left."""
        for need, free in zip(blocks, self.blocks, strict=True):
            if need > free:
                return False
        return slots <= self.slots

    def take(self, blocks: Counts, slots: int = 0) -> None:
        """Uses up what `fits`."""
        for group, need in enumerate(blocks):
            self.blocks[group] -= need
        self.slots -= slots

    def refund(self, blocks: Counts, slots: int = 0) -> None:
        """Returns what a preempted sequence held."""
        for group, freed in enumerate(blocks):
            self.blocks[group] += freed
        self.slots += slots

    def take_slice(self, start: int, count: int, logit_rows: int) -> None:
        """Adds a slice to the load, whatever the budgets: `grant` said how wide it may be."""
        self.load = self.load.with_slice(start, count, logit_rows)

    def refund_slice(self, start: int, count: int, logit_rows: int) -> None:
        """Takes a slice out of the load."""
        self.load = self.load.without_slice(start, count, logit_rows)

    @property
    def tokens(self) -> int:
        """Tokens left, whatever the policy."""
        return self._max_tokens - self.load.tokens

    def grant(self, start: int, wanted: int, held: int = 0) -> Grant:
        """How many of `wanted` tokens from `start` the token and time budgets have left, and what limits them.
        `held`: what the same slice has in the load, before `start`."""
        room = self.tokens
        if room >= wanted:
            return self._sizer.grant(self.load, start, wanted, self.promise, held)
        grant = self._sizer.grant(self.load, start, room, self.promise, held) if self._cuts else Grant(0, WHOLE)
        held_back = not self._cuts or grant.tokens == room
        return Grant(grant.tokens, Reason(Why.TOKEN_BUDGET, (self._max_tokens,))) if held_back else grant


class Share(NamedTuple):
    """What one prompt gets of the step, so far. Immutable: a larger share is a new one.

    `admission`: the sequence is waiting, and is admitted if it gets any tokens.
    """

    seq: Sequence
    start: int
    remaining: int
    """Tokens from `start` to its last known one."""
    admission: Admission | None = None
    entry_blocks: Counts = ()
    """Of a waiting sequence: the blocks that all its known tokens take."""
    tokens: int = 0
    reason: Reason = WHOLE
    taken: Counts | None = None
    """Blocks taken from the ledger; None before the first tokens."""
    forks: tuple[int, ...] = ()

    @property
    def left(self) -> int:
        """Tokens that it lacks."""
        return self.remaining - self.tokens

    def chunk(self) -> Chunk:
        return Chunk(self.seq.number, self.start, self.tokens, not self.left, self.reason, 0, self.forks)


Shares = Mapping[int, Share]
"""By sequence number: prompts in prefill in their order, then the admitted ones."""


@dataclass(slots=True)
class Decodes:
    """Phase 1: the decodes, and the preemptions they need. Complete when the phase returns it; only read afterwards."""

    decoding: int
    """Members of the decode batch that stay in it."""
    verifying: dict[int, Chunk]
    """Slices of drafts to verify."""
    preempted: dict[int, Preemption]
    lost_users: dict[tuple[int, int], int]
    """Users that the preemptions take from (group, block)."""


class Rest(NamedTuple):
    """Phase 3: all shares, and the waiting sequences that were considered but not admitted."""

    shares: Shares
    not_admitted: tuple[NotAdmitted, ...]
    open: int
    """Admissions that the batching policy allows."""


NO_PREFILL = Rest({}, (), 0)


class Planner:
    """One plan in the making. Used once."""

    def __init__(self, scheduler: "Scheduler", now: int) -> None:
        self._s, self._config, self._now = scheduler, scheduler.config, now
        batch, config = scheduler.decode_batch, scheduler.config
        self._has_prompts = bool(scheduler.prefill or scheduler.waiting)
        """Whether there is more to plan than decodes."""
        self._reserve = scheduler.reserved_blocks() if scheduler.waiting else ()
        self._ledger = Ledger(
            scheduler.cache.free,
            config.max_num_seqs - scheduler.running,
            config.max_num_batched_tokens,
            scheduler.sizer,
            decode_shape(len(batch), batch.context_tokens),
            cuts=config.chunking.least_tokens > 0,
        )

    def plan(self) -> Plan:
        """The next step. The same state and time give the same plan."""
        decodes, rest = self._plan_decodes(), NO_PREFILL
        if self._has_prompts:
            rest = self._share_budget(decodes, self._least_shares(self._prompts(decodes)))
        load, shares, promise = self._ledger.load, rest.shares.values(), self._ledger.promise
        plan = Plan(
            step=self._s.counters.steps + 1,
            changes=self._s.changes,
            decoding=decodes.decoding,
            open=rest.open,
            preemptions=(*decodes.preempted.values(), *self._preempt_if_stalled(decodes, rest.shares)),
            admissions=tuple([share.admission for share in shares if share.admission]),
            chunks=(*decodes.verifying.values(), *[share.chunk() for share in shares if share.tokens]),
            not_admitted=rest.not_admitted,
            shape=load,
            predicted_ns=promise.decodes_ns if promise and not rest.shares else self._s.sizer.predicted_ns(load),
            promise=promise,
        )
        return plan if load.tokens or plan.preemptions else replace(plan, next_wake_ns=self._next_wake_ns())

    def _next_wake_ns(self) -> int | None:
        """When the batching policy opens by itself, if it does."""
        waiting = self._s.waiting
        opens_after_ns = self._config.batching.opens_after_ns(self._s.running, len(waiting))
        if opens_after_ns is None:
            return None
        opens_ns = next(iter(waiting)).arrival_ns + opens_after_ns
        return opens_ns if opens_ns > self._now else None

    # --- phase 1: decodes -----------------------------------------------------------------------------------------

    def _plan_decodes(self) -> Decodes:
        """Takes what decodes and drafts need; preempts the latest sequences where that is lacking, and less urgent ones
        for an urgent one if the policy allows it."""
        decodes = Decodes(len(self._s.decode_batch), {}, {}, {})
        self._make_room_for_decodes(decodes)
        if self._has_prompts:
            self._verify_drafts(decodes)
            self._preempt_for_urgent(decodes)
        self._ledger.decodes = self._ledger.load
        if self._s.sizer.learns and (decodes.decoding or decodes.verifying):
            self._ledger.promise = self._s.sizer.promise(self._ledger.load, self._s.overhead_ns())
        return decodes

    def _make_room_for_decodes(self, decodes: Decodes) -> None:
        """Takes a block for each decode whose token begins one; the earliest sequences get theirs first."""
        cache, batch, ledger = self._s.cache, self._s.decode_batch, self._ledger
        needing = [seq for seq in batch.starting_a_block() if cache.capacity(seq) <= batch.computed(seq)]
        if not cache.windowed and len(needing) <= min(ledger.blocks):
            if needing:
                ledger.take((len(needing),) * len(ledger.blocks))
            return
        for seq in sorted(needing, key=_rank):
            if seq.number not in decodes.preempted:
                self._make_room(decodes, seq, cache.needs(seq, batch.computed(seq), 1))

    def _verify_drafts(self, decodes: Decodes) -> None:
        """Drafted tokens are decodes too: they go in one slice with the token before them, as many as the token budget
        holds beside the least shares of prompts."""
        verifying = sorted([seq for seq in self._s.prefill.values() if seq.drafts], key=_rank)
        shares = self._config.chunking.least_tokens * MOST_IN_PREFILL
        room = self._ledger.tokens - shares - len(verifying)
        for seq in verifying:
            drafts = min(seq.drafts, room)
            if seq.number in decodes.preempted:
                continue
            if self._make_room(decodes, seq, self._s.cache.needs(seq, seq.computed, 1 + drafts)):
                room -= drafts
                decodes.verifying[seq.number] = Chunk(seq.number, seq.computed, 1 + drafts, True, WHOLE, drafts)
                self._ledger.take_slice(seq.computed, 1 + drafts, 1 + drafts)

    def _make_room(self, decodes: Decodes, seq: Sequence, blocks: Counts) -> bool:
        """Takes `blocks`; preempts the latest sequences until they fit. False: `seq` itself was the latest."""
        while not self._ledger.fits(blocks):
            victim = self._latest(decodes) or seq
            self._preempt(decodes, victim, Reason(Why.OUT_OF_BLOCKS, (seq.number,)))
            if victim is seq:
                return False
        self._ledger.take(blocks)
        return True

    def _latest(self, decodes: Decodes) -> Sequence | None:
        """The least urgent of those that may be preempted, among equals the one that arrived last."""
        running = (seq for _, seq in reversed(self._s.by_rank) if seq.number not in decodes.preempted)
        return next((seq for seq in running if seq.stage is not Stage.PENDING), None)

    def _preempt(self, decodes: Decodes, seq: Sequence, reason: Reason) -> None:
        """Refunds its blocks and its slot, and takes its decode or its drafts out of the step."""
        computed = self._s.computed(seq)
        decodes.preempted[seq.number] = Preemption(seq.number, computed, reason)
        self._ledger.refund(self._s.cache.held_alone(seq, decodes.lost_users), 1)
        if seq.stage is Stage.DECODE:
            decodes.decoding -= 1
            self._ledger.refund_slice(computed, 1, 1)
        elif chunk := decodes.verifying.pop(seq.number, None):
            self._ledger.refund_slice(chunk.start, chunk.tokens, chunk.tokens)

    def _preempt_for_urgent(self, decodes: Decodes) -> None:
        """Where the policy allows it, preempts less urgent sequences for the first waiting one, as long as that lacks
        nothing but their slots and blocks."""
        if not (self._config.priority_preempts and self._s.waiting and self._may_admit()):
            return
        first = self._candidate(next(iter(self._s.waiting)))
        if self._awaits_prefix(first, self._prompts(decodes)):
            return
        while (reason := self._obstacle(first, self._prompts(decodes))) and reason.why is not Why.MANY_IN_PREFILL:
            victim = self._latest(decodes)
            if victim is None or victim.request.priority <= first.seq.request.priority:
                return
            self._preempt(decodes, victim, Reason(Why.MORE_URGENT, (first.seq.number,)))

    def _preempt_if_stalled(self, decodes: Decodes, shares: Shares) -> tuple[Preemption, ...]:
        """Prompts whose windows lack blocks wait for others to end; if nothing else runs, the latest is preempted."""
        if self._ledger.load.tokens or decodes.preempted or not shares or not (latest := self._latest(decodes)):
            return ()
        reason = Reason(Why.OUT_OF_BLOCKS, (min(shares),))
        return (Preemption(latest.number, self._s.computed(latest), reason),)

    # --- phase 2: least shares of prompts in prefill --------------------------------------------------------------

    def _prompts(self, decodes: Decodes) -> Shares:
        """A share without tokens for each prompt in prefill that is not preempted."""
        return {
            number: Share(seq, seq.computed, seq.remaining)
            for number, seq in self._s.prefill.items()
            if not (seq.drafts or number in decodes.preempted)
        }

    def _least_shares(self, shares: Shares) -> Shares:
        """Gives least shares in turn, so that each prompt gets one at least every fourth step; overdue ones at once.

        A time budget that has not enough for that slows them down. Then the nearest to its first token comes first in
        every second step, or short prompts would wait for long ones; and a waiting request has its first share before
        all of them in every fourth step, or it would never get one.
        A prompt whose windows lack blocks gets nothing: it waits for others to end.
        """
        given, step = dict(shares), self._s.counters.steps + 1
        turns = -(-len(given) // SHARE_EVERY_STEPS)
        if self._ledger.promise and self._s.waiting and step % SHARE_EVERY_STEPS == 0:
            turns = 0
        order = _nearest if self._ledger.promise and step % 2 else _longest_ago
        for i, share in enumerate(sorted(shares.values(), key=order)):
            if i < turns or step - share.seq.advanced >= SHARE_EVERY_STEPS:
                given[share.seq.number] = self._with_least(share) or share
        return given

    def _with_least(self, share: Share) -> Share | None:
        """The share with the least that a prompt gets, if the budget has it or may be exceeded for it; else None."""
        least = min(self._config.chunking.least_tokens, share.left)
        ledger = self._ledger
        first = ledger.load is ledger.decodes
        tokens = self._s.sizer.least_share(ledger.load, share.start, least, ledger.promise, first)
        return self._widened(share, Grant(tokens, Reason(Why.LEAST_SHARE)))

    # --- phase 3: the rest of the budget --------------------------------------------------------------------------

    def _share_budget(self, decodes: Decodes, given: Shares) -> Rest:
        """Gives what is left to the prompt with the shortest rest, again and again, until the budget is used up.

        One candidate for admission competes at a time. It gets a first share before the others, so that it
        soon has its turn beside longer prompts.
        """
        shares, open_ = dict(given), self._may_admit()
        queue = Queue(self._s.waiting, open_, preempted=bool(decodes.preempted))
        unserved = {number: share for number, share in shares.items() if share.left}
        candidate, not_admitted = self._next_candidate(queue, shares)
        if candidate and (first := self._first_share(candidate, shares)):
            candidate = shares[candidate.seq.number] = first
        while unserved or candidate:
            competing = unserved.values()
            share = min((*competing, candidate) if candidate else competing, key=_nearest)
            number, grant = share.seq.number, self._grant(share)
            if wider := self._widened(share, grant):
                shares[number] = wider
            elif number not in shares:
                not_admitted.append(NotAdmitted(number, Reason(Why.NO_BUDGET)))
            if grant.tokens < share.left:
                break
            if share is candidate:
                candidate, passed_over = self._next_candidate(queue, shares)
                not_admitted += passed_over
            else:
                del unserved[number]
        return Rest(shares, tuple(not_admitted), open_)

    def _first_share(self, candidate: Share, shares: Shares) -> Share | None:
        """Its least share if the budget has it. In every fourth step, and where no prompt got anything, also if only
        the prompts in prefill have used it up, so that some prompt always advances."""
        least = min(self._config.chunking.least_tokens, candidate.left)
        alone = not any(share.tokens for share in shares.values())
        in_turn = (self._s.counters.steps + 1) % SHARE_EVERY_STEPS == 0
        if alone or in_turn or self._ledger.grant(candidate.start, least).tokens == least:
            return self._with_least(candidate)
        return None

    def _grant(self, share: Share) -> Grant:
        """What the budgets have left for it."""
        return self._ledger.grant(share.start + share.tokens, share.left, share.tokens)

    def _widened(self, share: Share, more: Grant) -> Share | None:
        """The share with `more` tokens, which are taken from the ledger, with the blocks that they need, and the slot
        if it is the first share of a waiting sequence.

        None, and nothing is taken, if `more` is empty or blocks or slots are lacking.
        """
        if not more.tokens:
            return None
        tokens = share.tokens + more.tokens
        if (taken := self._take_blocks(share, tokens)) is None:
            return None
        whole = tokens == share.remaining
        if share.tokens:
            self._ledger.refund_slice(share.start, share.tokens, 0)
        self._ledger.take_slice(share.start, tokens, int(whole))
        forks = self._take_forks(share.seq) if whole and share.seq.siblings else ()
        return share._replace(tokens=tokens, reason=WHOLE if whole else more.reason, taken=taken, forks=forks)

    def _take_blocks(self, share: Share, tokens: int) -> Counts | None:
        """Takes what `share` lacks for `tokens`, and returns all that it has taken; None if that is not left.

        A waiting sequence takes its slot and the blocks of all its known tokens at once.
        """
        if share.admission:
            if share.taken is not None:
                return share.taken
            if not self._ledger.fits(share.entry_blocks, 1):
                return None
            self._ledger.take(share.entry_blocks, 1)
            return share.entry_blocks
        needs = self._s.cache.needs(share.seq, share.start, tokens)
        lacking = needs if share.taken is None else tuple(map(sub, needs, share.taken))
        if not self._ledger.fits(lacking):
            return None
        self._ledger.take(lacking)
        return needs

    def _take_forks(self, seq: Sequence) -> tuple[int, ...]:
        """Further choices that begin where `seq` has its prompt computed, as far as there are slots and blocks."""
        own_block = tuple(int(seq.known % BLOCK_TOKENS > 0) for _ in self._ledger.blocks)
        forks = []
        for sibling in seq.siblings:
            if not self._ledger.fits(own_block, 1):
                break
            self._ledger.take(own_block, 1)
            forks.append(sibling.number)
        return tuple(forks)

    # --- admission ------------------------------------------------------------------------------------------------

    def _may_admit(self) -> int:
        """How many sequences the batching policy admits."""
        first = next(iter(self._s.waiting), None)
        waited_ns = self._now - first.arrival_ns if first else 0
        return self._config.batching.open(self._s.running, len(self._s.waiting), self._s.batch_left, waited_ns)

    def _next_candidate(self, queue: "Queue", shares: Shares) -> tuple[Share | None, list[NotAdmitted]]:
        """The next sequence of the queue that may be admitted beside `shares`, and those before it that may not.

        None if one has to wait that no other may pass. Moves `queue` on.
        """
        not_admitted: list[NotAdmitted] = []
        while (seq := queue.next()) is not None:
            candidate = self._candidate(seq)
            reason = queue.closed(shares) or self._awaits_prefix(candidate, shares) or self._obstacle(candidate, shares)
            if reason is None:
                return candidate, not_admitted
            not_admitted.append(NotAdmitted(seq.number, reason))
            if reason.why is not Why.SHARES_PREFIX:
                break
            queue.pass_over(seq)
        return None, not_admitted

    def _candidate(self, seq: Sequence) -> Share:
        """A share without tokens; the prefix cache holds what comes before `start`. The last known token is computed in
        any case, to be sampled."""
        cached = self._s.cache.match(seq.hashes, min(len(seq.hashes), (seq.known - 1) // BLOCK_TOKENS))
        admission = Admission(seq.number, cached, seq.arrived, seq.known)
        blocks = self._s.cache.needs_to_enter(seq.hashes, cached, admission.start, seq.known)
        return Share(seq, admission.start, seq.known - admission.start, admission, blocks)

    def _awaits_prefix(self, candidate: Share, shares: Shares) -> Reason | None:
        """A prompt among `shares` is about to compute the first block that the candidate lacks."""
        hashes, lacking = candidate.seq.hashes, candidate.start // BLOCK_TOKENS
        if lacking >= min(len(hashes), (candidate.seq.known - 1) // BLOCK_TOKENS) or candidate.seq.arrived:
            return None
        for other in (share.seq for share in shares.values()):
            if other.published <= lacking < len(other.hashes) and other.hashes[lacking] == hashes[lacking]:
                return Reason(Why.SHARES_PREFIX, (other.number,))
        return None

    def _obstacle(self, candidate: Share, shares: Shares) -> Reason | None:
        """What the candidate lacks beside `shares`: a place among the prompts in prefill, a slot, or blocks."""
        unfinished = [share.left for share in shares.values() if share.left]
        crowded = len(unfinished) >= MANY_IN_PREFILL and candidate.left >= min(unfinished)
        if crowded or len(unfinished) >= MOST_IN_PREFILL:
            return Reason(Why.MANY_IN_PREFILL, (len(unfinished),))
        if self._ledger.slots <= 0:
            return Reason(Why.NO_SLOT, (self._config.max_num_seqs,))
        needs, free = candidate.entry_blocks, self._ledger.blocks
        reserve = self._reserve if self._ledger.load.tokens else (0,) * len(needs)
        for g, (need, left, reserved) in enumerate(zip(needs, free, reserve, strict=True)):
            if need + reserved > left:
                return Reason(Why.NO_BLOCKS, (g, need, left, reserved))
        return None


class Queue:
    """Goes once through the waiting sequences, in the order of admission, and past those that wait for a prefix.

    Only the next 64 arrivals may pass a sequence that has to wait, so that no more than 64 of its priority ever do.
    """

    def __init__(self, waiting: Iterable[Sequence], open_: int, *, preempted: bool) -> None:
        """`open_`: admissions that the batching policy allows. `preempted`: the step preempts others."""
        self._ahead: Iterator[Sequence] = iter(waiting)
        self._open, self._preempted = open_, preempted
        self._earliest_passed: dict[int, Sequence] = {}
        """By priority."""

    def closed(self, shares: Shares) -> Reason | None:
        """Why no sequence at all is admitted beside `shares`."""
        if self._preempted:
            return Reason(Why.AFTER_PREEMPTION)
        admitted = sum(share.admission is not None for share in shares.values())
        return Reason(Why.BATCH_CLOSED) if self._open <= admitted else None

    def next(self) -> Sequence | None:
        """The next sequence; None at the end, or if it may not pass one before it."""
        seq = next(self._ahead, None)
        if seq is None or all(may_pass(seq, earliest) for earliest in self._earliest_passed.values()):
            return seq
        return None

    def pass_over(self, seq: Sequence) -> None:
        """`seq` has to wait; sequences behind it pass it."""
        earliest = self._earliest_passed.setdefault(seq.request.priority, seq)
        self._earliest_passed[seq.request.priority] = min(earliest, seq, key=_number)


def may_pass(later: Sequence, earlier: Sequence) -> bool:
    """Whether `later` may be admitted while `earlier`, before it in the queue, has to wait."""
    equals = later.request.priority == earlier.request.priority
    return not equals or later.number - earlier.number <= MOST_PASSES


_rank = attrgetter("rank")
_number = attrgetter("number")


def _longest_ago(share: Share) -> tuple[int, int]:
    """The one that advanced longest ago first."""
    return share.seq.advanced, share.seq.number


def _nearest(share: Share) -> tuple[int, int, int]:
    """The most urgent first, then the one nearest to its first token."""
    return share.seq.request.priority, share.left, share.seq.number
