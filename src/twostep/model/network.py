"""A loaded network: shape, operations, tensors. What a family's file builds and an executor compiles."""

from collections.abc import Mapping
from dataclasses import dataclass

from twostep.model.ops import Op
from twostep.model.tensor import Tensor
from twostep.spec.shape import ModelShape


@dataclass(frozen=True)
class Network:
    """`ops` refer to `tensors` by name; each name is there, with the shape it needs (the family checked it)."""

    shape: ModelShape
    ops: tuple[Op, ...]
    tensors: Mapping[str, Tensor]
