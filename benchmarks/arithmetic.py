"""Operations and bytes of steps, from the model's shape alone.

Only useful work counts: what padding, rounding to tiles or a second pass over finely rounded activations add is the
kernels' own cost.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from twostep.spec.shape import ModelShape


@dataclass(frozen=True)
class Part:
    """One sequence's share of a step: `count` tokens from position `start`, `logits` rows of them through the head."""

    start: int
    count: int
    logits: int


@dataclass(frozen=True)
class Work:
    """What some steps have to do in all. Operations count a multiplication and an addition as two."""

    linear_ops: int
    head_ops: int
    attention_flops: int
    kv_bytes: int
    """Bytes of KV cache read, each position once a slice: what memory must deliver if caches work."""

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.linear_ops + other.linear_ops,
            self.head_ops + other.head_ops,
            self.attention_flops + other.attention_flops,
            self.kv_bytes + other.kv_bytes,
        )


NOTHING = Work(0, 0, 0, 0)


def layer_weights(shape: ModelShape) -> int:
    """Elements of one layer's matrices: query, key, value, output, and gate, up, down."""
    attention = 2 * shape.width * (shape.heads + shape.kv_heads) * shape.head_dim
    return attention + 3 * shape.width * shape.ffn_width


def pairs(start: int, count: int) -> int:
    """Query-key pairs under the causal mask: the query at position p meets p + 1 keys."""
    return count * start + count * (count + 1) // 2


def work(shape: ModelShape, parts: Iterable[Part]) -> Work:
    """The work of one step, or of several if their parts are chained."""
    return sum((_work_of(shape, part) for part in parts), NOTHING)


def _work_of(shape: ModelShape, part: Part) -> Work:
    """Attention: a product of head_dim for the score and another for the value, 4·head_dim FLOP a pair and head."""
    return Work(
        linear_ops=2 * part.count * shape.layers * layer_weights(shape),
        head_ops=2 * part.logits * shape.vocab * shape.width,
        attention_flops=4 * shape.head_dim * shape.heads * shape.layers * pairs(part.start, part.count),
        kv_bytes=(part.start + part.count) * shape.kv_bytes_per_token(),
    )
