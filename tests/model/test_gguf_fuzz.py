"""Thousands of damaged files: readers raise nothing but `ModelFileError`, and soon (CASES 40)."""

import random
import resource
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

import numpy as np
import pytest
from support.gguf_writer import EVERY_KIND, f32, gguf_bytes
from support.small_vocabulary import small_tokenizer_metadata

from twostep.errors import ModelFileError
from twostep.model.describe import describe
from twostep.model.families import load_network
from twostep.model.gguf import read_gguf
from twostep.model.tokenizer import load_tokenizer

STORIES = Path(__file__).parents[1] / "data" / "stories260k.gguf"
STORIES_HEAD_BYTES = 14_000  # what comes before the weights; damage there means nothing to a reader
SLOWEST_S = 2.0
MEMORY_KIB = 96 << 10

Damage = tuple[int, bytes]  # at this offset the file has these bytes instead


def small_file() -> bytes:
    """Every kind of value, a tokenizer and a whole Llama in a few kilobytes."""
    llama = {
        "general.architecture": "llama", "llama.block_count": 1, "llama.context_length": 64,
        "llama.embedding_length": 4, "llama.feed_forward_length": 4, "llama.attention.head_count": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5, "tokenizer.chat_template": "{{ messages }}",
    }  # fmt: skip
    vocab = len(small_tokenizer_metadata()["tokenizer.ggml.tokens"])
    square = [f"blk.0.{name}.weight" for name in ("attn_q", "attn_k", "attn_v", "attn_output")]
    square += [f"blk.0.{name}.weight" for name in ("ffn_gate", "ffn_up", "ffn_down")]
    norms = ["blk.0.attn_norm.weight", "blk.0.ffn_norm.weight", "output_norm.weight"]
    shapes = {"token_embd.weight": (vocab, 4), **dict.fromkeys(square, (4, 4)), **dict.fromkeys(norms, (4,))}
    tensors = [f32(name, np.ones(shape, np.float32)) for name, shape in shapes.items()]
    return gguf_bytes(llama | small_tokenizer_metadata() | EVERY_KIND, tensors)


def damages(rng: random.Random, size: int, cases: int) -> Iterator[list[Damage]]:
    """Flipped bits, random bytes, and numbers that tend to break arithmetic, one to three at a time."""
    numbers = [0, 1, 7, 13, 255, 1 << 16, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 63, (1 << 64) - 1]
    for _ in range(cases):
        yield [
            (
                rng.randrange(size - 8),
                rng.choice([rng.randbytes(1), rng.randbytes(4), struct.pack("<Q", rng.choice(numbers)), b"\xff"]),
            )
            for _ in range(rng.randrange(1, 4))
        ]


def outcome(path: Path) -> str:
    """How far a file gets. Whatever is not a `ModelFileError` escapes."""
    stage = "read"
    try:
        file = read_gguf(path)
        stage = "network"
        load_network(file)
        stage = "tokenizer"
        load_tokenizer(file.metadata).encode("hello <|im_end|> 123", special=True)
    except ModelFileError as error:
        return stage if "\n" not in str(error) else "told in several lines"
    return "sound"


def watched(path: Path, case: object) -> str:
    """`outcome`, in time, telling the case if anything else comes out."""
    start = perf_counter()
    try:
        reached = outcome(path)
    except BaseException as error:
        error.add_note(f"case: {case!r}")
        raise
    assert perf_counter() - start < SLOWEST_S, case
    return reached


def survey(path: Path, sound: bytes, cases: Iterator[list[Damage]]) -> Counter[str]:
    """Outcomes of all cases, each written into the file and taken back."""
    outcomes: Counter[str] = Counter()
    path.write_bytes(sound)
    with path.open("r+b", buffering=0) as file:
        for case in cases:
            for at, data in case:
                file.seek(at)
                file.write(data)
            outcomes[watched(path, case)] += 1
            for at, data in case:
                file.seek(at)
                file.write(sound[at : at + len(data)])
    assert path.read_bytes() == sound
    return outcomes


@pytest.fixture(autouse=True)
def bounded_memory() -> Iterator[None]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MEMORY_KIB


def test_small_file_is_sound(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    path.write_bytes(small_file())
    assert outcome(path) == "sound"


def test_damaged_bytes_of_a_small_file(tmp_path: Path) -> None:
    sound = small_file()
    outcomes = survey(tmp_path / "small.gguf", sound, damages(random.Random(1), len(sound), 3000))
    assert set(outcomes) == {"read", "network", "tokenizer", "sound"}


def test_damaged_head_of_a_real_file(tmp_path: Path) -> None:
    outcomes = survey(
        tmp_path / "stories.gguf", STORIES.read_bytes(), damages(random.Random(2), STORIES_HEAD_BYTES, 1500)
    )
    assert set(outcomes) == {"read", "network", "tokenizer"}  # it has a tokenizer of another kind


def test_truncations_of_a_real_file(tmp_path: Path) -> None:
    path = tmp_path / "stories.gguf"
    path.write_bytes(STORIES.read_bytes())
    sizes = random.Random(4).sample(range(STORIES.stat().st_size), 300)
    for size in sorted(sizes, reverse=True):
        with path.open("r+b") as file:
            file.truncate(size)
        assert watched(path, size) == "read"


def test_every_truncation_of_a_small_file(tmp_path: Path) -> None:
    sound = small_file()
    path = tmp_path / "small.gguf"
    path.write_bytes(sound)
    padding = 16  # behind the last tensor's four values
    for size in range(len(sound) - padding - 1, -1, -3):
        with path.open("r+b") as file:
            file.truncate(size)
        assert watched(path, size) == "read"


def test_damaged_files_are_described_or_refused(tmp_path: Path) -> None:
    sound = small_file()
    path = tmp_path / "small.gguf"
    described = 0
    for case in damages(random.Random(3), len(sound), 500):
        damaged = bytearray(sound)
        for at, data in case:
            damaged[at : at + len(data)] = data
        path.write_bytes(damaged)
        try:
            lines = describe(path).splitlines()
        except ModelFileError:
            continue
        assert len(lines) > 5
        described += 1
    assert described > 100
