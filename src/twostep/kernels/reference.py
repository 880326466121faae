"""The executor to read: every operation in a few lines of numpy, float32. The others are tested against it.

The tokens of all slices are the rows of one matrix, each operation of the network maps named matrices to a named
matrix, and only attention looks at which rows belong to one sequence. Nothing is fused, weights are held in float32:
slow and large, but each line can be compared with the operation's formula.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import pi, sqrt
from typing import Literal, assert_never, get_args

import numpy as np
from numpy.typing import NDArray

from twostep.errors import UnsupportedError
from twostep.kernels.check import KvPool, check_arrays, check_block, check_copy, check_step, kv_pools
from twostep.kernels.kv_image import pack_block, unpack_block
from twostep.kernels.quantize import fine_weights, round_to_int8
from twostep.kernels.step import BLOCK_TOKENS, Capabilities, Slice, StepArrays
from twostep.model.network import Network
from twostep.model.ops import Activation, Add, Attention, Embed, Gated, HeadNorm, Linear, Logits, Op, RmsNorm, Rope
from twostep.model.quants import dequantize
from twostep.model.tensor import TensorType
from twostep.spec.kv_layout import KvLayout

Activations = Literal["float32", "int8"]
KvType = Literal["float16", "float32"]
Floats = NDArray[np.float32]
Indices = NDArray[np.intp]

_FLOAT_TYPES = (TensorType.F32, TensorType.F16, TensorType.BF16)
_RESULT = "logits"


class ReferenceExecutor:
    """Runs steps of `network` over its own cache of `kv_blocks` blocks (by group, or one number for each group).

    With `activations="int8"` the input of every product with a quantised weight is first rounded as the native kernels
    round it, so that only the order of summation is left between the two. `kv="float32"` keeps K and V unrounded, as
    the oracle of the tests does; no other executor has that mode.
    """

    def __init__(
        self,
        network: Network,
        kv_blocks: int | Sequence[int],
        *,
        activations: Activations = "float32",
        kv: KvType = "float16",
    ) -> None:
        """Raises `ValueError` for an unknown mode, or numbers of blocks that do not fit the network's groups."""
        _check_mode("activations", activations, get_args(Activations))
        _check_mode("kv", kv, get_args(KvType))
        self._network = network
        self._layout = network.kv_layout
        self._pools = kv_pools(self._layout, kv_blocks)
        self._caches = [_PagedCache(self._layout, g, pool, kv) for g, pool in enumerate(self._pools)]
        self._group_of = {layer: g for g, group in enumerate(self._layout.groups) for layer in group.layers}
        self.capabilities = Capabilities(
            self._layout,
            blocks=tuple(pool.blocks for pool in self._pools),
            drafts=True,
            transfers=kv == self._layout.element,
            shareable=False,
        )
        self._weights = {name: dequantize(tensor) for name, tensor in network.tensors.items()}
        quantised = {name for name, tensor in network.tensors.items() if tensor.type not in _FLOAT_TYPES}
        self._rounds_input_of = quantised if activations == "int8" else set()
        self._rounds_finely = fine_weights(network.ops)

    def close(self) -> None:
        """Gives back weights and KV cache. It cannot be used any more."""
        for name in ("_caches", "_weights"):
            self.__dict__.pop(name, None)

    def forward(self, slices: Sequence[Slice]) -> Floats:
        check_step(slices, self._network.shape.vocab, self._pools)
        rows = _Rows(slices, self._pools)
        buffers: dict[str, Floats] = {}
        for op in self._network.ops:
            self._run(op, rows, buffers)
        return buffers[_RESULT]

    def forward_arrays(self, step: StepArrays) -> Floats:
        check_arrays(step, self._network.shape.vocab, len(self._pools))
        return self.forward(list(step.slices()))

    def copy_block(self, source: int, target: int, group: int = 0) -> None:
        check_copy(source, target, group, self._pools)
        self._caches[group].copy_block(source, target)

    def export_block(self, block: int, group: int = 0) -> bytes:
        self._check_transfer("export_block", block, group)
        return pack_block(self._layout, group, self._caches[group].block_bytes(block))

    def import_block(self, data: bytes | bytearray | memoryview, block: int, group: int = 0) -> None:
        self._check_transfer("import_block", block, group)
        self._caches[group].put_block(block, unpack_block(self._layout, group, data))

    def _check_transfer(self, what: str, block: int, group: int) -> None:
        if not self.capabilities.transfers:
            raise UnsupportedError(f"{what}: only {self._layout.element} KV can be exported and imported")
        check_block(what, block, group, self._pools)

    def _run(self, op: Op, rows: "_Rows", buffers: dict[str, Floats]) -> None:
        match op:
            case Embed():
                buffers[op.out] = self._weights[op.weight][rows.tokens] * np.float32(op.scale)
            case RmsNorm():
                buffers[op.out] = rms_norm(buffers[op.x], self._weights[op.weight], op.eps)
            case HeadNorm():
                heads = buffers[op.x].reshape(-1, op.heads, op.head_dim)
                buffers[op.x] = rms_norm(heads, self._weights[op.weight], op.eps).reshape(buffers[op.x].shape)
            case Linear():
                buffers[op.out] = self._linear(op, buffers[op.x])
            case Rope():
                buffers[op.x] = rotate(buffers[op.x], rows.positions, op)
            case Attention():
                buffers[op.out] = self._attention(op, rows, buffers)
            case Gated():
                buffers[op.out] = ACTIVATIONS[op.activation](buffers[op.gate]) * buffers[op.up]
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
        """Adds the step's K and V to the cache, then lets each sequence attend to its own."""
        count, group = len(rows.tokens), self._group_of[op.layer]
        cache, scale = self._caches[group], 1 / sqrt(op.head_dim) if op.scale is None else op.scale
        q = buffers[op.q].reshape(count, op.heads, op.head_dim)
        k, v = (buffers[name].reshape(count, op.kv_heads, op.head_dim) for name in (op.k, op.v))
        cache.write(op.layer, rows.slots(group), k, v)
        out = np.empty_like(buffers[op.q])
        for sequence in rows.sequences:
            first = sequence.first_seen[group]
            keys, values = cache.read(op.layer, sequence.slots[group])
            out[sequence.rows] = attend(q[sequence.rows], keys, values, sequence.start - first, scale, op.window)
        return out


