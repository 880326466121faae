"""Converts llama2.c's stories260K (checkpoint version 0) to the small GGUF file of the tests.

    python tests/make_stories260k.py FOLDER    # with stories260K.bin and tok512.bin; writes tests/data/stories260k.gguf

llama2.c keeps Q and K rows in the order of interleaved rotation already, as GGUF's `llama` wants them.
"""

import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from support.gguf_writer import NewTensor, Value, f32, write_gguf

OUT = Path(__file__).parent / "data" / "stories260k.gguf"
HEADER = ("dim", "hidden", "layers", "heads", "kv_heads", "vocab", "context")
UNKNOWN, CONTROL, NORMAL, BYTE = 2, 3, 1, 6  # token types of GGUF
RMS_EPS, ROPE_BASE = 1e-5, 10000.0  # constants in llama2.c's source


def main(folder: Path) -> None:
    raw = (folder / "stories260K.bin").read_bytes()
    sizes = dict(zip(HEADER, struct.unpack_from("<7i", raw), strict=True))
    metadata = model_metadata(sizes) | tokenizer_metadata((folder / "tok512.bin").read_bytes(), sizes["vocab"])
    write_gguf(OUT, metadata, tensors(np.frombuffer(raw, "<f4", offset=4 * len(HEADER)), sizes))


def model_metadata(sizes: dict[str, int]) -> dict[str, Value]:
    return {
        "general.architecture": "llama",
        "general.name": "stories260K",
        "llama.block_count": sizes["layers"],
        "llama.context_length": sizes["context"],
        "llama.embedding_length": sizes["dim"],
        "llama.feed_forward_length": sizes["hidden"],
        "llama.attention.head_count": sizes["heads"],
        "llama.attention.head_count_kv": sizes["kv_heads"],
        "llama.attention.layer_norm_rms_epsilon": RMS_EPS,
        "llama.rope.dimension_count": sizes["dim"] // sizes["heads"],
        "llama.rope.freq_base": ROPE_BASE,
    }


def tokenizer_metadata(raw: bytes, vocab: int) -> dict[str, Value]:
    tokens, scores = zip(*read_tokens(raw, vocab), strict=True)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *(token.replace(" ", "\u2581") for token in tokens[3:])],
        "tokenizer.ggml.scores": np.array(scores, "<f4"),
        "tokenizer.ggml.token_type": np.array([UNKNOWN, CONTROL, CONTROL, *map(token_type, tokens[3:])], "<i4"),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
    }


def read_tokens(raw: bytes, vocab: int) -> Iterator[tuple[str, float]]:
    at = 4  # behind the length of the longest token
    for _ in range(vocab):
        score, length = struct.unpack_from("<fi", raw, at)
        yield raw[at + 8 : at + 8 + length].decode(), score
        at += 8 + length
    assert at == len(raw)


def token_type(token: str) -> int:
    return BYTE if len(token) == 6 and token.startswith("<0x") else NORMAL


def tensors(values: np.ndarray, sizes: dict[str, int]) -> Iterator[NewTensor]:
    """The checkpoint holds each kind of matrix for all layers in turn; behind them come tables of rotations."""
    dim, hidden, layers = sizes["dim"], sizes["hidden"], sizes["layers"]
    head = dim // sizes["heads"]
    kv = head * sizes["kv_heads"]
    stacks = {
        "attn_norm": (layers, dim),
        "attn_q": (layers, dim, dim),
        "attn_k": (layers, kv, dim),
        "attn_v": (layers, kv, dim),
        "attn_output": (layers, dim, dim),
        "ffn_norm": (layers, dim),
        "ffn_gate": (layers, hidden, dim),
        "ffn_down": (layers, dim, hidden),
        "ffn_up": (layers, hidden, dim),
    }
    shapes = {"token_embd": (sizes["vocab"], dim), **stacks, "output_norm": (dim,)}
    at = 0
    for name, shape in shapes.items():
        stack = values[at : at + np.prod(shape)].reshape(shape)
        at += stack.size
        if name not in stacks:
            yield f32(f"{name}.weight", stack)
            continue
        yield from (f32(f"blk.{layer}.{name}.weight", stack[layer]) for layer in range(layers))
    assert len(values) - at == sizes["context"] * head  # head / 2 cosines and as many sines for each position


if __name__ == "__main__":
    main(Path(sys.argv[1]))
