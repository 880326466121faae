"""Fuses a network's operations into the instructions of the native program.

The list is semantic; the native kernels want fewer, wider steps: norm + quantise + the projections that read it,
rotation with the write to the cache, gate and up with their activation, a projection with the addition to the residual
stream. Each rule here recognises one such run of operations and takes it from the list; a run that no rule knows is an
error, never skipped.

The program has fixed buffers where the list has names. So a rule also looks at the instruction before it, and takes
only operations that read what that one left: a network wired otherwise would be computed, but wrongly.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from twostep.model.ops import Add, Attention, Embed, GatedSilu, Linear, Logits, Op, RmsNorm, Rope


@dataclass(frozen=True)
class NormLinear:
    """Norm of the residual stream, then the projections to q, k and v, in this order."""

    norm: RmsNorm
    q: Linear
    k: Linear
    v: Linear


@dataclass(frozen=True)
class RotateAttend:
    """Rotates q and k, writes k and v to the cache, attends."""

    q_rope: Rope
    k_rope: Rope
    attention: Attention


@dataclass(frozen=True)
class LinearAdd:
    """A projection, of attention's heads or else of the feed-forward's activation, added to the residual stream."""

    linear: Linear
    add: Add
    from_heads: bool


@dataclass(frozen=True)
class NormGatedSilu:
    """Norm of the residual stream, gate and up projections, activation."""

    norm: RmsNorm
    gate: Linear
    up: Linear
    activation: GatedSilu


@dataclass(frozen=True)
class NormLogits:
    """The last norm and the head, for the rows asked for."""

    norm: RmsNorm
    logits: Logits


Instruction = Embed | NormLinear | RotateAttend | LinearAdd | NormGatedSilu | NormLogits


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


def rotation(ops: Sequence[Op]) -> Rope:
    """The rotation of every layer: the program has one table of angles. Raises `LoweringError` where layers differ."""
    found = {(op.base, op.style, op.head_dim): op for op in ops if isinstance(op, Rope)}
    if len(found) != 1:
        raise LoweringError(f"the native program rotates all layers alike, this network in {len(found)} ways")
    return next(iter(found.values()))


def _check_residual(ops: Sequence[Op]) -> None:
    """There is one residual stream: what the embedding begins, every norm reads and every addition adds to."""
    read = {op.x for op in ops if isinstance(op, RmsNorm)}
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
    """Whether the residual stream is complete, so that a part of a layer or the head may begin."""
    return isinstance(before, Embed | LinearAdd)


def _qkv(before: Instruction | None, norm: RmsNorm, q: Linear, k: Linear, v: Linear) -> NormLinear | None:
    return NormLinear(norm, q, k, v) if _starts(before) and q.x == k.x == v.x == norm.out else None


def _attend(before: Instruction | None, q_rope: Rope, k_rope: Rope, attention: Attention) -> RotateAttend | None:
    qkv = (attention.q, attention.k, attention.v)
    follows = isinstance(before, NormLinear) and (before.q.out, before.k.out, before.v.out) == qkv
    return RotateAttend(q_rope, k_rope, attention) if follows and (q_rope.x, k_rope.x) == qkv[:2] else None


def _gated(
    before: Instruction | None, norm: RmsNorm, gate: Linear, up: Linear, activation: GatedSilu
) -> NormGatedSilu | None:
    matches = gate.x == up.x == norm.out and (gate.out, up.out) == (activation.gate, activation.up)
    plain = gate.bias is None and up.bias is None
    return NormGatedSilu(norm, gate, up, activation) if _starts(before) and matches and plain else None


def _project(before: Instruction | None, linear: Linear, add: Add) -> LinearAdd | None:
    match before:
        case RotateAttend(attention=Attention(out=x)) | NormGatedSilu(activation=GatedSilu(out=x)):
            matches = linear.x == x and linear.out == add.x
            return LinearAdd(linear, add, isinstance(before, RotateAttend)) if matches else None
    return None


def _head(before: Instruction | None, norm: RmsNorm, logits: Logits) -> NormLogits | None:
    return NormLogits(norm, logits) if _starts(before) and logits.x == norm.out else None


_RULES: tuple[tuple[tuple[type, ...], Callable[..., Instruction | None]], ...] = (
    ((Embed,), _embed),
    ((RmsNorm, Linear, Linear, Linear), _qkv),
    ((Rope, Rope, Attention), _attend),
    ((RmsNorm, Linear, Linear, GatedSilu), _gated),
    ((Linear, Add), _project),
    ((RmsNorm, Logits), _head),
)
