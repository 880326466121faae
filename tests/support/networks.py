"""Networks made from other networks: with matrices of another float type, or with fewer layers."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from twostep.model.network import Network
from twostep.model.ops import Add, Op
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
