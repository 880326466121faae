"""An executor without a model that believes nothing: it keeps a KV cache of token ids and checks every read.

What a slot of a block holds is the whole prefix up to its position, so any mix-up (a block given out too early, a
wrong match, a fork that shares what is written) is found when a later token looks at it. Tokens are a hash of the
prefix and the choice, so they do not depend on company; some of them end the answer.
"""

from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import accumulate

from twostep.core.blocks import block_hash, root_hash
from twostep.core.cost import StepShape
from twostep.core.kv_cache import BlockGroup
from twostep.core.loop import Capabilities
from twostep.core.plan import Plan, SliceOutcome, Step, StepResult
from twostep.core.request import BLOCK_TOKENS, FinishReason

Prefix = bytes
STOP_BELOW = 8
"""Of 256 tokens those that end an answer."""


def next_token(prefix: Prefix, choice: int) -> int:
    return blake2b(prefix, digest_size=1, salt=choice.to_bytes(2, "little")).digest()[0]


def prefixes_of(tokens: Sequence[int]) -> list[Prefix]:
    """Of the first 0, 1, ... all tokens."""
    return list(accumulate(tokens, longer, initial=b""))


def longer(prefix: Prefix, token: int) -> Prefix:
    return blake2b(token.to_bytes(4, "little"), digest_size=8, key=prefix[:8]).digest()


def answer_alone(prompt: Sequence[int], choice: int, max_tokens: int, *, stops: bool = True) -> list[int]:
    """What a request answers when nobody else is there: the chain of next tokens, without any cache or schedule."""
    prefix, answer = prefixes_of(prompt)[-1], list[int]()
    while len(answer) < max_tokens and not (stops and answer and answer[-1] < STOP_BELOW):
        answer.append(next_token(prefix, choice))
        prefix = longer(prefix, answer[-1])
    return answer


def step_ns_of(shape: StepShape) -> int:
    return 3_000_000 + 900_000 * shape.tokens + 20 * shape.pairs + 200_000 * shape.logit_rows


