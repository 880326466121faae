"""The executor to read: every operation in a few lines of numpy, float32. The others are tested against it.

It takes a step as it comes: the tokens of all slices are the rows of one matrix, each operation of the network maps
named matrices to a named matrix, and only attention looks at which rows belong to one sequence. Nothing is fused,
weights are held in float32: slow and large, but each line can be held against the operation's formula.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Literal, assert_never, get_args

import numpy as np
from numpy.typing import NDArray

from twostep.kernels.check import check_arrays, check_copy, check_step
from twostep.kernels.quantize import fine_weights, round_to_int8
from twostep.kernels.step import BLOCK_TOKENS, Slice, StepArrays
from twostep.model.network import Network
from twostep.model.ops import Add, Attention, Embed, GatedSilu, Linear, Logits, Op, RmsNorm, Rope
from twostep.model.quants import dequantize
from twostep.model.tensor import TensorType
from twostep.spec.shape import ModelShape

Activations = Literal["float32", "int8"]
KvType = Literal["float16", "float32"]
Floats = NDArray[np.float32]
Indices = NDArray[np.intp]

_FLOAT_TYPES = (TensorType.F32, TensorType.F16, TensorType.BF16)
_RESULT = "logits"


class ReferenceExecutor:
    """Runs steps of `network` over its own cache of `kv_blocks` blocks, as the `Executor` protocol says.

    With `activations="int8"` the input of every product with a quantised weight is first rounded as the native kernels
    round it, so that only the order of summation is left between the two. `kv="float32"` keeps K and V unrounded, as
    the oracle of the tests does; no other executor has that mode.
    """

    def __init__(
        self, network: Network, kv_blocks: int, *, activations: Activations = "float32", kv: KvType = "float16"
    ) -> None:
        _check_mode("activations", activations, get_args(Activations))
        _check_mode("kv", kv, get_args(KvType))
        self._network = network
        self._kv_blocks = kv_blocks
        self._cache = _PagedCache(network.shape, kv_blocks, kv)
        self._weights = {name: dequantize(tensor) for name, tensor in network.tensors.items()}
        quantised = {name for name, tensor in network.tensors.items() if tensor.type not in _FLOAT_TYPES}
        self._rounds_input_of = quantised if activations == "int8" else set()
        self._rounds_finely = fine_weights(network.ops)

    def close(self) -> None:
        """Gives back weights and KV cache. It cannot be used any more."""
        for name in ("_cache", "_weights"):
            self.__dict__.pop(name, None)

    def forward(self, slices: Sequence[Slice]) -> Floats:
        check_step(slices, self._network.shape.vocab, self._kv_blocks)
        rows = _Rows(slices)
        buffers: dict[str, Floats] = {}
        for op in self._network.ops:
            self._run(op, rows, buffers)
        return buffers[_RESULT]

    def forward_arrays(self, step: StepArrays) -> Floats:
        check_arrays(step, self._network.shape.vocab)
        return self.forward(list(step.slices()))

    def copy_block(self, source: int, target: int) -> None:
        check_copy(source, target, self._kv_blocks)
        self._cache.copy_block(source, target)

    def _run(self, op: Op, rows: "_Rows", buffers: dict[str, Floats]) -> None:
        match op:
            case Embed():
                buffers[op.out] = self._weights[op.weight][rows.tokens]
            case RmsNorm():
                buffers[op.out] = rms_norm(buffers[op.x], self._weights[op.weight], op.eps)
            case Linear():
                buffers[op.out] = self._linear(op, buffers[op.x])
            case Rope():
                buffers[op.x] = rotate(buffers[op.x], rows.positions, op)
            case Attention():
                buffers[op.out] = self._attention(op, rows, buffers)
            case GatedSilu():
                buffers[op.out] = silu(buffers[op.gate]) * buffers[op.up]
            case Add():
                buffers[op.out] = buffers[op.out] + buffers[op.x]
            case Logits():
                buffers[_RESULT] = self._product(buffers[op.x][rows.wanted], op.weight)
            case _:
                assert_never(op)

    def _linear(self, op: Linear, x: Floats) -> Floats:
        out = self._product(x, op.weight)
        return out if op.bias is None else out + self._weights[op.bias]

    def _product(self, x: Floats, weight: str) -> Floats:
        """x · weightᵀ, with x rounded first where the kernels would."""
        if weight in self._rounds_input_of:
            x = round_to_int8(x, fine=weight in self._rounds_finely)
        return x @ self._weights[weight].T

    def _attention(self, op: Attention, rows: "_Rows", buffers: dict[str, Floats]) -> Floats:
        """Adds the step's K and V to the cache, then lets each sequence attend to all of its own."""
        count = len(rows.tokens)
        q = buffers[op.q].reshape(count, op.heads, op.head_dim)
        k, v = (buffers[name].reshape(count, op.kv_heads, op.head_dim) for name in (op.k, op.v))
        self._cache.write(op.layer, rows.slots, k, v)
        out = np.empty_like(buffers[op.q])
        for sequence in rows.sequences:
            keys, values = self._cache.read(op.layer, sequence.slots)
            out[sequence.rows] = attend(q[sequence.rows], keys, values, sequence.start)
        return out


def _check_mode(name: str, mode: str, modes: tuple[str, ...]) -> None:
    if mode not in modes:
        raise ValueError(f"{name} {mode!r}: not one of {', '.join(modes)}")


