"""What the processes around a model take beside weights, activations and KV cache, once these have been planned.

Measured, not derived: `tests/engine/test_memory_used.py` holds it against what the system says. Sizes are in bytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass

_MIB = 1 << 20

ENGINE_BYTES = 8 * _MIB
"""Requests and steps in the engine as Python objects, and what its allocator keeps back."""
THREAD_BYTES = 2 * _MIB
"""Scratch and stack of one thread of the kernels."""
TOKENIZER_BYTES = 490
"""Of each token of the vocabulary, in each process that has the tokenizer."""
GRAMMAR_BYTES = 430
"""Of each token of the vocabulary: tables for structured output, in the engine."""
TEMPLATE_BYTES = 12 * _MIB
"""The process that renders the chat template."""
SERVER_BYTES = 38 * _MIB
"""The process that speaks HTTP, without its tokenizer."""
FORM_BYTES = 22 * _MIB
"""The process that tries a form of structured output, while there is one."""


@dataclass(frozen=True)
class HostDemand:
    """`vocab` is 0 for an engine without tokenizer; `serves`: the engine belongs to a server, whose processes count."""

    vocab: int
    threads: int
    serves: bool

    @property
    def total_bytes(self) -> int:
        """All together."""
        return sum(size for size, _ in self._parts())

    @property
    def engine_bytes(self) -> int:
        """What the engine's own process takes of it."""
        return ENGINE_BYTES + self.threads * THREAD_BYTES + self.vocab * (TOKENIZER_BYTES + GRAMMAR_BYTES)

    def words(self) -> str:
        """The parts in words, of which the total is the sum."""
        return " + ".join(f"{size / _MIB:.1f} MiB {name}" for size, name in self._parts())

    def _parts(self) -> Iterator[tuple[int, str]]:
        yield ENGINE_BYTES, "engine"
        yield self.threads * THREAD_BYTES, f"{self.threads} threads"
        if self.vocab:
            copies = 2 if self.serves else 1
            tables = self.vocab * (copies * TOKENIZER_BYTES + GRAMMAR_BYTES)
            yield tables, f"tokenizer ({'twice' if self.serves else 'once'}) and grammars of {self.vocab} tokens"
            yield TEMPLATE_BYTES, "chat template"
        if self.serves:
            yield SERVER_BYTES + FORM_BYTES, "server"
