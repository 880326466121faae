"""The decode batch: sequences of which every step computes one token, so that a step costs only what changes."""

from collections.abc import Iterable, ValuesView

from twostep.core.request import BLOCK_TOKENS, Sequence, Stage


class DecodeBatch:
    """Members are one token behind. A step is counted once for all: `computed` of a member is its `offset` + `steps`.

    Two indexes find the members that need attention: by their position within their block, and by the step that
    computes their last token.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.context_tokens = 0
        """Positions that the next step's attention reads, over all members."""
        self._members: dict[int, Sequence] = {}
        self._at_phase: list[dict[int, Sequence]] = [{} for _ in range(BLOCK_TOKENS)]
        self._last: dict[int, dict[int, Sequence]] = {}

    def __len__(self) -> int:
        return len(self._members)

    @property
    def members(self) -> ValuesView[Sequence]:
        """In the order in which they joined."""
        return self._members.values()

    def computed(self, seq: Sequence) -> int:
        return seq.offset + self.steps

    def join(self, seq: Sequence) -> None:
        """Adds `seq`, whose counts are up to date; it decodes from the next step on."""
        assert seq.known == seq.computed + 1, "a decoding sequence is one token behind"
        seq.stage = Stage.DECODE
        seq.offset = seq.computed - self.steps
        self._members[seq.number] = seq
        self._at_phase[seq.offset % BLOCK_TOKENS][seq.number] = seq
        self._last.setdefault(self._last_step(seq), {})[seq.number] = seq
        self.context_tokens += seq.computed + 1

    def leave(self, seq: Sequence) -> None:
        """Removes `seq` and brings its own counts up to date."""
        seq.computed = self.computed(seq)
        seq.known = seq.computed + 1
        del self._members[seq.number]
        del self._at_phase[seq.offset % BLOCK_TOKENS][seq.number]
        last = self._last_step(seq)
        del self._last[last][seq.number]
        if not self._last[last]:
            del self._last[last]
        self.context_tokens -= seq.computed + 1

    def advance(self) -> None:
        """Counts a step that computes one token of each member."""
        self.steps += 1
        self.context_tokens += len(self._members)

    def starting_a_block(self) -> Iterable[Sequence]:
        """Members whose next token is the first of a block, so that they may need one."""
        return self._at_phase[-self.steps % BLOCK_TOKENS].values()

    def finishing(self) -> list[Sequence]:
        """Members whose last token was computed by the last step counted."""
        return list(self._last.get(self.steps, {}).values())

    def _last_step(self, seq: Sequence) -> int:
        """`steps` after which it knows `limit` tokens: known = offset + steps + 1."""
        return seq.request.prompt_tokens + seq.request.max_tokens - 1 - seq.offset

    def check(self) -> None:
        """Raises `AssertionError` where the indexes do not match the members."""
        phases = {n: phase for phase, here in enumerate(self._at_phase) for n in here}
        assert phases == {n: seq.offset % BLOCK_TOKENS for n, seq in self._members.items()}, "phases"
        last = {n: step for step, here in self._last.items() for n in here}
        assert last == {n: self._last_step(seq) for n, seq in self._members.items()}, "last steps"
        assert all(step > self.steps for step in last.values()), "a member outlived its last step"
        assert self.context_tokens == sum(self.computed(seq) + 1 for seq in self.members), "context"
