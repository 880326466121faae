"""Networks with random weights, small and of odd shapes, in every tensor type: what no published model has."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from twostep.model.families import load_network
from twostep.model.gguf import GgufFile
from twostep.model.metadata import Metadata
from twostep.model.network import Network
from twostep.model.tensor import Tensor, TensorType

_T = TensorType


@dataclass(frozen=True)
class Tiny:
    """Sizes of a network. `kinds` are the types of matrices by a part of their name, where they are not of `kind`.

    `family` "llama" rotates interleaved pairs and has no biases, "qwen2" rotates halves and has them.
    """

    kind: TensorType
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_width: int
    vocab: int
    layers: int = 2
    family: str = "llama"
    kinds: Mapping[str, TensorType] = field(default_factory=dict)
    own_head: bool = False

    def kind_of(self, name: str) -> TensorType:
        return next((kind for part, kind in self.kinds.items() if part in name), self.kind)


def tiny_network(tiny: Tiny, seed: int = 0) -> Network:
    """The same weights for the same arguments."""
    rng = np.random.default_rng(seed)
    tensors = [_random_tensor(rng, tiny, name, shape) for name, shape in _shapes(tiny).items()]
    return load_network(_file(tiny, {tensor.name: tensor for tensor in tensors}))


def _file(tiny: Tiny, tensors: dict[str, Tensor]) -> GgufFile:
    sizes = {
        "block_count": tiny.layers,
        "embedding_length": tiny.width,
        "feed_forward_length": tiny.ffn_width,
        "context_length": 4096,
        "attention.head_count": tiny.heads,
        "attention.head_count_kv": tiny.kv_heads,
        "attention.key_length": tiny.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    values = {"general.architecture": tiny.family, **{f"{tiny.family}.{key}": size for key, size in sizes.items()}}
    path = Path("tiny.gguf")
    return GgufFile(path, 3, 0, Metadata(path, values), tensors)


def _shapes(tiny: Tiny) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (tiny.vocab, tiny.width), "output_norm": (tiny.width,)}
    if tiny.own_head:
        shapes["output"] = (tiny.vocab, tiny.width)
    for layer in range(tiny.layers):
        shapes |= {f"blk.{layer}.{part}": shape for part, shape in _layer_shapes(tiny).items()}
    named = {f"{name}.weight": shape for name, shape in shapes.items()}
    biased = ("attn_q", "attn_k", "attn_v") if tiny.family == "qwen2" else ()
    return named | {f"{name}.bias": shape[:1] for name, shape in shapes.items() if name.endswith(biased)}


def _layer_shapes(tiny: Tiny) -> dict[str, tuple[int, ...]]:
    q_width, kv_width = tiny.heads * tiny.head_dim, tiny.kv_heads * tiny.head_dim
    return {
        "attn_norm": (tiny.width,),
        "attn_q": (q_width, tiny.width),
        "attn_k": (kv_width, tiny.width),
        "attn_v": (kv_width, tiny.width),
        "attn_output": (tiny.width, q_width),
        "ffn_norm": (tiny.width,),
        "ffn_gate": (tiny.ffn_width, tiny.width),
        "ffn_up": (tiny.ffn_width, tiny.width),
        "ffn_down": (tiny.width, tiny.ffn_width),
    }


def _random_tensor(rng: np.random.Generator, tiny: Tiny, name: str, shape: tuple[int, ...]) -> Tensor:
    """Values of spread 1 in vectors and the embedding, so sized in other matrices that outputs have spread 1 too."""
    if len(shape) == 1:
        return Tensor(name, _T.F32, shape, _bytes(rng.normal(1, 0.5, shape).astype("<f4")))
    kind = tiny.kind_of(name)
    spread = 1.0 if name == "token_embd.weight" and tiny.own_head else shape[1] ** -0.5
    if kind in _FLOAT_BYTES:
        return Tensor(name, kind, shape, _FLOAT_BYTES[kind](rng.normal(0, spread, shape).astype("<f4")))
    blocks = rng.integers(0, 256, (prod(shape) // kind.block_elements, kind.block_bytes), np.uint8)
    _put_scales(rng, kind, blocks, spread)
    return Tensor(name, kind, shape, blocks.ravel())


def _bytes(values: NDArray[np.generic]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(values).view(np.uint8).ravel()


_FLOAT_BYTES = {
    _T.F32: _bytes,
    _T.F16: lambda values: _bytes(values.astype("<f2")),
    _T.BF16: lambda values: _bytes((values.view("<u4") >> 16).astype("<u2")),
}

# Where the float16 scale of a block lies and, if it has one, its minimum; spread of values whose scale is 1, all other
# bits random; the minimum, as a multiple of the scale, that centres them.
_SCALES: dict[TensorType, tuple[int, int | None, float, float]] = {
    _T.Q4_0: (0, None, 4.6, 0),
    _T.Q4_1: (0, 2, 4.6, -7.5),
    _T.Q5_0: (0, None, 9.2, 0),
    _T.Q8_0: (0, None, 74, 0),
    _T.Q4_K: (0, 2, 170, 7.5),
    _T.Q6_K: (208, None, 1360, 0),
}


def _put_scales(rng: np.random.Generator, kind: TensorType, blocks: NDArray[np.uint8], spread: float) -> None:
    scale_at, min_at, values_spread, centre = _SCALES[kind]
    scales = rng.uniform(0.5, 1.5, (len(blocks), 1)) * spread / values_spread
    blocks[:, scale_at : scale_at + 2] = scales.astype("<f2").view(np.uint8)
    if min_at is not None:
        blocks[:, min_at : min_at + 2] = (scales * centre).astype("<f2").view(np.uint8)


TINY: dict[str, Tiny] = {
    "F32": Tiny(_T.F32, width=40, heads=3, kv_heads=1, head_dim=8, ffn_width=72, vocab=40),
    "F16": Tiny(_T.F16, width=24, heads=4, kv_heads=2, head_dim=24, ffn_width=40, vocab=33, family="qwen2"),
    "BF16": Tiny(_T.BF16, width=56, heads=7, kv_heads=1, head_dim=80, ffn_width=24, vocab=17, own_head=True),
    "Q4_0": Tiny(_T.Q4_0, width=64, heads=2, kv_heads=2, head_dim=64, ffn_width=96, vocab=50),
    "Q4_1": Tiny(_T.Q4_1, width=96, heads=4, kv_heads=2, head_dim=24, ffn_width=160, vocab=40, family="qwen2"),
    "Q5_0": Tiny(_T.Q5_0, width=32, heads=2, kv_heads=1, head_dim=80, ffn_width=64, vocab=100, layers=3),
    "Q8_0": Tiny(_T.Q8_0, width=96, heads=14, kv_heads=2, head_dim=64, ffn_width=32, vocab=40, family="qwen2"),
    "Q4_K": Tiny(
        _T.Q4_K,
        width=256,
        heads=2,
        kv_heads=1,
        head_dim=128,
        ffn_width=256,
        vocab=40,
        kinds={"attn_v": _T.Q6_K, "ffn_down": _T.Q6_K},
    ),
    "Q6_K": Tiny(_T.Q6_K, 256, heads=32, kv_heads=8, head_dim=8, ffn_width=256, vocab=24, layers=1, family="qwen2"),
    "many heads a group": Tiny(_T.Q8_0, width=32, heads=56, kv_heads=1, head_dim=8, ffn_width=32, vocab=40),
    "mixed": Tiny(
        _T.Q5_0,
        width=256,
        heads=12,
        kv_heads=4,
        head_dim=64,
        ffn_width=256,
        vocab=300,
        kinds={"attn_q": _T.Q4_K, "attn_k": _T.Q8_0, "attn_output": _T.F16, "ffn_down": _T.Q4_1, "token": _T.Q8_0},
    ),
}
"""By name. Groups of 1, 2, 3, 4, 7 and 56 query heads, heads of 8 to 128, outputs that fill no whole panel of 16."""