@dataclass(frozen=True)
class _Sequence:
    """One slice among the rows: which rows are its own, and where in the cache its positions from 0 on lie."""

    rows: slice
    start: int
    slots: Indices


class _Rows:
    """A step as rows. `tokens`, `positions` and `slots` (where in the cache K and V go) have one entry a row."""

    def __init__(self, slices: Sequence[Slice]) -> None:
        firsts = np.cumsum([0, *(len(piece.tokens) for piece in slices)]).tolist()
        self.sequences = [_sequence(piece, first) for piece, first in zip(slices, firsts, strict=False)]
        self.tokens = _indices(token for piece in slices for token in piece.tokens)
        self.positions = _indices(piece.start + i for piece in slices for i in range(len(piece.tokens)))
        self.slots = _indices(slot for sequence in self.sequences for slot in sequence.slots[sequence.start :])
        self.wanted = _indices(first + i for piece, first in zip(slices, firsts, strict=False) for i in piece.logits)


def _indices(values: Iterable[int]) -> Indices:
    return np.fromiter(values, np.intp)


def _sequence(piece: Slice, first_row: int) -> _Sequence:
    end = piece.start + len(piece.tokens)
    positions = np.arange(end)
    slots = np.array(piece.blocks)[positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS
    return _Sequence(slice(first_row, first_row + len(piece.tokens)), piece.start, slots)


class _PagedCache:
    """K and V of every layer, rounded to `kv`; slot 16·b + i is position i of block b.

    What is too large for the type becomes its largest value, not infinity, from which softmax would make NaN.
    """

    def __init__(self, shape: ModelShape, blocks: int, kv: KvType) -> None:
        size = (2, shape.layers, blocks * BLOCK_TOKENS, shape.kv_heads, shape.head_dim)
        self._keys, self._values = np.zeros(size, kv)
        self._largest = np.float32(np.finfo(kv).max)

    def write(self, layer: int, slots: Indices, keys: Floats, values: Floats) -> None:
        self._keys[layer, slots] = np.clip(keys, -self._largest, self._largest)
        self._values[layer, slots] = np.clip(values, -self._largest, self._largest)

    def read(self, layer: int, slots: Indices) -> tuple[Floats, Floats]:
        """K and V of some slots, each float32, shape (slots, kv_heads, head_dim)."""
        return self._keys[layer, slots].astype(np.float32), self._values[layer, slots].astype(np.float32)

    def copy_block(self, source: int, target: int) -> None:
        from_slots, to_slots = (np.arange(BLOCK_TOKENS) + block * BLOCK_TOKENS for block in (source, target))
        for cache in (self._keys, self._values):
            cache[:, to_slots] = cache[:, from_slots]


def rms_norm(x: Floats, weight: Floats, eps: float) -> Floats:
    """x / sqrt(mean(x²) + eps) · weight over the last axis (Zhang and Sennrich 2019)."""
    rms: Floats = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps))
    return x / rms * weight


def silu(x: Floats) -> Floats:
    """x / (1 + exp(-x)); for very negative x, exp overflows to infinity and the quotient is the right 0."""
    with np.errstate(over="ignore"):
        out: Floats = x / (1 + np.exp(-x))
    return out


def rotate(x: Floats, positions: Indices, op: Rope) -> Floats:
    """Rotary embedding (Su et al. 2021) of `x` (rows, heads · head_dim); angles in float64, their sines in float32."""
    frequencies = op.base ** (-np.arange(0, op.head_dim, 2) / op.head_dim)
    angles = positions[:, None, None] * frequencies
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    half = op.head_dim // 2
    pairs, axis = ((half, 2), -1) if op.style == "interleaved" else ((2, half), -2)
    first, second = np.moveaxis(x.reshape(len(x), op.heads, *pairs), axis, 0)
    turned = first * cos - second * sin, first * sin + second * cos
    return np.stack(turned, axis).reshape(x.shape)


def attend(q: Floats, keys: Floats, values: Floats, start: int) -> Floats:
    """Causal softmax(q·kᵀ/sqrt(head_dim))·v of one sequence, whose rows of `q` are at positions `start` and following.

    `q` is (tokens, heads, head_dim), `keys` and `values` (context, kv_heads, head_dim); query head h shares KV head
    h // (heads / kv_heads) with the rest of its group. Returns (tokens, heads · head_dim).
    """
    tokens, heads, head_dim = q.shape
    context, kv_heads, _ = keys.shape
    grouped = q.reshape(tokens, kv_heads, -1, head_dim).transpose(1, 2, 0, 3)
    scores = grouped @ keys.transpose(1, 2, 0)[:, None] / np.float32(sqrt(head_dim))
    future = np.arange(context) > start + np.arange(tokens)[:, None]
    weights = softmax(np.where(future, np.float32(-np.inf), scores))
    mixed = weights @ values.transpose(1, 0, 2)[:, None]
    return mixed.transpose(2, 0, 1, 3).reshape(tokens, heads * head_dim)


def softmax(x: Floats) -> Floats:
    """exp(x) / sum(exp(x)) over the last axis, the largest subtracted first."""
    e: Floats = np.exp(x - x.max(axis=-1, keepdims=True))
    total: Floats = e.sum(axis=-1, keepdims=True)
    return e / total
