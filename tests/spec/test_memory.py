"""Sizing of memory: the check values of the field, the native executor's own count, and plans that must be refused."""

from dataclasses import replace
from pathlib import Path

import pytest
from support.tiny import TINY, tiny_network

from twostep.config.values import KvMemory, MemoryBlocks, MemoryBytes, MemoryShare
from twostep.engine.host_memory import plan_memory
from twostep.errors import MemoryPlanError
from twostep.kernels.native import NativeError, NativeExecutor, packed_weight_bytes
from twostep.kernels.step import BLOCK_TOKENS, Slice
from twostep.model.families import load_network
from twostep.model.gguf import read_gguf
from twostep.model.network import Network
from twostep.spec.host import HostDemand
from twostep.spec.kv_layout import KvLayout
from twostep.spec.memory import MemoryDemand, MemoryPlan, plan_share, plan_stated, size_text
from twostep.spec.shape import ModelShape

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

LLAMA_2_7B = ModelShape("llama", 32, 4096, 32, 32, 128, 11008, 32000, 4096)
LLAMA_3_8B = ModelShape("llama", 32, 4096, 32, 8, 128, 14336, 128256, 8192)
LLAMA_3_70B = ModelShape("llama", 80, 8192, 64, 8, 128, 28672, 128256, 8192)


def demand(
    shape: ModelShape = LLAMA_2_7B, weights: int = 14 * 10**9, tokens: int = 512, rows: int = 16
) -> MemoryDemand:
    return MemoryDemand(shape, KvLayout.full_attention(shape), weights, tokens, rows)


# --- check values of the literature


@pytest.mark.parametrize(
    ("shape", "per_token"), [(LLAMA_2_7B, 524_288), (LLAMA_3_8B, 128 * KIB), (LLAMA_3_70B, 320 * KIB)]
)
def test_kv_bytes_per_token(shape: ModelShape, per_token: int) -> None:
    assert demand(shape).kv_bytes_per_token == per_token
    assert demand(shape).kv_bytes_per_block == 16 * per_token
    wide = replace(demand(shape).layout, block_tokens=32)
    assert replace(demand(shape), layout=wide).kv_bytes_per_block == 32 * per_token


def test_a_full_sequence_of_llama_2_7b_takes_two_gib() -> None:
    assert demand().blocks_for(4096) * demand().kv_bytes_per_block == 2 * GIB


def test_llama_2_7b_in_24_gb() -> None:
    """Four full sequences by the arithmetic of weights and KV alone; activations leave room for no more."""
    alone = plan_share(demand(tokens=0, rows=0), 24 * 10**9, 1)
    assert alone.full_length_sequences(4096) == 4
    assert plan_share(demand(tokens=8192), 24 * 10**9, 1).full_length_sequences(4096) < 4


# --- the native executor takes what the plan says


def stories() -> Network:
    return load_network(read_gguf(Path(__file__).parents[1] / "data" / "stories260k.gguf"))


@pytest.fixture(params=["stories260k", *TINY])
def network(request: pytest.FixtureRequest) -> Network:
    return stories() if request.param == "stories260k" else tiny_network(TINY[request.param])


def test_the_native_executor_takes_what_was_planned(network: Network) -> None:
    weights = packed_weight_bytes(network)
    executor = NativeExecutor(network, kv_blocks=6, threads=1)
    need = MemoryDemand(network.shape, network.kv_layout, weights, step_tokens=48, logit_rows=5)
    planned = MemoryPlan(need, GIB, None, 6)
    executor.forward([Slice(0, [1] * 48, range(3), range(5))])
    assert planned.weights_bytes == executor.weight_bytes
    assert planned.kv_bytes == executor.kv_bytes
    assert planned.activation_bytes == executor.buffer_bytes
    assert planned.demand.layout.block_tokens == BLOCK_TOKENS