class CheckedExecutor:
    """`draft(number, tokens)` proposes how many next tokens to guess; every third guess is wrong."""

    def __init__(
        self,
        groups: Sequence[BlockGroup],
        *,
        stops: bool = True,
        hashing: bool = True,
        drafts: Callable[[int, int], int] = lambda number, known: 0,
        time_of: Callable[[StepShape], int] = step_ns_of,
    ) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.choice: dict[int, int] = {}
        self.sampled: dict[int, int] = {}
        """Tokens that the last step gave, by sequence."""
        self.failing: set[int] = set()
        self.fail_step = False
        self._groups, self._stops, self._hashing, self._drafts, self._time_of = groups, stops, hashing, drafts, time_of
        self._memory: list[dict[tuple[int, int], Prefix]] = [{} for _ in groups]
        self._tables: dict[int, list[list[int]]] = {}
        self._standing: dict[int, int] = {}
        self._hashed: dict[int, list[bytes]] = {}
        self._prefixes: dict[int, list[Prefix]] = {}
        self._result: StepResult | None = None
        self.capabilities = Capabilities(tuple(groups), drafts=True, arrived_kv=True)

    def add(self, number: int, prompt: Sequence[int], choice: int, hashes: Sequence[bytes]) -> None:
        self.tokens[number] = list(prompt)
        self.choice[number] = choice
        self._prefixes[number] = prefixes_of(prompt)
        self._hashed[number] = list(hashes)

    def start(self, step: Step) -> None:
        assert self._result is None, "a step is under way"
        for number in step.left:
            del self._standing[number]
        self._standing.update(step.joined)
        for granted in step.granted:
            tables = self._tables.setdefault(granted.number, [[] for _ in self._groups])
            tables[granted.group][granted.first :] = granted.blocks
        for admission in step.plan.admissions:
            self._receive(admission.number, admission.cached * BLOCK_TOKENS, admission.arrived)
        assert len(self._standing) == step.plan.decoding
        self._result = self._compute(step)

    def poll(self) -> StepResult | None:
        result, self._result = self._result, None
        return result

    def result(self) -> StepResult:
        """Of the step that was started."""
        result = self.poll()
        assert result is not None
        return result

    def _receive(self, number: int, start: int, end: int) -> None:
        """KV from elsewhere: what another would have computed, from the first block that the next token sees."""
        prefixes = self._prefixes[number]
        for group, spec in enumerate(self._groups):
            first = 0 if spec.window is None else max(0, end - spec.window + 1)
            for position in range(max(start, first // BLOCK_TOKENS * BLOCK_TOKENS), end):
                self._write(number, group, position, prefixes[position + 1])

    def _compute(self, step: Step) -> StepResult:
        outcomes: dict[int, SliceOutcome] = {}
        hashes: dict[int, tuple[bytes, ...]] = {}
        self.sampled = {}
        assert step.plan.shape == self._shape(step.plan), "the plan's shape is not what it computes"
        if self.fail_step:
            return self._fail(step.plan)
        for number, position in self._standing.items():
            self._run(number, position, 1)
            self._sample(number, outcomes)
            self._standing[number] = position + 1
        for chunk in step.plan.chunks:
            guessed = self._run(chunk.number, chunk.start, chunk.tokens, chunk.drafts)
            for number in (chunk.number, *chunk.forks) if chunk.samples else ():
                self._sample(number, outcomes, guessed)
        for copied in step.copied:
            self._copy(*copied)
        for number in (*self._standing, *(n for chunk in step.plan.chunks for n in (chunk.number, *chunk.forks))):
            if new := self._new_hashes(number):
                hashes[number] = new
        return StepResult(self._time_of(step.plan.shape), outcomes, hashes)

    def _shape(self, plan: Plan) -> StepShape:
        shape = StepShape()
        for position in self._standing.values():
            shape = shape.with_slice(position, 1, 1)
        for chunk in plan.chunks:
            shape = shape.with_slice(chunk.start, chunk.tokens, 1 + chunk.drafts if chunk.samples else 0)
        return shape

    def _fail(self, plan: Plan) -> StepResult:
        """Nobody knows what a failed step wrote: all that it might have is spoilt."""
        self.fail_step = False
        slices = [*((n, start, 1) for n, start in self._standing.items()), *(chunk[:3] for chunk in plan.chunks)]
        for number, start, count in slices:
            for position in range(start, start + count):
                for group in range(len(self._groups)):
                    self._write(number, group, position, b"spoilt")
        blamed = {number: SliceOutcome(finished=FinishReason.FAILED) for number in self.failing}
        return StepResult(1, blamed, {}, failed=True)

    def _run(self, number: int, start: int, count: int, drafts: int = 0) -> list[int]:
        """Writes and checks `count` positions; returns the guesses among them."""
        prefixes = list(self._prefixes[number])
        guesses: list[int] = []
        while len(guesses) < drafts:
            right = next_token(prefixes[-1], self.choice[number])
            guesses.append(right if (len(prefixes) + number) % 3 else (right + 1) % 256)
            prefixes.append(longer(prefixes[-1], guesses[-1]))
        assert start + count < len(prefixes), f"sequence {number} computes tokens that nobody knows"
        for position in range(start, start + count):
            for group, spec in enumerate(self._groups):
                first = 0 if spec.window is None else max(0, position - spec.window + 1)
                for seen in (first, (first + position) // 2, position - 1):
                    if first <= seen < position:
                        found = self._memory[group].get(self._slot(number, group, seen))
                        assert found == prefixes[seen + 1], f"sequence {number}: position {seen} is not its KV"
                self._write(number, group, position, prefixes[position + 1])
        return guesses

    def _sample(self, number: int, outcomes: dict[int, SliceOutcome], guessed: Sequence[int] = ()) -> None:
        tokens, prefixes = self.tokens[number], self._prefixes[number]
        new: list[int] = []
        finished = None
        for guess in (*guessed, None):
            new.append(next_token(prefixes[-1], self.choice[number]))
            prefixes.append(longer(prefixes[-1], new[-1]))
            if self._stops and new[-1] < STOP_BELOW:
                finished = FinishReason.STOP
            if finished or new[-1] != guess:
                break
        tokens.extend(new)
        self.sampled[number] = len(new)
        drafts = self._drafts(number, len(tokens))
        if finished or len(new) > 1 or drafts or guessed:
            outcomes[number] = SliceOutcome(len(new), finished, drafts)

    def _new_hashes(self, number: int) -> tuple[bytes, ...]:
        """Of blocks whose tokens are all known and computed: all but the last token are."""
        tokens, hashed = self.tokens[number], self._hashed[number]
        if not self._hashing:
            return ()
        first = len(hashed)
        for start in range(first * BLOCK_TOKENS, len(tokens) - BLOCK_TOKENS, BLOCK_TOKENS):
            parent = hashed[-1] if hashed else root_hash("checked", "test")
            hashed.append(block_hash(parent, tokens[start : start + BLOCK_TOKENS]))
        return tuple(hashed[first:])

    def _slot(self, number: int, group: int, position: int) -> tuple[int, int]:
        return self._tables[number][group][position // BLOCK_TOKENS], position % BLOCK_TOKENS

    def _write(self, number: int, group: int, position: int, prefix: Prefix) -> None:
        self._memory[group][self._slot(number, group, position)] = prefix

    def _copy(self, group: int, source: int, target: int) -> None:
        memory = self._memory[group]
        for slot in range(BLOCK_TOKENS):
            if (prefix := memory.get((source, slot))) is not None:
                memory[target, slot] = prefix
