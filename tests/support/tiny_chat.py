"""A file with a whole model of a few kilobytes: random weights, a vocabulary of bytes, a chat template. Its answers are
random bytes, which are often half characters."""

from pathlib import Path

import numpy as np
from support.chat_templates import CHATML
from support.gguf_writer import Value, f32, write_gguf
from support.small_vocabulary import small_tokenizer_metadata
from support.tiny import Tiny, _shapes

from twostep.model.tensor import TensorType

CONTEXT = 2048


def write_tiny_chat(path: Path, seed: int = 0) -> Path:
    """The same file for the same seed."""
    values: dict[str, Value] = small_tokenizer_metadata()
    tokens = values["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    tiny = Tiny(TensorType.F32, width=40, heads=3, kv_heads=1, head_dim=8, ffn_width=72, vocab=len(tokens))
    rng = np.random.default_rng(seed)
    tensors = []
    for name, shape in _shapes(tiny).items():
        centre, spread = (1.0, 0.5) if len(shape) == 1 else (0.0, shape[-1] ** -0.5)
        tensors.append(f32(name, rng.normal(centre, spread, shape).astype("<f4")))
    sizes = {
        "block_count": tiny.layers,
        "embedding_length": tiny.width,
        "feed_forward_length": tiny.ffn_width,
        "context_length": CONTEXT,
        "attention.head_count": tiny.heads,
        "attention.head_count_kv": tiny.kv_heads,
        "attention.key_length": tiny.head_dim,
    }
    values |= {"general.architecture": "llama", **{f"llama.{key}": np.uint32(size) for key, size in sizes.items()}}
    values |= {
        "llama.attention.layer_norm_rms_epsilon": np.float32(1e-5),
        "tokenizer.ggml.eos_token_id": np.uint32(tokens.index("<|im_end|>")),
        "tokenizer.chat_template": CHATML,
    }
    return write_gguf(path, values, tensors)
