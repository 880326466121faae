"""The native executor's promise: a request's logits are the same, bit for bit, however its tokens are cut into slices,
whoever shares the step, wherever its blocks lie, whatever lay in them before, and on any number of threads."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.compare import blocks_for, load_golden, run_prompt
from support.networks import first_layers
from support.tiny import TINY, tiny_network

from twostep.kernels.native import NativeExecutor, usable_isas
from twostep.kernels.step import Slice
from twostep.model.families import load_network
from twostep.model.gguf import read_gguf
from twostep.model.network import Network
from twostep.model.tensor import TensorType

Floats = NDArray[np.float32]

STORIES = "stories260k"
SEQUENCES = 4
LONGEST = 100
"""Tokens of a sequence among others: several make more than a block of 256 rows, attention starts a second tile."""
KV_BLOCKS = 280
"""More than they fill, so that one step can decode more than 256 sequences."""

every_isa = pytest.mark.parametrize("isa", usable_isas())
every_network = pytest.mark.parametrize("name", [STORIES, *TINY])


@cache
def network(name: str) -> Network:
    if name == STORIES:
        return load_network(read_gguf(Path(__file__).parents[1] / "data" / "stories260k.gguf"))
    return tiny_network(TINY[name])


@cache
def prompts(vocab: int, tokens: int = LONGEST) -> list[list[int]]:
    return np.random.default_rng(vocab).integers(0, vocab, (SEQUENCES, tokens)).tolist()


@cache
def alone(name: str, isa: str) -> list[Floats]:
    """Logits after every token of every prompt, each computed at once by one thread in a cache of its own."""
    ids = prompts(network(name).shape.vocab)
    return [run_prompt(NativeExecutor(network(name), KV_BLOCKS, threads=1, isa=isa), i, [LONGEST]) for i in ids]


@cache
def used_executor(name: str, isa: str, threads: int) -> NativeExecutor:
    """One for all examples, so that each finds in the cache what others left."""
    return NativeExecutor(network(name), KV_BLOCKS, threads=threads, isa=isa)


def assert_same_bits(actual: Floats, expected: Floats) -> None:
    np.testing.assert_array_equal(actual.view(np.uint32), expected.view(np.uint32))


@dataclass
class Request:
    """One sequence on its way: its slices that are still to be computed."""

    number: int
    table: list[int]
    slices: list[tuple[int, int]]


@st.composite
def crowds(draw: st.DrawFn) -> tuple[list[Request], Random]:
    """One to four sequences of any length cut anyhow, over blocks in disorder; and chance for the rest."""
    random = draw(st.randoms(use_true_random=False))
    blocks = random.sample(range(KV_BLOCKS), KV_BLOCKS)
    requests = []
    for number in range(draw(st.integers(1, SEQUENCES))):
        chunks = draw(st.lists(st.sampled_from([1, 2, 7, 16, 64, LONGEST]), min_size=1, max_size=8))
        ends = sorted({0, *(min(end, LONGEST) for end in accumulate(chunks))})
        table = [blocks.pop() for _ in blocks_for(ends[-1])]
        requests.append(Request(number, table, list(pairwise(ends))))
    return requests, random


def steps(requests: Sequence[Request], random: Random) -> Iterator[list[tuple[Request, int, int]]]:
    """Some of the requests' next slices in any order, until all are through."""
    while left := [request for request in requests if request.slices]:
        chosen = random.sample(left, random.randint(1, len(left)))
        yield [(request, *request.slices.pop(0)) for request in chosen]


@every_isa
@every_network
@settings(max_examples=6, deadline=None, derandomize=True)
@given(crowd=crowds(), threads=st.sampled_from([1, 2, 3]))
def test_cuts_company_tables_and_threads_change_no_bit(
    name: str, isa: str, crowd: tuple[list[Request], Random], threads: int
) -> None:
    executor, ids = used_executor(name, isa, threads), prompts(network(name).shape.vocab)
    requests, random = crowd
    for step in steps(requests, random):
        slices, expected = [], []
        for request, start, end in step:
            wanted = sorted(random.sample(range(end - start), random.choice([0, 1, end - start])))
            slices.append(Slice(start, ids[request.number][start:end], request.table, wanted))
            expected.append(alone(name, isa)[request.number][start:end][wanted])
        assert_same_bits(executor.forward(slices), np.concatenate(expected))


