"""A loaded network: shape, operations, tensors. What a family's file builds and an executor compiles."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from twostep.model.ops import Attention, Op, Rope
from twostep.model.tensor import Tensor
from twostep.spec.kv_layout import KvLayout, grouped
from twostep.spec.model_spec import ModelSpec
from twostep.spec.number_types import NUMBER_TYPES, NumberType
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

    def model_spec(self, name: str) -> ModelSpec:
        """What cost arithmetic needs. The weight types, of layers and of head, are means of what is stored.

        Raises `ValueError` as `kv_layout` does.
        """
        head = self.tensors.get("output.weight", self.tensors["token_embd.weight"])
        layers = [tensor for key, tensor in self.tensors.items() if key.startswith("blk.") and len(tensor.shape) == 2]
        windows = {layer: group.window for group in self.kv_layout.groups for layer in group.layers}
        return ModelSpec(
            name=name,
            shape=self.shape,
            windows=tuple(windows[layer] for layer in range(self.shape.layers)),
            tied="output.weight" not in self.tensors,
            weight_type=_mean_type(layers),
            head_type=_mean_type([head]),
            source="GGUF",
        )


def _mean_type(tensors: Sequence[Tensor]) -> NumberType:
    """One type that takes as much memory as `tensors` together: the stored one where they agree, else their mean."""
    names = sorted({tensor.type.name.lower() for tensor in tensors})
    if len(names) == 1:
        return NUMBER_TYPES[{"f32": "fp32", "f16": "fp16"}.get(names[0], names[0])]
    size = sum(tensor.nbytes for tensor in tensors) / sum(prod(tensor.shape) for tensor in tensors)
    return NumberType("+".join(names), size, NUMBER_TYPES["q4_0"].arithmetic)
