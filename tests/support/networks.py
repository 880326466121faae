"""Networks made from other networks: with matrices of another float type, with fewer layers, or as other families."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from twostep.model.network import Network
from twostep.model.ops import Activation, Add, Attention, Embed, Gated, HeadNorm, Op, RmsNorm, Rope
from twostep.model.quants import dequantize
from twostep.model.tensor import Tensor, TensorType


def with_matrices_as(network: Network, kind: TensorType) -> Network:
    """Every matrix rounded to a float type; vectors stay as they are."""
    tensors = {name: _converted(t, kind) if len(t.shape) == 2 else t for name, t in network.tensors.items()}
    return Network(network.shape, network.ops, tensors)


def _converted(tensor: Tensor, kind: TensorType) -> Tensor:
    values = _ENCODERS[kind](dequantize(tensor))
    return Tensor(tensor.name, kind, tensor.shape, np.ascontiguousarray(values).view(np.uint8).ravel())


def _bfloat16(values: np.ndarray) -> np.ndarray:
    """The upper half of each float32, the lower half rounded off to nearest, ties to even."""
    bits = values.view("<u4")
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")


_ENCODERS: dict[TensorType, Callable[[np.ndarray], np.ndarray]] = {
    TensorType.F32: lambda values: values.astype("<f4"),
    TensorType.F16: lambda values: values.astype("<f2"),
    TensorType.BF16: _bfloat16,
}


def first_layers(network: Network, layers: int) -> Network:
    """The first layers, each of which ends with its second addition to the residual stream; then norm and head."""
    ends = [i for i, op in enumerate(network.ops) if isinstance(op, Add)]
    ops = (*network.ops[: ends[2 * layers - 1] + 1], *network.ops[-2:])
    used = {name for op in ops for name in _weights(op)}
    tensors = {name: tensor for name, tensor in network.tensors.items() if name in used}
    return Network(replace(network.shape, layers=layers), ops, tensors)


def _weights(op: Op) -> list[str]:
    named = (getattr(op, field, None) for field in ("weight", "bias"))
    return [name for name in named if name is not None]


@dataclass(frozen=True)
class Traits:
    """What families do differently from Llama. Tuples are by layer, and repeated."""

    windows: tuple[int | None, ...] = (None,)
    bases: tuple[float, ...] = ()
    """Of rope; none: as they are."""
    rotates: bool = True
    head_norms: bool = False
    post_norms: bool = False
    activation: Activation = "silu"
    embed_scale: float = 1.0
    softmax_scale: float | None = None


def with_traits(network: Network, traits: Traits) -> Network:
    """The same network with these traits; weights of added norms are random."""
    rng = np.random.default_rng(7)
    added: dict[str, Tensor] = {}

    def vector(name: str, size: int) -> str:
        values = rng.normal(1, 0.3, size).astype("<f4")
        added[name] = Tensor(name, TensorType.F32, (size,), values.view(np.uint8))
        return name

    ops = tuple(_with_traits(network, traits, vector))
    return Network(network.shape, ops, {**network.tensors, **added})


def _with_traits(network: Network, traits: Traits, vector: Callable[[str, int], str]) -> Iterator[Op]:
    layer = 0
    shape = network.shape
    for i, op in enumerate(network.ops):
        match op:
            case Embed():
                yield replace(op, scale=traits.embed_scale)
            case Rope():
                if traits.head_norms and isinstance(network.ops[i + 1], Rope):
                    for x, heads in (("q", shape.heads), ("k", shape.kv_heads)):
                        weight = vector(f"blk.{layer}.{x}_norm.weight", shape.head_dim)
                        yield HeadNorm(weight, 1e-5, x, heads, shape.head_dim)
                if traits.rotates:
                    yield replace(op, base=traits.bases[layer % len(traits.bases)] if traits.bases else op.base)
            case Attention():
                yield replace(op, window=traits.windows[layer % len(traits.windows)], scale=traits.softmax_scale)
            case Gated():
                yield replace(op, activation=traits.activation)
                layer += 1
            case Add() if traits.post_norms:
                yield RmsNorm(vector(f"post.{i}.weight", shape.width), 1e-5, op.x, op.x)
                yield op
            case _:
                yield op


FAMILY = Traits(
    windows=(23, None, 40),
    bases=(10_000.0, 1e6),
    head_norms=True,
    post_norms=True,
    activation="gelu_tanh",
    embed_scale=5.5,
    softmax_scale=0.2,
)
"""All at once, as in Gemma 3: alternating windows (two, none a multiple of a block) and rope bases."""
