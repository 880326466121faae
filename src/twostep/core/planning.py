"""Who runs next, and why. Reads the scheduler's state, changes none of it, returns a plan.

1. Every standing sequence decodes one token, and every one with drafts verifies them. Where blocks are lacking for
   that, the latest sequence is preempted.
2. Prompts in prefill get their least shares in turn, whatever the budget.
3. What is left of the budget goes to whoever is nearest to its first token, the more urgent before: prompts in
   prefill, and waiting ones that find a seat and blocks, in the order of admission. Nobody joins in a step that
   preempted.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter, sub
from typing import TYPE_CHECKING

from twostep.core.kv_cache import Counts
from twostep.core.plan import Admission, Chunk, Held, Plan, Preemption
from twostep.core.policies import Grant
from twostep.core.reasons import WHOLE, Reason, Why
from twostep.core.request import BLOCK_TOKENS, Sequence, Stage
from twostep.core.step_time import StepShape
from twostep.core.waiting import may_pass

if TYPE_CHECKING:
    from twostep.core.scheduler import Scheduler

SHARE_EVERY_STEPS = 4
"""A prompt in prefill gets at least its least share once in so many steps, and so does the first that may join."""
MANY_IN_PREFILL, MOST_IN_PREFILL = 8, 16
"""From so many prompts in mid-prefill on only one that is shorter than all of them joins; from so many on none."""


@dataclass(slots=True, eq=False)
class _Part:
    """What a prompt gets of this step, so far. `enters`: it is waiting, and joins if it gets anything."""

    seq: Sequence
    start: int
    remaining: int
    enters: Admission | None = None
    needs: Counts = ()
    """Blocks that a newcomer takes."""
    grant: Grant = field(default_factory=lambda: Grant(0, WHOLE))
    taken: Counts = ()
    forks: tuple[int, ...] = ()

    @property
    def left(self) -> int:
        return self.remaining - self.grant.tokens

    def chunk(self) -> Chunk:
        return Chunk(self.seq.number, self.start, self.grant.tokens, not self.left, self.grant.reason, 0, self.forks)


class Planner:
    """One plan in the making: what is still free, and what has been decided. Used once."""

    def __init__(self, scheduler: "Scheduler", now: int) -> None:
        self._s, self._config, self._now = scheduler, scheduler.config, now
        self._free = list(scheduler.cache.free)
        self._seats = scheduler.config.seats - scheduler.running
        self._dropped: dict[tuple[int, int], int] = {}
        self._preempted: dict[int, Preemption] = {}
        self._verifying: dict[int, Chunk] = {}
        self._parts: list[_Part] = []
        self._held: list[Held] = []
        self._open = 0
        self._kept = scheduler.kept_free() if scheduler.waiting else ()
        self._decoding = len(scheduler.standing)
        self._load = StepShape(self._decoding, scheduler.standing.context_tokens, self._decoding, self._decoding)

    def plan(self) -> Plan:
        """The next step. Pure: the same state and time give the same plan."""
        self._make_room_for_decodes()
        if self._s.prefill or self._s.waiting:
            self._verify()
            prompts = [seq for seq in self._s.prefill.values() if not (seq.drafts or seq.number in self._preempted)]
            self._parts = [_Part(seq, seq.computed, seq.remaining) for seq in prompts]
            self._make_way_for_the_urgent()
            self._give_least_shares()
            self._share_the_rest()
            self._never_stall()
        return Plan(
            step=self._s.counters.steps + 1,
            changes=self._s.changes,
            decoding=self._decoding,
            open=self._open,
            preemptions=tuple(self._preempted.values()),
            admissions=tuple(part.enters for part in self._parts if part.enters),
            chunks=(*self._verifying.values(), *(part.chunk() for part in self._parts if part.grant.tokens)),
            held=tuple(self._held),
            shape=self._load,
            predicted_ns=self._config.chunking.predict_ns(self._load),
        )

    # --- 1. decodes -----------------------------------------------------------------------------------------------

    def _make_room_for_decodes(self) -> None:
        """Each standing sequence whose next token begins a block needs that block; who came first gets it first."""
        cache, standing = self._s.cache, self._s.standing
        needing = [seq for seq in standing.starting_a_block() if cache.capacity(seq) <= standing.computed(seq)]
        if not cache.windowed and len(needing) <= min(self._free):
            self._take((len(needing),) * len(self._free))
            return
        for seq in sorted(needing, key=_rank):
            if seq.number not in self._preempted:
                self._make_room(seq, cache.needs(seq, standing.computed(seq), 1))

    def _verify(self) -> None:
        """Drafted tokens are decodes too: they go in one slice with the token before them, as many as a step
        holds beside the least shares of prompts."""
        verifying = sorted((seq for seq in self._s.prefill.values() if seq.drafts), key=_rank)
        shares = self._config.chunking.least_tokens * MOST_IN_PREFILL
        room = self._config.step_tokens - shares - self._load.tokens - len(verifying)
        for seq in verifying:
            drafts = min(seq.drafts, room)
            if seq.number in self._preempted:
                continue
            if self._make_room(seq, self._s.cache.needs(seq, seq.computed, 1 + drafts)):
                room -= drafts
                self._verifying[seq.number] = Chunk(seq.number, seq.computed, 1 + drafts, True, WHOLE, drafts)
                self._load = self._load.with_slice(seq.computed, 1 + drafts, 1 + drafts)

    def _make_room(self, seq: Sequence, needs: Counts) -> bool:
        """Takes `needs` from what is free; preempts the latest until they are. False: `seq` itself was the latest."""
        while not self._fits(needs):
            victim = self._latest() or seq
            self._preempt(victim, Reason(Why.OUT_OF_BLOCKS, (seq.number,)))
            if victim is seq:
                return False
        self._take(needs)
        return True

    def _latest(self) -> Sequence | None:
        """The least urgent of those that may be preempted, among equals the one that came last."""
        seated = (seq for _, seq in reversed(self._s.seated) if seq.number not in self._preempted)
        return next((seq for seq in seated if seq.stage is not Stage.PENDING), None)

    def _preempt(self, seq: Sequence, reason: Reason) -> None:
        """Its blocks and seat count as free from now on; what it would have computed in this step is taken out."""
        computed = self._s.computed(seq)
        self._preempted[seq.number] = Preemption(seq.number, computed, reason)
        self._parts = [part for part in self._parts if part.seq is not seq]
        self._seats += 1
        for g, freed in enumerate(self._s.cache.held_alone(seq, self._dropped)):
            self._free[g] += freed
        if seq.stage is Stage.STANDING:
            self._decoding -= 1
            self._load = self._load.without_slice(computed, 1, 1)
        elif chunk := self._verifying.pop(seq.number, None):
            self._load = self._load.without_slice(chunk.start, chunk.tokens, chunk.tokens)

    def _make_way_for_the_urgent(self) -> None:
        """Where the policy allows it, the least urgent give way to a waiting one that is more urgent and lacks
        nothing but their seats and blocks."""
        if not (self._config.priority_preempts and self._s.waiting and self._may_join()):
            return
        first = self._newcomer(next(iter(self._s.waiting)))
        if self._shares_prefix(first):
            return
        while (reason := self._lacks(first)) and reason.why is not Why.MANY_IN_PREFILL:
            victim = self._latest()
            if victim is None or victim.request.priority <= first.seq.request.priority:
                return
            self._preempt(victim, Reason(Why.MORE_URGENT, (first.seq.number,)))

    # --- 2. prompts in prefill ------------------------------------------------------------------------------------

    def _give_least_shares(self) -> None:
        """In turn, so that each gets one at least every fourth step; those that are overdue at once."""
        turns = -(-len(self._parts) // SHARE_EVERY_STEPS)
        for i, part in enumerate(sorted(self._parts, key=lambda part: (part.seq.advanced, part.seq.number))):
            if i < turns or self._s.counters.steps + 1 - part.seq.advanced >= SHARE_EVERY_STEPS:
                self._widen(part, Grant(min(self._config.chunking.least_tokens, part.left), Reason(Why.LEAST_SHARE)))

    # --- 3. the rest of the budget --------------------------------------------------------------------------------

    def _share_the_rest(self) -> None:
        """Shortest rest first. One newcomer gets a first share beside longer prompts, so that it soon has its turn."""
        unserved = [part for part in self._parts if part.left]
        newcomers = self._newcomers()
        newcomer = next(newcomers, None)
        if newcomer:
            self._give_first_share(newcomer)
        while unserved or newcomer:
            part = min((*unserved, newcomer) if newcomer else unserved, key=_nearest)
            if not self._serve(part):
                break
            if part is newcomer:
                newcomer = next(newcomers, None)
            else:
                unserved.remove(part)

    def _give_first_share(self, newcomer: _Part) -> None:
        """What the budget allows; more in its turn, or where no prompt got anything: some prompt always goes on."""
        least = min(self._config.chunking.least_tokens, newcomer.left)
        alone = not any(part.grant.tokens for part in self._parts)
        in_turn = (self._s.counters.steps + 1) % SHARE_EVERY_STEPS == 0
        if alone or in_turn or self._grant(newcomer, least).tokens == least:
            self._widen(newcomer, Grant(least, Reason(Why.LEAST_SHARE)))

    def _serve(self, part: _Part) -> bool:
        """Gives it all it lacks, or what the budget has left. False: the budget is used up."""
        wanted = part.left
        grant = self._grant(part, wanted)
        self._widen(part, grant)
        if part not in self._parts:
            self._held.append(Held(part.seq.number, Reason(Why.NO_BUDGET)))
        return grant.tokens == wanted

    def _grant(self, part: _Part, wanted: int) -> Grant:
        chunking, limit = self._config.chunking, self._config.step_tokens
        room, start = limit - self._load.tokens, part.start + part.grant.tokens
        if room < wanted and not chunking.least_tokens:
            return Grant(0, Reason(Why.TOKEN_BUDGET, (limit,)))
        grant = chunking.grant(self._load, start, min(wanted, room), self._decoding > 0 or bool(self._verifying))
        return Grant(grant.tokens, Reason(Why.TOKEN_BUDGET, (limit,))) if grant.tokens == room < wanted else grant

    def _widen(self, part: _Part, more: Grant) -> None:
        """Adds `more` to the part and to the step, if there are blocks for it; a newcomer takes its seat."""
        granted = part.grant.tokens + more.tokens
        if more.tokens == 0 or not self._takes_blocks(part, granted):
            return
        if part.enters and not part.grant.tokens:
            self._seats -= 1
            self._parts.append(part)
        if part.grant.tokens:
            self._load = self._load.without_slice(part.start, part.grant.tokens, 0)
        part.grant = Grant(granted, more.reason if granted < part.remaining else WHOLE)
        self._load = self._load.with_slice(part.start, granted, part.left == 0)
        if part.left == 0:
            part.forks = tuple(self._forks(part.seq))

    def _takes_blocks(self, part: _Part, tokens: int) -> bool:
        """A newcomer takes room for all it knows, if others took no seat or block meanwhile; the others what lacks."""
        if part.enters and part.taken:
            return True
        needs = part.needs if part.enters else self._s.cache.needs(part.seq, part.start, tokens)
        further = tuple(map(sub, needs, part.taken)) if part.taken else needs
        if not self._fits(further) or (part.enters and self._seats <= 0):
            return False
        self._take(further)
        part.taken = needs
        return True

    def _forks(self, seq: Sequence) -> Iterator[int]:
        """Further choices that begin where `seq` has its prompt done, as far as there are seats and blocks."""
        own_block = tuple(int(seq.known % BLOCK_TOKENS > 0) for _ in self._free)
        for sibling in seq.siblings:
            if self._seats <= 0 or not self._fits(own_block):
                return
            self._seats -= 1
            self._take(own_block)
            yield sibling.number

    def _newcomers(self) -> Iterator[_Part]:
        """Waiting sequences that may join, in the order of admission, up to the first that has to wait.

        Those that wait for a prefix are passed, but by few. A newcomer that gets nothing in the end is not admitted.
        """
        passed: dict[int, Sequence] = {}
        self._open = self._may_join()
        for seq in self._s.waiting:
            if not all(may_pass(seq, earliest) for earliest in passed.values()):
                return
            newcomer = self._newcomer(seq)
            reason = self._closed() or self._shares_prefix(newcomer) or self._lacks(newcomer)
            if reason is None:
                yield newcomer
                continue
            self._held.append(Held(seq.number, reason))
            if reason.why is not Why.SHARES_PREFIX:
                return
            earliest = passed.get(seq.request.priority, seq)
            passed[seq.request.priority] = min(earliest, seq, key=_number)

    def _may_join(self) -> int:
        first = next(iter(self._s.waiting), None)
        waited_ns = self._now - first.arrival_ns if first else 0
        return self._config.batching.open(self._s.running, len(self._s.waiting), self._s.batch_left, waited_ns)

    def _newcomer(self, seq: Sequence) -> _Part:
        """With what is here of it; its last token is computed in any case, to be sampled."""
        cached = self._s.cache.match(seq.hashes, min(len(seq.hashes), (seq.known - 1) // BLOCK_TOKENS))
        enters = Admission(seq.number, cached, seq.arrived, seq.known)
        needs = self._s.cache.needs_to_enter(seq.hashes, cached, enters.start, seq.known)
        return _Part(seq, enters.start, seq.known - enters.start, enters, needs)

    def _closed(self) -> Reason | None:
        """Nobody may join, whoever it is."""
        if self._preempted:
            return Reason(Why.AFTER_PREEMPTION)
        return Reason(Why.BATCH_CLOSED) if self._open <= sum(part.enters is not None for part in self._parts) else None

    def _shares_prefix(self, part: _Part) -> Reason | None:
        """Somebody in prefill is about to compute the first block that the newcomer lacks."""
        hashes, lacking = part.seq.hashes, part.start // BLOCK_TOKENS
        if lacking >= min(len(hashes), (part.seq.known - 1) // BLOCK_TOKENS) or part.seq.arrived:
            return None
        for other in (running.seq for running in self._parts):
            if other.published <= lacking < len(other.hashes) and other.hashes[lacking] == hashes[lacking]:
                return Reason(Why.SHARES_PREFIX, (other.number,))
        return None

    def _lacks(self, part: _Part) -> Reason | None:
        """A place among the prompts in mid-prefill, a seat, or blocks."""
        unfinished = [running.left for running in self._parts if running.left]
        crowded = len(unfinished) >= MANY_IN_PREFILL and part.left >= min(unfinished)
        if crowded or len(unfinished) >= MOST_IN_PREFILL:
            return Reason(Why.MANY_IN_PREFILL, (len(unfinished),))
        if self._seats <= 0:
            return Reason(Why.NO_SEAT, (self._config.seats,))
        kept = self._kept if self._load.tokens else (0,) * len(part.needs)
        for g, (need, free, keep) in enumerate(zip(part.needs, self._free, kept, strict=True)):
            if need + keep > free:
                return Reason(Why.NO_BLOCKS, (g, need, free, keep))
        return None

    # --- blocks ---------------------------------------------------------------------------------------------------

    def _never_stall(self) -> None:
        """Prompts whose windows lack blocks wait for others to end; where nothing else runs, the latest gives way."""
        if self._parts and not self._load.tokens and not self._preempted and (latest := self._latest()):
            self._preempt(latest, Reason(Why.OUT_OF_BLOCKS, (min(part.seq.number for part in self._parts),)))

    def _fits(self, needs: Counts) -> bool:
        return all(need <= free for need, free in zip(needs, self._free, strict=True))

    def _take(self, needs: Counts) -> None:
        for g, need in enumerate(needs):
            self._free[g] -= need


_rank = attrgetter("rank")
_number = attrgetter("number")


def _nearest(part: _Part) -> tuple[int, int, int]:
    """The most urgent first, then whoever is nearest to its first token."""
    return part.seq.request.priority, part.left, part.seq.number
