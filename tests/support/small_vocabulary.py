"""A byte-level vocabulary small enough to write down: all bytes, `hello`, and three special tokens."""

import numpy as np
from support.gguf_writer import Value
from tokenizers.pre_tokenizers import ByteLevel

SPECIAL = {"<|im_start|>": 3, "<|im_end|>": 3, "<tool>": 4}  # token types: control, control, user-defined


def small_tokenizer_metadata() -> dict[str, Value]:
    alphabet = sorted(ByteLevel.alphabet())
    merges = ["h e", "l l", "he ll", "hell o"]
    tokens = [*alphabet, *(merge.replace(" ", "") for merge in merges), *SPECIAL]
    kinds = [1] * (len(tokens) - len(SPECIAL)) + list(SPECIAL.values())
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        "tokenizer.ggml.merges": merges,
    }
