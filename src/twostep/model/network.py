"""A loaded network: shape, operations, tensors. What a family's file builds and an executor compiles."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from twostep.model.ops import Attention, Op, Rope
from twostep.model.tensor import Tensor
from twostep.spec.kv_layout import KvLayout, grouped
from twostep.spec.shape import ModelShape


@dataclass(frozen=True)
class Network:
    """`ops` refer to `tensors` by name; each name is there, with the shape it needs (the family checked it)."""

    shape: ModelShape
    ops: tuple[Op, ...]
    tensors: Mapping[str, Tensor]

    @cached_property
    def kv_layout(self) -> KvLayout:
        """How its KV lies in memory, with the layers grouped by window.

        Raises `ValueError` where a layer of the shape has no attention or two, or its KV heads differ from the shape's.
        """
        attentions = sorted((op for op in self.ops if isinstance(op, Attention)), key=lambda op: op.layer)
        if [op.layer for op in attentions] != list(range(self.shape.layers)):
            found = [op.layer for op in attentions]
            raise ValueError(f"a network of {self.shape.layers} layers needs one attention in each, not in {found}")
        for op in attentions:
            sizes, expected = (op.kv_heads, op.head_dim), (self.shape.kv_heads, self.shape.head_dim)
            if sizes != expected:
                text = "{} KV heads of {}".format
                raise ValueError(f"layer {op.layer} has {text(*sizes)}, the model's shape {text(*expected)}")
        return KvLayout(grouped([op.window for op in attentions]), self.shape.kv_heads, self.shape.head_dim)

    @property
    def rotations(self) -> tuple[float, ...]:
        """The different rope bases, in order of first use. An executor keeps a row's angles once for each."""
        return tuple(dict.fromkeys(op.base for op in self.ops if isinstance(op, Rope)))
