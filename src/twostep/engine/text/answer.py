"""One choice as the executor needs it: its tokens, how the next one is sampled, the hashes of its full blocks."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from twostep.core.blocks import block_hash
from twostep.engine.params import SamplingParams, forbid
from twostep.engine.text.constraint import Constraint
from twostep.errors import SamplingError
from twostep.kernels.sampling import Sampled, SampleRow
from twostep.kernels.step import BLOCK_TOKENS, Ints
from twostep.model.tokenizer import Tokenizer

Mask = NDArray[np.uint32]


class Vocabulary:
    """A model's tokens as the executor needs them: which end an answer, and which rows of the head are padding."""

    def __init__(self, rows: int, tokenizer: Tokenizer | None) -> None:
        """`rows` of the head; those beyond the tokenizer's tokens are padding, which is never sampled."""
        self.rows = rows
        self.tokens = tokenizer.vocab_size if tokenizer else rows
        self.eos_ids = frozenset(tokenizer.eos_ids) if tokenizer else frozenset[int]()
        self._padding = range(self.tokens, rows)
        self.all = forbid(self._padding, rows) if self._padding else None
        """The mask that allows all tokens, shared by all answers; None if no row is padding."""

    def mask_excluding(self, forbidden: frozenset[int]) -> Mask:
        """A mask that allows all tokens but these."""
        return forbid((*self._padding, *forbidden), self.rows)


class Answer:
    """The known tokens of one choice. `params` have a seed. `hashes`: of the prompt's full blocks; None: KV is not
    reused. `root`: the parent of the first block's hash. `constraint`: this choice's own, if its output is
    structured."""

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        choice: int,
        max_tokens: int,
        vocabulary: Vocabulary,
        hashes: Sequence[bytes] | None,
        root: bytes,
        constraint: Constraint | None = None,
    ) -> None:
        self.params, self.choice = params, choice
        self.prompt_tokens = self.known = len(prompt)
        self.tokens: Ints = np.empty(len(prompt) + max_tokens, np.int32)
        self.tokens[: self.known] = prompt
        self.stop_ids = params.stop_ids(vocabulary.eos_ids)
        self._mask = vocabulary.all
        too_early = params.forbidden_ids(vocabulary.eos_ids, output_tokens=0)
        self._early_mask = vocabulary.mask_excluding(too_early) if too_early else vocabulary.all
        self._hashes = None if hashes is None else list(hashes)
        self._root = root
        self._constraint = constraint

    def resume(self, token_ids: Sequence[int]) -> None:
        """Adds output that was sampled before, by another engine: what follows depends on nothing else."""
        end = self.known + len(token_ids)
        self.tokens[self.known : end] = token_ids
        self.known = end

    @property
    def output(self) -> Ints:
        """Output tokens so far; a view."""
        return self.tokens[self.prompt_tokens : self.known]

    def prepare(self) -> None:
        """Computes the constraint's mask early, so that `row` does not wait for it."""
        if self._constraint is not None:
            self._allowed()

    def row(self) -> SampleRow:
        """How the sampler is to choose the next token."""
        params, mask = self.params, self._allowed()
        if not params.reads_history:
            return SampleRow(params, self.choice, self.known, mask=mask)
        return SampleRow(params, self.choice, self.known, self.tokens[: self.prompt_tokens], self.output, mask)

    def _allowed(self) -> Mask | None:
        mask = self._early_mask if self.known - self.prompt_tokens < self.params.min_tokens else self._mask
        return mask if self._constraint is None else self._constraint.mask(self.output, mask)

    def explained(self, choice: Sampled | SamplingError) -> Sampled | SamplingError:
        """Returns `choice`, or an error with the constraint's reason if that is why no token was sampled."""
        if self._constraint is None or self._constraint.problem is None or isinstance(choice, Sampled):
            return choice
        return SamplingError(self._constraint.problem)

    def append(self, token: int) -> bool:
        """Adds a token; returns whether it ends the answer."""
        self.tokens[self.known] = token
        self.known += 1
        return token in self.stop_ids

    def new_hashes(self) -> tuple[bytes, ...]:
        """Returns the hashes of blocks that became full since the last call; all tokens except the last are
        computed."""
        if self._hashes is None or len(self._hashes) >= (self.known - 1) // BLOCK_TOKENS:
            return ()
        first = len(self._hashes)
        for start in range(first * BLOCK_TOKENS, self.known - BLOCK_TOKENS, BLOCK_TOKENS):
            parent = self._hashes[-1] if self._hashes else self._root
            self._hashes.append(block_hash(parent, self.tokens[start : start + BLOCK_TOKENS].tolist()))
        return tuple(self._hashes[first:])
