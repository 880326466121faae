"""Sizes memory: weights, activations, KV cache. The only place that does, for engine, simulator and planner alike.

Pure arithmetic: free memory and the size of weights are measured elsewhere; a plan that does not fit is returned with
its fault, not raised. Sizes are in bytes; "free" is memory before anything of the model is in it, but with the
interpreters that run by then.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass

from twostep.spec.host import HostDemand
from twostep.spec.kv_layout import KvLayout
from twostep.spec.model_spec import ModelSpec
from twostep.spec.number_types import NumberType
from twostep.spec.shape import ModelShape

QUANT_GROUP = 32
"""Elements of a quantised row that share a scale (`kGroup` in native/formats.h)."""
ROW_ALIGNMENT = 64
"""Quantised rows begin at multiples of so many bytes (`QuantRows` in native/kernels.h)."""


@dataclass(frozen=True)
class MemoryDemand:
    """What a model needs, whatever is free.

    A step computes at most `step_tokens` tokens of `sequences` sequences, and returns at most `logit_rows` rows of
    logits. `rotations` is the number of different rope bases.
    """

    shape: ModelShape
    layout: KvLayout
    weights_bytes: int
    step_tokens: int
    logit_rows: int
    sequences: int = 1
    rotations: int = 1
    host: HostDemand | None = None
    """The processes around it; `None` where only the model counts."""

    @property
    def host_bytes(self) -> int:
        """What the processes take beside the model."""
        return self.host.total_bytes if self.host else 0

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one position in all layers."""
        return self.kv_bytes_per_block // self.layout.block_tokens

    @property
    def kv_bytes_per_block(self) -> int:
        """Bytes of one block in all layers: of one in each group."""
        return self.layout.pool_bytes([1] * len(self.layout.groups))

    def group_blocks(self, blocks: int) -> tuple[int, ...]:
        """Blocks by group where full attention gets `blocks`: a window needs no more than its sequences can hold."""
        return tuple(min(blocks, limit) for limit in self._window_limits())

    def _window_limits(self) -> Iterator[int]:
        for window in self.layout.windows:
            if window is None:
                yield sys.maxsize
            else:
                yield self.sequences * self.blocks_for(window + self.step_tokens + self.layout.block_tokens)

    def kv_bytes(self, blocks: int) -> int:
        """Bytes of a KV cache in which full attention gets `blocks`."""
        return self.layout.pool_bytes(self.group_blocks(blocks))

    def blocks_within(self, room: int) -> int:
        """The most blocks for full attention whose KV cache takes at most `room` bytes."""
        least = min(self.layout.block_bytes(g) for g in range(len(self.layout.groups)))
        low, high = 0, min(max(0, room) // least, max(self._window_limits()))
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.kv_bytes(middle) <= room else (low, middle - 1)
        return low

    @property
    def activation_bytes(self) -> int:
        """Buffers of the widest step: they follow the step's budget, not the context."""
        return self.step_tokens * row_bytes(self.shape, self.rotations) + self.logit_rows * logit_row_bytes(self.shape)

    @property
    def fixed_bytes(self) -> int:
        """All but the KV cache."""
        return self.weights_bytes + self.activation_bytes + self.host_bytes

    def blocks_for(self, tokens: int) -> int:
        """Blocks of one sequence of so many tokens."""
        return -(-tokens // self.layout.block_tokens)


def row_bytes(shape: ModelShape, rotations: int = 1) -> int:
    """Bytes that one token of a step takes in the native executor's buffers (`Program::grow` in native/program.cpp).

    In float32: residual stream and its norm, q k v, heads, feed-forward, angles of each rotation. Then the widest input
    quantised to 8 and to 16 bits, each with four numbers a group; then the row's slice and position.
    """
    heads_width = shape.heads * shape.head_dim
    qkv_width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    floats = 2 * shape.width + qkv_width + heads_width + shape.ffn_width + rotations * shape.head_dim
    widest = max(shape.width, heads_width, shape.ffn_width)
    groups = widest // QUANT_GROUP * 4 * 4
    quantised = sum(_round_up(widest * value_bytes + groups, ROW_ALIGNMENT) for value_bytes in (1, 2))
    return 4 * floats + quantised + 2 * 4


def logit_row_bytes(shape: ModelShape) -> int:
    """Bytes of one row of logits: float32 over the vocabulary."""
    return 4 * shape.vocab


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


@dataclass(frozen=True)
class MemoryPlan:
    """How memory is divided: `blocks` of KV cache beside the demand, out of `free_bytes`.

    Groups with a window may get fewer blocks, see `group_blocks`. `share` is the part of free memory that weights,
    activations and KV cache may take together; `None` where the number of blocks was stated.
    """

    demand: MemoryDemand
    free_bytes: int
    share: float | None
    blocks: int
    stated_bytes: int | None = None
    """The size of the KV cache as it was stated, which `blocks` need not fill; `None` where it was not."""

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights."""
        return self.demand.weights_bytes

    @property
    def activation_bytes(self) -> int:
        """Bytes of the widest step's buffers."""
        return self.demand.activation_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one position in all layers."""
        return self.demand.kv_bytes_per_token

    @property
    def kv_bytes_per_block(self) -> int:
        """Bytes of one block in all layers."""
        return self.demand.kv_bytes_per_block

    @property
    def kv_bytes(self) -> int:
        """Bytes of the whole KV cache."""
        return self.demand.kv_bytes(self.blocks)

    @property
    def group_blocks(self) -> tuple[int, ...]:
        """Blocks by group of the KV layout."""
        return self.demand.group_blocks(self.blocks)

    @property
    def kv_tokens(self) -> int:
        """Positions of the whole KV cache."""
        return self.blocks * self.demand.layout.block_tokens

    def full_length_sequences(self, context: int) -> int:
        """How many sequences of `context` tokens fit at once, nothing shared."""
        return self.blocks // self.demand.blocks_for(context)

    def arithmetic(self, context: int) -> Iterator[str]:
        """The sizing in lines to print, each number with its origin; `context`: of the longest sequences."""
        demand, layout = self.demand, self.demand.layout
        tokens, rows = f"{demand.step_tokens} tokens a step", f"{demand.logit_rows} rows of logits"
        yield f"weights: {size_text(self.weights_bytes)}"
        yield (
            f"activations: {tokens} x {size_text(row_bytes(demand.shape, demand.rotations))} + "
            f"{rows} x {size_text(logit_row_bytes(demand.shape))} = {size_text(self.activation_bytes)}"
        )
        if demand.host:
            yield f"processes: {demand.host.words()} = {size_text(demand.host_bytes)}"
        vectors = f"2 x {layout.layers} layers x {layout.kv_heads} KV heads x {layout.padded_head_dim} elements"
        yield f"KV per token: {vectors} x {layout.element_bytes} B = {self.kv_bytes_per_token} B"
        blocks = f"{self.blocks} blocks of {layout.block_tokens} tokens"
        yield f"KV cache: {self._origin()} = {blocks} = {self._capacity(context)}"
        for group, count in zip(layout.groups, self.group_blocks, strict=True):
            if group.window is not None:
                yield f"KV cache of {len(group.layers)} layers with a window of {group.window}: {count} blocks"

    def fault(self, least_tokens: int = 1) -> str | None:
        """Why this plan cannot be carried out, with the arithmetic in one line; `None` if it can.

        It has to fit into what is free and to hold one block and one sequence of `least_tokens` tokens.
        """
        least = max(1, self.demand.blocks_for(least_tokens))
        if self.blocks < least:
            holds = f"{self._origin()} = {self.blocks} blocks"
            needed = f"{least} x {size_text(self.kv_bytes_per_block)} = {size_text(self.demand.kv_bytes(least))}"
            content = f"one sequence of {least_tokens} tokens" if least > 1 else "even one block"
            return f"the KV cache does not hold {content}: {holds}; needed: {needed}"
        if self.demand.fixed_bytes + self.kv_bytes > self.free_bytes:
            return f"the KV cache does not fit: {self._stated()}, {self._room(1)}"
        return None

    def _origin(self) -> str:
        return self._stated() if self.share is None else self._room(self.share)

    def _stated(self) -> str:
        return f"{size_text(self.kv_bytes if self.stated_bytes is None else self.stated_bytes)} stated"

    def _room(self, share: float) -> str:
        room = _room(self.demand, self.free_bytes, share)
        part = "" if share == 1 else f"{100 * share:g} % of "
        fixed = f"{size_text(self.weights_bytes)} weights - {size_text(self.activation_bytes)} activations"
        host = f" - {size_text(self.demand.host_bytes)} processes" if self.demand.host else ""
        return f"{part}{size_text(self.free_bytes)} free - {fixed}{host} = {size_text(room)}"

    def _capacity(self, context: int) -> str:
        count = self.full_length_sequences(context)
        sequences = {0: "not one sequence", 1: "1 sequence"}.get(count, f"{count} sequences")
        return f"{self.kv_tokens} tokens = {sequences} of full length {context}"


def plan_share(demand: MemoryDemand, free_bytes: int, share: float) -> MemoryPlan:
    """As many blocks as `share` of free memory, above 0 and at most 1, leaves beside weights and activations."""
    return MemoryPlan(demand, free_bytes, share, demand.blocks_within(_room(demand, free_bytes, share)))


def plan_stated(demand: MemoryDemand, free_bytes: int, kv_bytes: int) -> MemoryPlan:
    """As many blocks as a KV cache of `kv_bytes` holds, whether they fit or not: `MemoryPlan.fault` tells."""
    return MemoryPlan(demand, free_bytes, None, demand.blocks_within(kv_bytes), kv_bytes)


def _room(demand: MemoryDemand, free_bytes: int, share: float) -> int:
    """What is left for the KV cache; negative where not even the rest fits."""
    return int(share * free_bytes) - demand.fixed_bytes


# --- any model on any machine: what `twostep roofline` and the planner need, without a native executor ----------------


def weights_bytes(model: ModelSpec) -> int:
    """Bytes of all weights as `model` stores them, embedding and output head included."""
    heads = model.head_parameters * (1 if model.tied else 2)
    return round(model.linear_parameters * model.weight_type.bytes + heads * model.head_type.bytes)


def kv_layer_bytes_per_token(shape: ModelShape, kv_type: NumberType) -> float:
    """Bytes of one position in one layer: K and V of all KV heads."""
    return shape.kv_bytes_per_token(1) / shape.layers * kv_type.bytes


def kv_bytes_per_token(model: ModelSpec) -> float:
    """Bytes that one position takes in all layers: 2 · layers · KV heads · head size · bytes of a value."""
    return model.shape.layers * kv_layer_bytes_per_token(model.shape, model.kv_type)


def sequence_kv_bytes(model: ModelSpec, tokens: int) -> float:
    """Bytes of the KV cache of one sequence of `tokens` tokens; layers with a window keep the window's positions."""
    kept = sum(
        layers * (tokens if window is None else min(tokens, window)) for window, layers in model.window_layers.items()
    )
    return kept * kv_layer_bytes_per_token(model.shape, model.kv_type)


def sequences_that_fit(model: ModelSpec, memory_bytes: float, tokens: int) -> int:
    """How many sequences of `tokens` tokens fit beside the weights, by arithmetic alone: no activations, no blocks.

    0 where the weights leave no room, also where they do not fit themselves.
    """
    return max(0, int((memory_bytes - weights_bytes(model)) // sequence_kv_bytes(model, tokens)))


def size_text(size: int) -> str:
    """Bytes for people: in the largest unit that leaves at least 1, with one decimal."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if abs(size) >= 1 << power:
            return f"{size / (1 << power):.1f} {unit}"
    return f"{size} B"
