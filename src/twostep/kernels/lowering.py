"""Fuses a network's operations into the instructions of the native program.

The list is semantic; the native kernels run fewer, wider instructions: norm + quantise + the projections that read it,
norm of heads with rotation and the write to the cache, gate and up with their activation, a projection with its norm
and the addition to the residual stream. Each rule here recognises one such run of operations and takes it from the
list; a run that no rule takes is an error, never skipped.

The program has fixed buffers where the list has names. So a rule also looks at the instruction before it, and takes
only operations that read what that one left: a network wired otherwise would be computed wrongly.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

from twostep.model.ops import Activation, Add, Attention, Embed, Gated, HeadNorm, Linear, Logits, Op, RmsNorm, Rope


@dataclass(frozen=True)
class NormLinear:
    """Norm of the residual stream, then the projections to q, k and v, in this order."""

    norm: RmsNorm
    q: Linear
    k: Linear
    v: Linear


@dataclass(frozen=True)
class Attend:
    """Normalises and rotates the heads of q and k where the network does, writes k and v to the cache, attends."""

    q_norm: HeadNorm | None
    k_norm: HeadNorm | None
    q_rope: Rope | None
    k_rope: Rope | None
    attention: Attention


@dataclass(frozen=True)
class LinearAdd:
    """A projection of attention's heads or of the feed-forward's activation, normalised where the network does, added
    to the residual stream."""

    linear: Linear
    post_norm: RmsNorm | None
    add: Add
    from_heads: bool


@dataclass(frozen=True)
class NormGated:
    """Norm of the residual stream, gate and up projections, activation."""

    norm: RmsNorm
    gate: Linear
    up: Linear
    gated: Gated


@dataclass(frozen=True)
class NormLogits:
    """The last norm and the head, for the rows asked for."""

    norm: RmsNorm
    logits: Logits


Instruction = Embed | NormLinear | Attend | LinearAdd | NormGated | NormLogits


class LoweringError(ValueError):
    """The native program has no instruction for a run of operations."""


def lower(ops: Sequence[Op]) -> Iterator[Instruction]:
    """The instructions of `ops`, in order. Raises `LoweringError` that names the first operation no rule takes."""
    _check_residual(ops)
    at = 0
    instruction: Instruction | None = None
    while at < len(ops):
        instruction, taken = _next(ops[at:], instruction)
        yield instruction
        at += taken
    if not isinstance(instruction, NormLogits):
        raise LoweringError("the network does not end with its logits")


def _check_residual(ops: Sequence[Op]) -> None:
    """There is one residual stream: the embedding begins it, every norm but those of projections reads it, and every
    addition adds to it."""
    projected = {(before.out, i) for i, before in enumerate(ops, 1) if isinstance(before, Linear)}
    read = {op.x for i, op in enumerate(ops) if isinstance(op, RmsNorm) and (op.x, i) not in projected}
    written = {op.out for op in ops if isinstance(op, Embed | Add)}
    if len(read | written) > 1:
        raise LoweringError(f"the native program has one residual stream, this network {sorted(read | written)}")


def _next(ops: Sequence[Op], before: Instruction | None) -> tuple[Instruction, int]:
    for kinds, rule in _RULES:
        run = ops[: len(kinds)]
        if len(run) == len(kinds) and all(isinstance(op, kind) for op, kind in zip(run, kinds, strict=True)):
            instruction = rule(before, *run)
            if instruction is not None:
                return instruction, len(kinds)
    names = ", ".join(type(op).__name__ for op in ops[:5])
    raise LoweringError(f"no native instruction after {type(before).__name__} for {names}, ...: {ops[0]}")


def _embed(before: Instruction | None, embed: Embed) -> Embed | None:
    return embed if before is None else None


def _starts(before: Instruction | None) -> bool:
    """Whether the residual stream is complete, so that a part of a layer or the head can begin."""
    return isinstance(before, Embed | LinearAdd)


def _qkv(before: Instruction | None, norm: RmsNorm, q: Linear, k: Linear, v: Linear) -> NormLinear | None:
    return NormLinear(norm, q, k, v) if _starts(before) and q.x == k.x == v.x == norm.out else None


def _attend(before: Instruction | None, *ops: Op) -> Attend | None:
    attention = ops[-1]
    assert isinstance(attention, Attention)
    qkv = (attention.q, attention.k, attention.v)
    if not isinstance(before, NormLinear) or (before.q.out, before.k.out, before.v.out) != qkv:
        return None
    changed = [op.x for op in ops if isinstance(op, HeadNorm | Rope)]
    if changed != [*qkv[:2]] * (len(changed) // 2):
        return None
    q_norm, k_norm = [op for op in ops if isinstance(op, HeadNorm)] or (None, None)
    q_rope, k_rope = [op for op in ops if isinstance(op, Rope)] or (None, None)
    _check_heads(attention, (q_norm, q_rope), (k_norm, k_rope))
    if q_rope and k_rope and (q_rope.base, q_rope.style) != (k_rope.base, k_rope.style):
        raise LoweringError(f"layer {attention.layer}: q and k are rotated in different ways: {q_rope}, {k_rope}")
    return Attend(q_norm, k_norm, q_rope, k_rope, attention)


def _check_heads(attention: Attention, *sides: tuple[HeadNorm | None, Rope | None]) -> None:
    for heads, ops in zip((attention.heads, attention.kv_heads), sides, strict=True):
        for op in ops:
            if op and (op.heads, op.head_dim) != (heads, attention.head_dim):
                found = f"{op.heads} heads of {op.head_dim}, attention {heads} of {attention.head_dim}"
                raise LoweringError(f"layer {attention.layer}: {type(op).__name__} of {op.x} has {found}")


def _gated(before: Instruction | None, norm: RmsNorm, gate: Linear, up: Linear, gated: Gated) -> NormGated | None:
    if gated.activation not in get_args(Activation):
        allowed = ", ".join(get_args(Activation))
        raise LoweringError(f"the native program has no activation {gated.activation!r}; it has {allowed}")
    matches = gate.x == up.x == norm.out and (gate.out, up.out) == (gated.gate, gated.up)
    plain = gate.bias is None and up.bias is None
    return NormGated(norm, gate, up, gated) if _starts(before) and matches and plain else None


def _project(before: Instruction | None, linear: Linear, add: Add) -> LinearAdd | None:
    return _projection(before, linear, None, add)


def _project_with_norm(before: Instruction | None, linear: Linear, norm: RmsNorm, add: Add) -> LinearAdd | None:
    return _projection(before, linear, norm, add) if norm.x == linear.out else None


def _projection(before: Instruction | None, linear: Linear, norm: RmsNorm | None, add: Add) -> LinearAdd | None:
    match before:
        case Attend(attention=Attention(out=x)) | NormGated(gated=Gated(out=x)):
            matches = linear.x == x and (linear if norm is None else norm).out == add.x
            return LinearAdd(linear, norm, add, isinstance(before, Attend)) if matches else None
    return None


def _head(before: Instruction | None, norm: RmsNorm, logits: Logits) -> NormLogits | None:
    return NormLogits(norm, logits) if _starts(before) and logits.x == norm.out else None


_RULES: tuple[tuple[tuple[type, ...], Callable[..., Instruction | None]], ...] = (
    ((Embed,), _embed),
    ((RmsNorm, Linear, Linear, Linear), _qkv),
    ((HeadNorm, HeadNorm, Rope, Rope, Attention), _attend),
    ((HeadNorm, HeadNorm, Attention), _attend),
    ((Rope, Rope, Attention), _attend),
    ((Attention,), _attend),
    ((RmsNorm, Linear, Linear, Gated), _gated),
    ((Linear, Add), _project),
    ((Linear, RmsNorm, Add), _project_with_norm),
    ((RmsNorm, Logits), _head),
)
