"""How keys and values lie in KV memory: stated once for memory sizing, kernels, prefix hashes and transfers.

Layers that keep the same positions form a group with blocks and block tables of its own: full attention keeps all
positions, a sliding window only the last ones. A block of a group holds `block_tokens` positions of all its layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, Self, get_args

from twostep.spec.shape import ModelShape

KvElement = Literal["float16"]

VERSION = 2
"""Of the byte order inside a block, see `KvLayout`. Changes whenever a block of the same layout has other bytes."""
VECTOR_ELEMENTS = 16
"""Heads are padded with zeros to whole vectors of so many elements (`padded` in native/kernels.h)."""
DIGEST_BYTES = 16

_ELEMENT_BYTES: dict[KvElement, int] = {"float16": 2}


@dataclass(frozen=True)
class KvGroup:
    """The layers of a group, ascending, and the positions that a token sees, its own included; None: all."""

    layers: tuple[int, ...]
    window: int | None = None


@dataclass(frozen=True)
class KvLayout:
    """Bytes of a block: by layer of the group, by KV head: K as (head_dim, positions), then V as (positions, head_dim),
    both with head_dim padded to `VECTOR_ELEMENTS`, then `scale_bytes` of scales.

    Raises `ValueError` for a layout that cannot be.
    """

    groups: tuple[KvGroup, ...]
    kv_heads: int
    head_dim: int
    element: KvElement = "float16"
    scale_bytes: int = 0
    """Of one KV head in a block, K and V together; 0 for elements that need no scale."""
    block_tokens: int = 16
    version: int = VERSION

    def __post_init__(self) -> None:
        layers = sorted(layer for group in self.groups for layer in group.layers)
        if not layers or layers != list(range(len(layers))) or not all(group.layers for group in self.groups):
            raise ValueError(f"each layer has to be in one group, and each group needs a layer, not {self.groups}")
        if any(group.window is not None and group.window < 1 for group in self.groups):
            raise ValueError(f"a window has at least 1 position, not {[group.window for group in self.groups]}")
        if min(self.kv_heads, self.head_dim, self.block_tokens) < 1 or self.scale_bytes < 0:
            raise ValueError(f"sizes of a KV layout have to be positive: {self}")
        if self.element not in get_args(KvElement):
            raise ValueError(f"KV elements are {', '.join(get_args(KvElement))}, not {self.element!r}")

    @classmethod
    def full_attention(cls, shape: ModelShape) -> Self:
        """Of a model whose layers all see all positions."""
        return cls((KvGroup(tuple(range(shape.layers))),), shape.kv_heads, shape.head_dim)

    @property
    def layers(self) -> int:
        """Layers of all groups together."""
        return sum(len(group.layers) for group in self.groups)

    @property
    def element_bytes(self) -> int:
        """Bytes of one number in the cache."""
        return _ELEMENT_BYTES[self.element]

    @property
    def padded_head_dim(self) -> int:
        """Elements that one head's K or V of a position takes."""
        return -(-self.head_dim // VECTOR_ELEMENTS) * VECTOR_ELEMENTS

    @property
    def layer_block_bytes(self) -> int:
        """Bytes of a block in one layer."""
        head = 2 * self.padded_head_dim * self.block_tokens * self.element_bytes + self.scale_bytes
        return self.kv_heads * head

    def block_bytes(self, group: int) -> int:
        """Bytes of a block of `group`, in all its layers."""
        return len(self.groups[group].layers) * self.layer_block_bytes

    def pool_bytes(self, blocks: Sequence[int]) -> int:
        """Bytes of a pool with so many blocks by group."""
        return sum(self.block_bytes(g) * count for g, count in zip(range(len(self.groups)), blocks, strict=True))

    @property
    def windows(self) -> tuple[int | None, ...]:
        """By group."""
        return tuple(group.window for group in self.groups)

    @property
    def name(self) -> str:
        """The layout in one line. Equal names mean that a block has the same meaning byte for byte."""
        groups = "; ".join(_group_name(group) for group in self.groups)
        scales = f" + {self.scale_bytes} B scales" if self.scale_bytes else ""
        shape = f"{self.kv_heads} heads x {self.head_dim} {self.element}{scales}"
        return f"kv{self.version}: {shape}, blocks of {self.block_tokens}, {groups}"

    @property
    def digest(self) -> bytes:
        """`DIGEST_BYTES` bytes that stand for `name`; the same in every process and on every machine."""
        return blake2b(self.name.encode(), digest_size=DIGEST_BYTES, person=b"twostep kvlayout").digest()


def grouped(windows: Sequence[int | None]) -> tuple[KvGroup, ...]:
    """The groups of a model whose layers have these windows, in order: full attention first, then by window."""
    different = sorted(set(windows), key=lambda window: (window is not None, window or 0))
    return tuple(KvGroup(tuple(i for i, own in enumerate(windows) if own == w), w) for w in different)


def _group_name(group: KvGroup) -> str:
    layers = ",".join(map(str, group.layers))
    return f"layers {layers} {'all positions' if group.window is None else f'window {group.window}'}"
