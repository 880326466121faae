"""The network as data: a short list of operations that each executor compiles once and runs every step.

Operations read and write named buffers, one row a token of the step. A `weight` or `bias` names a tensor of the file.
The list says *what* is computed; each executor decides how it fuses operations (one matrix for Q, K and V, norm with
quantisation, ...). A model family is such a list: what families do differently is a parameter of an operation.
"""

from dataclasses import dataclass
from typing import Literal

RopeStyle = Literal["interleaved", "halves"]
Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class Embed:
    """out[row] = weight[token[row]] · scale."""

    weight: str
    out: str
    scale: float = 1.0


@dataclass(frozen=True)
class RmsNorm:
    """out = x / sqrt(mean(x²) + eps) · weight, over the last axis."""

    weight: str
    eps: float
    x: str
    out: str


@dataclass(frozen=True)
class HeadNorm:
    """`RmsNorm` of each head of `x` (rows, heads · head_dim) in place; all heads have the same `weight` (head_dim)."""

    weight: str
    eps: float
    x: str
    heads: int
    head_dim: int


@dataclass(frozen=True)
class Linear:
    """out = x · weightᵀ (+ bias). `weight` has shape (outputs, inputs)."""

    weight: str
    bias: str | None
    x: str
    out: str


@dataclass(frozen=True)
class Rope:
    """Rotates each head of `x` (rows, heads · head_dim) in place; angle of pair i is position · base^(-2i/dim).

    A pair is elements (2i, 2i+1) of a head when `interleaved` (GGUF files of the Llama family, whose Q and K rows the
    converter permuted for it), (i, i + dim/2) when `halves` (Hugging Face's order; Qwen2).
    """

    x: str
    heads: int
    head_dim: int
    base: float
    style: RopeStyle


@dataclass(frozen=True)
class Attention:
    """Causal softmax(q·kᵀ·scale)·v over the paged KV of `layer`, after k and v of this step were added to it.

    `scale` is 1/sqrt(head_dim) if None. A token sees the last `window` positions, its own included; all if None.
    K and V are rounded to the cache's type (float16) before any query reads them, those of the same step included.
    """

    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    q: str
    k: str
    v: str
    out: str
    window: int | None = None
    scale: float | None = None


@dataclass(frozen=True)
class Gated:
    """out = activation(gate) · up. `gelu_tanh` is GELU by its tanh approximation."""

    gate: str
    up: str
    out: str
    activation: Activation = "silu"


@dataclass(frozen=True)
class Add:
    """out += x (the residual stream)."""

    x: str
    out: str


@dataclass(frozen=True)
class Logits:
    """The step's result: x · weightᵀ for the rows asked for."""

    weight: str
    x: str


Op = Embed | RmsNorm | HeadNorm | Linear | Rope | Attention | Gated | Add | Logits