def _check_mode(name: str, mode: str, modes: tuple[str, ...]) -> None:
    if mode not in modes:
        raise ValueError(f"{name} {mode!r}: not one of {', '.join(modes)}")


@dataclass(frozen=True)
class _Sequence:
    """One slice among the rows. By group: the first position that its first token sees, rounded down to a block; and
    where in the cache the positions from there on lie."""

    rows: slice
    start: int
    first_seen: list[int]
    slots: list[Indices]


class _Rows:
    """A step as rows: `tokens` and `positions` have one entry a row, `wanted` are the rows whose logits are wanted."""

    def __init__(self, slices: Sequence[Slice], pools: Sequence[KvPool]) -> None:
        firsts = np.cumsum([0, *(len(piece.tokens) for piece in slices)]).tolist()
        self.sequences = [_sequence(piece, first, pools) for piece, first in zip(slices, firsts, strict=False)]
        self.tokens = _indices(token for piece in slices for token in piece.tokens)
        self.positions = _indices(piece.start + i for piece in slices for i in range(len(piece.tokens)))
        self.wanted = _indices(first + i for piece, first in zip(slices, firsts, strict=False) for i in piece.logits)

    def slots(self, group: int) -> Indices:
        """By row: where in the cache of a group its K and V are written."""
        own = (s.slots[group][s.start - s.first_seen[group] :] for s in self.sequences)
        return _indices(slot for slots in own for slot in slots)


def _indices(values: Iterable[int]) -> Indices:
    return np.fromiter(values, np.intp)


