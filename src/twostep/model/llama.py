"""Llama and its variants (SmolLM2, Mistral, Qwen2): pre-norm layers, grouped-query attention, gated feed-forward.

Buffers, one row a token: `x` the residual stream, `h` what goes into and comes out of a part of a layer, `q`, `k`, `v`,
`a` attention's heads, `g`, `u` the feed-forward's gate and up.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from twostep.model.decoder import Weights, read_shape, refuse_unsupported
from twostep.model.gguf import GgufFile
from twostep.model.network import Network
from twostep.model.ops import Add, Attention, Embed, Gated, Linear, Logits, Op, RmsNorm, Rope, RopeStyle
from twostep.spec.shape import ModelShape


@dataclass(frozen=True)
class LlamaVariant:
    """How one member differs from the others."""

    family: str
    rope: RopeStyle
    qkv_bias: bool


LLAMA = LlamaVariant("llama", rope="interleaved", qkv_bias=False)
QWEN2 = LlamaVariant("qwen2", rope="halves", qkv_bias=True)

_DEFAULT_ROPE_BASE = 10000.0


def build(file: GgufFile, variant: LlamaVariant) -> Network:
    """The network of a file of this variant. Raises `ModelFileError` for a missing, misshapen or unknown part."""
    refuse_unsupported(file.metadata, variant.family)
    shape = read_shape(file, variant.family)
    weights = Weights(file)
    ops = tuple(_Description(file, variant, shape, weights).operations())
    weights.check_all_used(variant.family)
    return Network(shape, ops, file.tensors)


class _Description:
    """The list of operations, with the sizes that all layers share."""

    def __init__(self, file: GgufFile, variant: LlamaVariant, shape: ModelShape, weights: Weights) -> None:
        self.variant = variant
        self.shape = shape
        self.weights = weights
        self.eps = _positive(file, f"{variant.family}.attention.layer_norm_rms_epsilon", None)
        self.rope_base = _positive(file, f"{variant.family}.rope.freq_base", _DEFAULT_ROPE_BASE)
        self.q_width = shape.heads * shape.head_dim
        self.kv_width = shape.kv_heads * shape.head_dim

    def operations(self) -> Iterator[Op]:
        shape, weights = self.shape, self.weights
        embedding = weights.matrix("token_embd.weight", shape.vocab, shape.width)
        yield Embed(embedding, out="x")
        for layer in range(shape.layers):
            yield from self.attention(layer)
            yield from self.feed_forward(layer)
        yield self.norm("output_norm")
        tied = "output.weight" not in weights
        yield Logits(embedding if tied else weights.matrix("output.weight", shape.vocab, shape.width), x="h")

    def attention(self, layer: int) -> Iterator[Op]:
        shape, block = self.shape, f"blk.{layer}"
        yield self.norm(f"{block}.attn_norm")
        yield self.projection(f"{block}.attn_q", self.q_width, out="q")
        yield self.projection(f"{block}.attn_k", self.kv_width, out="k")
        yield self.projection(f"{block}.attn_v", self.kv_width, out="v")
        yield Rope("q", shape.heads, shape.head_dim, self.rope_base, self.variant.rope)
        yield Rope("k", shape.kv_heads, shape.head_dim, self.rope_base, self.variant.rope)
        yield Attention(layer, shape.heads, shape.kv_heads, shape.head_dim, q="q", k="k", v="v", out="a")
        yield self.weights.linear(f"{block}.attn_output", shape.width, self.q_width, x="a", out="h")
        yield Add("h", out="x")

    def feed_forward(self, layer: int) -> Iterator[Op]:
        shape, block, linear = self.shape, f"blk.{layer}", self.weights.linear
        yield self.norm(f"{block}.ffn_norm")
        yield linear(f"{block}.ffn_gate", shape.ffn_width, shape.width, x="h", out="g")
        yield linear(f"{block}.ffn_up", shape.ffn_width, shape.width, x="h", out="u")
        yield Gated(gate="g", up="u", out="g")
        yield linear(f"{block}.ffn_down", shape.width, shape.ffn_width, x="g", out="h")
        yield Add("h", out="x")

    def norm(self, name: str) -> RmsNorm:
        return RmsNorm(self.weights.vector(f"{name}.weight", self.shape.width), self.eps, x="x", out="h")

    def projection(self, name: str, outputs: int, out: str) -> Linear:
        return self.weights.linear(name, outputs, self.shape.width, x="h", out=out, needs_bias=self.variant.qkv_bias)


def _positive(file: GgufFile, key: str, default: float | None) -> float:
    value = file.metadata.number(key, default)
    if value <= 0:
        raise file.metadata.error(key, f"is {value}, needs a number above 0")
    return value