def test_memory_follows_the_widest_step_not_the_context() -> None:
    """Narrower steps, also at the end of a long context, take none; wider ones no more than their own width."""
    network = stories()
    needs = [MemoryDemand(network.shape, network.kv_layout, 0, tokens, 1) for tokens in (40, 30)]
    wide, narrow = (need.activation_bytes for need in needs)
    executor = NativeExecutor(network, kv_blocks=32, threads=1)
    for start in range(0, 480, 30):
        executor.forward([Slice(start, [1] * 30, range(32), [0])])
        assert executor.buffer_bytes == narrow
    executor.forward([Slice(0, [1] * 40, range(32), [0])])
    assert executor.buffer_bytes == wide
    executor.forward([Slice(40, [1] * 39, range(32), [0])])
    assert executor.buffer_bytes == wide


def test_reserved_memory_is_that_of_the_plan_and_no_step_changes_it() -> None:
    network = stories()
    executor = NativeExecutor(network, kv_blocks=6, threads=1)
    executor.reserve(step_tokens=64, logit_rows=8)
    planned = MemoryDemand(network.shape, network.kv_layout, 0, step_tokens=64, logit_rows=8).activation_bytes
    assert executor.buffer_bytes == planned
    executor.forward([Slice(0, [1] * 64, range(4), range(8))])
    assert executor.buffer_bytes == planned


def test_more_than_memory_cannot_be_reserved() -> None:
    executor = NativeExecutor(stories(), kv_blocks=6, threads=1)
    with pytest.raises(NativeError, match="no memory for steps of 2147483647 tokens and 2147483647 rows of logits"):
        executor.reserve(2**31 - 1, 2**31 - 1)
    with pytest.raises(NativeError, match="logit_rows is 0"):
        executor.reserve(1, 0)


# --- plans

SMALL = ModelShape("llama", 2, 64, 4, 2, 32, 128, 1000, 256)
PER_BLOCK = 2 * 2 * 2 * 32 * 2 * 16


def small(weights: int = 10 * MIB) -> MemoryDemand:
    return MemoryDemand(SMALL, KvLayout.full_attention(SMALL), weights, step_tokens=32, logit_rows=4)


def test_a_share_is_for_everything() -> None:
    plan = plan_memory(small(), 100 * MIB, MemoryShare(0.5))
    rest = 50 * MIB - plan.weights_bytes - plan.activation_bytes
    assert plan.kv_bytes_per_block == PER_BLOCK
    assert plan.blocks == rest // PER_BLOCK
    assert plan.weights_bytes + plan.activation_bytes + plan.kv_bytes <= 50 * MIB
    assert plan.full_length_sequences(256) == plan.blocks // 16
    assert plan.full_length_sequences(17) == plan.blocks // 2


def test_a_stated_size_is_kept() -> None:
    assert plan_memory(small(), 100 * MIB, MemoryBlocks(7)).kv_bytes == 7 * PER_BLOCK
    assert plan_memory(small(), 100 * MIB, MemoryBytes(8 * PER_BLOCK - 1)).blocks == 7


def test_all_that_is_free_may_be_taken_and_no_byte_more() -> None:
    need = small().fixed_bytes + 5 * PER_BLOCK
    assert plan_memory(small(), need, MemoryBlocks(5)).blocks == plan_memory(small(), need, MemoryShare(1)).blocks == 5
    with pytest.raises(MemoryPlanError, match=r"the KV cache does not fit: 40\.0 KiB stated"):
        plan_memory(small(), need - 1, MemoryBlocks(5))


