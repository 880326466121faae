"""A real, tiny model tells the story that its author published."""

from pathlib import Path

from support.compare import continue_greedily

from twostep.kernels.reference import ReferenceExecutor
from twostep.model.families import load_network
from twostep.model.gguf import GgufFile, read_gguf

STORIES = Path(__file__).parent / "data" / "stories260k.gguf"
PUBLISHED = (  # karpathy/llama2.c, doc/stories260K.md, temperature 0
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. "
    "One day, she saw a big, red ball. She wanted to play with it, but it was too high."
)
BEGIN = 1
TOKENS = 90


def test_the_reference_tells_the_published_story() -> None:
    file = read_gguf(STORIES)
    ids = continue_greedily(ReferenceExecutor(load_network(file), 8), [BEGIN], TOKENS)
    assert told(file, ids).startswith(PUBLISHED)


def told(file: GgufFile, ids: list[int]) -> str:
    """SentencePiece's pieces write a space as `▁` and put one before the text."""
    pieces = file.metadata.strings("tokenizer.ggml.tokens")
    return "".join(pieces[i] for i in ids).replace("▁", " ").removeprefix(" ")
