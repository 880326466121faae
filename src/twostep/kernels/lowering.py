"""Fuses a network's operations into the instructions of the native program.

The list is semantic; the native kernels want fewer, wider steps: norm + quantise + the projections that read it, rotation with
the write to the cache, gate and up with their activation, a projection with the addition to the residual stream. Each rule
here recognises one such run of operations and takes it from the list; a run that no rule knows is an error, never skipped.
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
    """A projection added to the residual stream."""

    linear: Linear
    add: Add


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
    at = 0
    while at < len(ops):
        instruction, taken = _next(ops[at:])
        yield instruction
        at += taken


def _next(ops: Sequence[Op]) -> tuple[Instruction, int]:
    for kinds, rule in _RULES:
        run = ops[: len(kinds)]
        if len(run) == len(kinds) and all(isinstance(op, kind) for op, kind in zip(run, kinds, strict=True)):
            instruction = rule(*run)
            if instruction is not None:
                return instruction, len(kinds)
    raise LoweringError(f"no native instruction for {', '.join(type(op).__name__ for op in ops[:5])}, ...: {ops[0]}")


def _qkv(norm: RmsNorm, q: Linear, k: Linear, v: Linear) -> NormLinear | None:
    return NormLinear(norm, q, k, v) if q.x == k.x == v.x == norm.out else None


def _attend(q_rope: Rope, k_rope: Rope, attention: Attention) -> RotateAttend | None:
    matches = (q_rope.x, k_rope.x) == (attention.q, attention.k) and q_rope.style == k_rope.style
    return RotateAttend(q_rope, k_rope, attention) if matches else None


def _project(linear: Linear, add: Add) -> LinearAdd | None:
    return LinearAdd(linear, add) if linear.out == add.x else None


def _gated(norm: RmsNorm, gate: Linear, up: Linear, activation: GatedSilu) -> NormGatedSilu | None:
    matches = gate.x == up.x == norm.out and (gate.out, up.out) == (activation.gate, activation.up)
    plain = gate.bias is None and up.bias is None
    return NormGatedSilu(norm, gate, up, activation) if matches and plain else None


def _head(norm: RmsNorm, logits: Logits) -> NormLogits | None:
    return NormLogits(norm, logits) if logits.x == norm.out else None


def _embed(embed: Embed) -> Embed:
    return embed


_RULES: tuple[tuple[tuple[type, ...], Callable[..., Instruction | None]], ...] = (
    ((Embed,), _embed),
    ((RmsNorm, Linear, Linear, Linear), _qkv),
    ((Rope, Rope, Attention), _attend),
    ((RmsNorm, Linear, Linear, GatedSilu), _gated),
    ((Linear, Add), _project),
    ((RmsNorm, Logits), _head),
)
