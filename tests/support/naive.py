"""A network computed once over a whole sequence, in float64, without cache, blocks or steps: the oracle for windows,
norms of heads, activations and rotations, written from the operations' formulas alone."""

from collections.abc import Sequence
from math import pi, sqrt

import numpy as np
from numpy.typing import NDArray

from twostep.model.network import Network
from twostep.model.ops import Add, Attention, Embed, Gated, HeadNorm, Linear, Logits, RmsNorm, Rope
from twostep.model.quants import dequantize

Doubles = NDArray[np.float64]


def naive_logits(network: Network, ids: Sequence[int]) -> Doubles:  # noqa: C901 (one case for each operation)
    """Logits after every token, shape (tokens, vocab)."""
    weights = {name: dequantize(tensor).astype(np.float64) for name, tensor in network.tensors.items()}
    buffers: dict[str, Doubles] = {}
    for op in network.ops:
        match op:
            case Embed():
                buffers[op.out] = weights[op.weight][list(ids)] * op.scale
            case RmsNorm():
                buffers[op.out] = _norm(buffers[op.x], weights[op.weight], op.eps)
            case HeadNorm():
                heads = np.split(buffers[op.x], op.heads, axis=1)
                buffers[op.x] = np.hstack([_norm(head, weights[op.weight], op.eps) for head in heads])
            case Linear():
                buffers[op.out] = buffers[op.x] @ weights[op.weight].T + (weights[op.bias] if op.bias else 0)
            case Rope():
                buffers[op.x] = np.hstack([_rotate(head, op) for head in np.split(buffers[op.x], op.heads, axis=1)])
            case Attention():
                buffers[op.out] = _attention(op, *(buffers[name] for name in (op.q, op.k, op.v)))
            case Gated():
                buffers[op.out] = _activated(buffers[op.gate], op.activation) * buffers[op.up]
            case Add():
                buffers[op.out] = buffers[op.out] + buffers[op.x]
            case Logits():
                return buffers[op.x] @ weights[op.weight].T
    raise AssertionError("no logits")


def _activated(x: Doubles, activation: str) -> Doubles:
    cubic = sqrt(2 / pi) * (x + 0.044715 * x**3)
    return x / (1 + np.exp(-x)) if activation == "silu" else x * (1 + np.tanh(cubic)) / 2


def _norm(x: Doubles, weight: Doubles, eps: float) -> Doubles:
    return x / np.sqrt((x**2).mean(axis=1, keepdims=True) + eps) * weight


def _rotate(head: Doubles, op: Rope) -> Doubles:
    """Pairs as complex numbers, turned by position · base^(-2i/dim)."""
    half = op.head_dim // 2
    first, second = (head[:, 0::2], head[:, 1::2]) if op.style == "interleaved" else (head[:, :half], head[:, half:])
    angles = np.arange(len(head))[:, None] * op.base ** (-2 * np.arange(half) / op.head_dim)
    turned = (first + 1j * second) * np.exp(1j * angles)
    if op.style == "halves":
        return np.hstack([turned.real, turned.imag])
    return np.stack([turned.real, turned.imag], axis=-1).reshape(head.shape)


def _attention(op: Attention, q: Doubles, k: Doubles, v: Doubles) -> Doubles:
    """Token by token, head by head, over exactly the positions that the token sees."""
    out = np.zeros_like(q)
    for position in range(len(q)):
        seen = slice(0 if op.window is None else max(0, position - op.window + 1), position + 1)
        for head in range(op.heads):
            own, kv = (slice(h * op.head_dim, (h + 1) * op.head_dim) for h in (head, head * op.kv_heads // op.heads))
            scores = k[seen, kv] @ q[position, own] * (1 / sqrt(op.head_dim) if op.scale is None else op.scale)
            weights = np.exp(scores - scores.max())
            out[position, own] = weights @ v[seen, kv] / weights.sum()
    return out
