"""A real, tiny model tells the story that its author published."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.compare import continue_greedily

from twostep.kernels.native import NativeExecutor
from twostep.kernels.reference import ReferenceExecutor
from twostep.kernels.step import Executor
from twostep.model.families import load_network
from twostep.model.gguf import GgufFile, read_gguf
from twostep.model.network import Network

STORIES = Path(__file__).parents[1] / "data" / "stories260k.gguf"
PUBLISHED = (  # karpathy/llama2.c, doc/stories260K.md, temperature 0
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. "
    "One day, she saw a big, red ball. She wanted to play with it, but it was too high."
)
BEGIN = 1
TOKENS = 90


@pytest.mark.parametrize("kind", [ReferenceExecutor, NativeExecutor])
def test_it_tells_the_published_story(kind: Callable[[Network, int], Executor]) -> None:
    file = read_gguf(STORIES)
    ids = continue_greedily(kind(load_network(file), 8), [BEGIN], TOKENS)
    assert told(file, ids).startswith(PUBLISHED)


def told(file: GgufFile, ids: list[int]) -> str:
    """SentencePiece's pieces write a space as `▁` and put one before the text."""
    pieces = file.metadata.strings("tokenizer.ggml.tokens")
    return "".join(pieces[i] for i in ids).replace("▁", " ").removeprefix(" ")