@pytest.mark.parametrize(
    ("free", "stated", "least", "message"),
    [
        (
            100 * MIB,
            MemoryBlocks(100_000),
            1,
            r"the KV cache does not fit: 781.2 MiB stated, "
            r"100.0 MiB free - 10.0 MiB weights - 115.9 KiB activations = 89.9 MiB",
        ),
        (
            100 * MIB,
            MemoryBlocks(1),
            17,
            r"the KV cache does not hold one sequence of 17 tokens: 8.0 KiB stated = 1 blocks; "
            r"needed: 2 x 8.0 KiB = 16.0 KiB",
        ),
        (
            100 * MIB,
            MemoryBytes(1024),
            1,
            "does not hold even one block: 1.0 KiB stated = 0 blocks; needed: 1 x",
        ),
        (100 * MIB, MemoryBlocks(0), 1, "does not hold even one block: 0 B stated = 0 blocks"),
        (100 * MIB, MemoryBlocks(-3), 1, "does not hold even one block: -24.0 KiB stated"),
        (
            10 * MIB,
            MemoryShare(0.6),
            1,
            r"60 % of 10.0 MiB free - 10.0 MiB weights - 115.9 KiB activations = -4.1 MiB = 0 blocks",
        ),
    ],
)
def test_plans_that_are_refused(free: int, stated: KvMemory, least: int, message: str) -> None:
    with pytest.raises(MemoryPlanError, match=message):
        plan_memory(small(), free, stated, least)


# --- in words


def test_the_arithmetic_of_a_share() -> None:
    plan = plan_share(demand(LLAMA_3_8B, weights=5 * GIB), 20 * GIB, 0.6)
    assert list(plan.arithmetic(8192)) == [
        "weights: 5.0 GiB",
        "activations: 512 tokens a step x 184.5 KiB + 16 rows of logits x 501.0 KiB = 100.1 MiB",
        "KV per token: 2 x 32 layers x 8 KV heads x 128 elements x 2 B = 131072 B",
        f"KV cache: 60 % of 20.0 GiB free - 5.0 GiB weights - 100.1 MiB activations = 6.9 GiB "
        f"= {plan.blocks} blocks of 16 tokens = {16 * plan.blocks} tokens = 6 sequences of full length 8192",
    ]


def test_the_arithmetic_of_the_processes_around_it() -> None:
    """They are part of what a share is of, and of what has to fit."""
    host = HostDemand(vocab=1000, threads=2, serves=True)
    plan = plan_memory(replace(small(), host=host), 300 * MIB, MemoryShare(0.9))
    lines = list(plan.arithmetic(256))
    tables = "1.3 MiB tokenizer (twice) and grammars of 1000 tokens"
    assert lines[2] == (
        f"processes: 8.0 MiB engine + 4.0 MiB 2 threads + {tables} + 12.0 MiB chat template + 60.0 MiB server "
        "= 85.3 MiB"
    )
    assert "90 % of 300.0 MiB free - 10.0 MiB weights - 115.9 KiB activations - 85.3 MiB processes = " in lines[4]
    assert (
        plan.kv_bytes + small().fixed_bytes + host.total_bytes
        <= 270 * MIB
        < plan.demand.fixed_bytes + (plan.blocks + 1) * PER_BLOCK
    )
    with pytest.raises(MemoryPlanError, match=r"95.0 MiB free - .* - 85.3 MiB processes = "):
        plan_memory(replace(small(), host=host), 95 * MIB, MemoryBlocks(10))


def test_an_engine_alone_has_fewer_processes_around_it() -> None:
    served, alone, bare = HostDemand(1000, 2, True), HostDemand(1000, 2, False), HostDemand(0, 2, False)
    assert served.total_bytes > alone.total_bytes > bare.total_bytes == 12 * MIB
    assert "server" not in alone.words()


@pytest.mark.parametrize(
    ("blocks", "capacity"),
    [
        (1, "16 tokens = not one sequence of full length 256"),
        (16, "256 tokens = 1 sequence of full length 256"),
        (40, "640 tokens = 2 sequences of full length 256"),
    ],
)
def test_the_arithmetic_of_a_stated_size(blocks: int, capacity: str) -> None:
    *_, last = plan_stated(small(), 100 * MIB, blocks * PER_BLOCK).arithmetic(256)
    assert last == f"KV cache: {size_text(blocks * PER_BLOCK)} stated = {blocks} blocks of 16 tokens = {capacity}"


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (MIB, "1.0 MiB"),
        (-3 * GIB, "-3.0 GiB"),
        (2048 * GIB, "2048.0 GiB"),
    ],
)
def test_sizes_in_words(size: int, text: str) -> None:
    assert size_text(size) == text
