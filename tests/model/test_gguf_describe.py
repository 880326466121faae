"""`describe`: what `twostep inspect` prints."""

from pathlib import Path

import numpy as np
import pytest
from support.gguf_writer import NewTensor, f32, write_gguf
from support.small_vocabulary import small_tokenizer_metadata

from twostep.errors import ModelFileError
from twostep.model.describe import describe

STORIES = Path(__file__).parents[1] / "data" / "stories260k.gguf"


def described(path: Path) -> dict[str, str]:
    """Lines by name; two spaces end a name."""
    pairs = [line.strip().split("  ", 1) for line in describe(path).splitlines()]
    return {name: value.strip() for name, value in pairs}


def test_stories() -> None:
    lines = described(STORIES)
    assert lines["file"] == f"{STORIES} (GGUF 3, 1.0 MiB)"
    assert lines["architecture"] == "llama"
    assert lines["shape"] == "5 layers of width 64, feed-forward 172"
    assert lines["attention"] == "8 heads, 4 KV heads, 8 values each"
    assert lines["KV cache"] == "640 bytes per token (f16)"  # 2 · 5 layers · 4 KV heads · 8 values · 2 bytes
    assert lines["parameters"] == "260032 in 47 tensors"
    assert lines["F32"] == "47 tensors, 1.0 MiB"
    assert lines["begins with"] == "'<s>' (1)"
    assert lines["ends at"] == "'</s>' (2)"
    assert lines["not usable"] == "key 'tokenizer.ggml.model' is 'llama'; supported: 'gpt2' (byte-level BPE)"
    assert lines["chat template"] == "none"


def test_what_cannot_be_used_says_why_beside_what_can(tmp_path: Path) -> None:
    tensors = [f32("a", np.ones((2, 8))), NewTensor("b", 8, (4, 64), bytes(272))]
    sampling = {"general.sampling.temp": 0.5, "general.sampling.top_k": 40}
    keys = {"general.architecture": "mamba", "tokenizer.chat_template": "first\nsecond", **sampling}
    lines = described(write_gguf(tmp_path / "m.gguf", keys | small_tokenizer_metadata(), tensors))
    assert lines["not usable"] == "architecture 'mamba' is not supported; supported: llama, qwen2"
    assert lines["parameters"] == "272 in 2 tensors"
    assert lines["vocabulary"] == "263 tokens, 3 of them special"
    assert lines["begins with"] == "nothing"
    assert lines["ends at"] == "'<|im_end|>' (261)"
    assert lines["sampling"] == "temp 0.5, top_k 40"
    assert lines["chat template"] == "12 characters: first"


def test_token_types_that_were_put_right_are_told(tmp_path: Path) -> None:
    keys = {**small_tokenizer_metadata(), "general.architecture": "mamba"}
    del keys["tokenizer.ggml.token_type"]
    lines = described(write_gguf(tmp_path / "m.gguf", keys))
    assert lines["put right"] == (
        "read as control tokens, which the file says they are not: '<|im_start|>' (260), '<|im_end|>' (261)"
    )
    assert lines["ends at"] == "'<|im_end|>' (261)"


def test_nothing_in_a_file_steers_the_terminal(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {"general.name": "\x1b[31mred" + "x" * 200, "general.architecture": "a\x07"})
    text = describe(path)
    assert not set(text) & set("\x1b\x07")
    assert "\ufffd[31mred" in text
    assert max(map(len, text.splitlines())) < 200


def test_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    with pytest.raises(ModelFileError, match="not a GGUF file"):
        describe(path)


def test_default_model(default_model_path: Path) -> None:
    lines = described(default_model_path)
    assert lines["parameters"] == "134515008 in 272 tensors"
    assert lines["KV cache"] == "23040 bytes per token (f16)"
    assert lines["Q4_1"] == "210 tensors, 63.3 MiB"
    assert lines["tokenizer"] == "gpt2, pre-tokenizer smollm"
    assert lines["ends at"] == "'<|endoftext|>' (0), '<|im_end|>' (2)"
    assert "not usable" not in lines