def _sequence(piece: Slice, first_row: int, pools: Sequence[KvPool]) -> _Sequence:
    end = piece.start + len(piece.tokens)
    first_seen = [pool.first_seen(piece.start) * BLOCK_TOKENS for pool in pools]
    slots = []
    for table, first in zip(piece.tables, first_seen, strict=True):
        positions = np.arange(first, end)
        slots.append(np.array(table)[positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS)
    return _Sequence(slice(first_row, first_row + len(piece.tokens)), piece.start, first_seen, slots)


class _PagedCache:
    """K and V of the layers of one group, rounded to `kv`; slot 16·b + i is position i of block b.

    A number too large for the type becomes its largest value, not infinity, from which softmax would make NaN.
    """

    def __init__(self, layout: KvLayout, group: int, pool: KvPool, kv: KvType) -> None:
        layers = layout.groups[group].layers
        size = (2, len(layers), pool.blocks * BLOCK_TOKENS, layout.kv_heads, layout.head_dim)
        self._keys, self._values = np.zeros(size, kv)
        self._largest = np.float32(np.finfo(kv).max)
        self._index = {layer: i for i, layer in enumerate(layers)}
        self._layout = layout

    def write(self, layer: int, slots: Indices, keys: Floats, values: Floats) -> None:
        self._keys[self._index[layer], slots] = np.clip(keys, -self._largest, self._largest)
        self._values[self._index[layer], slots] = np.clip(values, -self._largest, self._largest)

    def read(self, layer: int, slots: Indices) -> tuple[Floats, Floats]:
        """K and V of some slots, each float32, shape (slots, kv_heads, head_dim)."""
        keys, values = (cache[self._index[layer], slots] for cache in (self._keys, self._values))
        return keys.astype(np.float32), values.astype(np.float32)

    def copy_block(self, source: int, target: int) -> None:
        for cache in (self._keys, self._values):
            cache[:, _slots(target)] = cache[:, _slots(source)]

    def block_bytes(self, block: int) -> bytes:
        """A block as `KvLayout` describes it."""
        keys, values = (cache[:, _slots(block)].swapaxes(1, 2) for cache in (self._keys, self._values))
        whole = np.zeros((2, *keys.shape[:3], self._layout.padded_head_dim), np.float16)
        whole[..., : self._layout.head_dim] = keys, values
        heads = [whole[0].swapaxes(2, 3).reshape(*keys.shape[:2], -1), whole[1].reshape(*keys.shape[:2], -1)]
        return np.concatenate(heads, axis=-1).tobytes()

    def put_block(self, block: int, data: bytes) -> None:
        """The reverse of `block_bytes`."""
        size = (len(self._index), self._layout.kv_heads, 2, BLOCK_TOKENS * self._layout.padded_head_dim)
        whole = np.frombuffer(data, np.float16).reshape(size)
        keys = whole[:, :, 0].reshape(*size[:2], -1, BLOCK_TOKENS).swapaxes(2, 3)
        values = whole[:, :, 1].reshape(*size[:2], BLOCK_TOKENS, -1)
        for cache, part in ((self._keys, keys), (self._values, values)):
            cache[:, _slots(block)] = part[..., : self._layout.head_dim].swapaxes(1, 2)


def _slots(block: int) -> slice:
    return slice(block * BLOCK_TOKENS, (block + 1) * BLOCK_TOKENS)


def rms_norm(x: Floats, weight: Floats, eps: float) -> Floats:
    """x / sqrt(mean(x²) + eps) · weight over the last axis (Zhang and Sennrich 2019)."""
    rms: Floats = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps))
    return x / rms * weight


def silu(x: Floats) -> Floats:
    """x / (1 + exp(-x)); for very negative x, exp overflows to infinity and the quotient is the right 0."""
    with np.errstate(over="ignore"):
        out: Floats = x / (1 + np.exp(-x))
    return out


def gelu_tanh(x: Floats) -> Floats:
    """GELU by its tanh approximation (Hendrycks and Gimpel 2016)."""
    inner = np.float32(sqrt(2 / pi)) * (x + np.float32(0.044715) * x * x * x)
    out: Floats = np.float32(0.5) * x * (1 + np.tanh(inner))
    return out


ACTIVATIONS: Mapping[Activation, Callable[[Floats], Floats]] = {"silu": silu, "gelu_tanh": gelu_tanh}


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


def attend(q: Floats, keys: Floats, values: Floats, start: int, scale: float, window: int | None = None) -> Floats:
    """Causal softmax(q·kᵀ·scale)·v of one sequence, whose rows of `q` are at positions `start` and following.

    A row sees its own position and those before it, with a `window` only the last so many. `q` is (tokens, heads,
    head_dim), `keys` and `values` (context, kv_heads, head_dim); query head h shares KV head h // (heads / kv_heads)
    with the rest of its group. Returns (tokens, heads · head_dim).
    """
    tokens, heads, head_dim = q.shape
    context, kv_heads, _ = keys.shape
    grouped = q.reshape(tokens, kv_heads, -1, head_dim).transpose(1, 2, 0, 3)
    scores = grouped @ keys.transpose(1, 2, 0)[:, None] * np.float32(scale)
    positions, own = np.arange(context), start + np.arange(tokens)[:, None]
    unseen = (positions > own) | (positions <= own - (context if window is None else window))
    weights = softmax(np.where(unseen, np.float32(-np.inf), scores))
    mixed = weights @ values.transpose(1, 0, 2)[:, None]
    return mixed.transpose(2, 0, 1, 3).reshape(tokens, heads * head_dim)


def softmax(x: Floats) -> Floats:
    """exp(x) / sum(exp(x)) over the last axis, the largest subtracted first."""
    e: Floats = np.exp(x - x.max(axis=-1, keepdims=True))
    total: Floats = e.sum(axis=-1, keepdims=True)
    return e / total