@every_isa
@pytest.mark.parametrize("name", ["F32", "Q4_1", "Q6_K"])
def test_many_decodes_at_once(name: str, isa: str) -> None:
    """More rows than one block of 256, each at its own position behind a prefix whose blocks they all read."""
    executor, ids = used_executor(name, isa, 2), prompts(network(name).shape.vocab)[0]
    prefix, own = blocks_for(32), range(2, KV_BLOCKS)
    executor.forward([Slice(0, ids[:32], prefix)])
    for start in range(32, 48):
        step = [Slice(start, ids[start : start + 1], [*prefix, block], [0]) for block in own]
        assert_same_bits(executor.forward(step), np.repeat(alone(name, isa)[0][start : start + 1], len(own), axis=0))


LONG = [500, *[1] * 20, 480, *[1] * 30, 20]
"""Across positions 512 and 1024, where attention starts a new split, by tokens alone, which share out the splits."""


SMALL = {STORIES, "F16", "BF16", "Q4_1", "Q5_0"}
LONG_CASES = [(name, isa) for isa in usable_isas() for name in (STORIES, *TINY) if isa != "portable" or name in SMALL]


@pytest.mark.parametrize(("name", "isa"), LONG_CASES)
def test_long_contexts_token_by_token(name: str, isa: str) -> None:
    ids = prompts(network(name).shape.vocab, sum(LONG))[0]
    blocks = blocks_for(len(ids))
    whole = run_prompt(NativeExecutor(network(name), len(blocks), threads=1, isa=isa), ids, [len(ids)])
    cut = run_prompt(NativeExecutor(network(name), len(blocks), threads=3, isa=isa), ids, LONG, blocks[::-1])
    assert_same_bits(cut, whole)


@pytest.fixture(scope="module")
def smollm2(default_model_path: Path) -> Network:
    return load_network(read_gguf(default_model_path))


@pytest.fixture(scope="module")
def text() -> list[int]:
    return load_golden("smollm2-135m").text_ids[: sum(LONG)]


def logits_of_last(executor: NativeExecutor, ids: list[int], chunks: Sequence[int]) -> list[Floats]:
    """Logits after the last token of every chunk: those of all would be a hundred megabytes and more."""
    out, table = [], blocks_for(len(ids))
    for start, end in pairwise([0, *accumulate(chunks)]):
        out.append(executor.forward([Slice(start, ids[start:end], table, [end - start - 1])]).copy())
    return out


def test_a_real_model_over_a_long_context(smollm2: Network, text: list[int]) -> None:
    blocks = blocks_for(len(text))
    executor = NativeExecutor(smollm2, len(blocks), threads=2)
    wanted = [end - 1 for end in accumulate(LONG)]
    at_once = executor.forward([Slice(0, text, blocks, wanted)]).copy()
    assert_same_bits(np.concatenate(logits_of_last(executor, text, LONG)), at_once)


@every_isa
def test_two_layers_of_a_real_model_at_every_instruction_set(smollm2: Network, text: list[int], isa: str) -> None:
    executor = NativeExecutor(first_layers(smollm2, 2), 8, threads=2, isa=isa)
    chunks = [1, 7, 16, 64, 10, 1, 1]
    wanted = [end - 1 for end in accumulate(chunks)]
    at_once = executor.forward([Slice(0, text[:100], blocks_for(100), wanted)]).copy()
    assert_same_bits(np.concatenate(logits_of_last(executor, text[:100], chunks)), at_once)


@every_isa
@pytest.mark.parametrize("name", ["F32", "Q8_0"])
def test_nonsense_in_one_sequence_reaches_no_other(name: str, isa: str) -> None:
    """Token 0 is infinite, token 1 not a number: neither they nor what they leave in the cache is felt elsewhere."""
    sound = tiny_network(replace(TINY[name], own_head=True, kinds={"token_embd": TensorType.F32}))
    ids = [i % 38 + 2 for i in range(60)]
    expected = run_prompt(NativeExecutor(sound, 8, threads=1, isa=isa), ids, [60])
    executor = NativeExecutor(with_poisoned_tokens(sound), 8, threads=2, isa=isa)
    together = executor.forward([Slice(0, [0, 1] * 30, range(4, 8)), Slice(0, ids, range(4), range(60))])
    assert_same_bits(together, expected)
    assert_same_bits(executor.forward([Slice(0, ids, range(4, 8), range(60))]), expected)


def with_poisoned_tokens(network: Network) -> Network:
    embedding = network.tensors["token_embd.weight"]
    values = embedding.data.view("<f4").reshape(embedding.shape).copy()
    values[0], values[1] = np.inf, np.nan
    poisoned = replace(embedding, data=values.view(np.uint8).ravel())
    return replace(network, tensors={**network.tensors, embedding.name: poisoned})
