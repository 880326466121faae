"""The native executor as something to run: what it refuses, cancelling, what a step leaves behind and what it takes."""

import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from support.compare import blocks_for, run_prompt
from support.tiny import TINY, tiny_network

from twostep.kernels.native import NativeError, NativeExecutor, usable_isas
from twostep.kernels.sampling import SampleRow, TokenSampling
from twostep.kernels.step import Slice, StepArrays, StepCancelledError
from twostep.model.families import load_network
from twostep.model.gguf import read_gguf
from twostep.model.network import Network
from twostep.model.tensor import Tensor, TensorType

KV_BLOCKS = 8
IDS = [i * 7 % 40 for i in range(50)]


@pytest.fixture(scope="module")
def network() -> Network:
    return tiny_network(TINY["Q8_0"])


@pytest.fixture
def executor(network: Network) -> NativeExecutor:
    return NativeExecutor(network, KV_BLOCKS, threads=2)


def as_bytes(logits: NDArray[np.float32]) -> bytes:
    return logits.tobytes()


# --- construction


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kv_blocks": 0}, "kv_blocks is 0; it must be from 1 to"),
        ({"kv_blocks": -1}, "kv_blocks is -1"),
        ({"kv_blocks": 10**12}, "kv_blocks is 1000000000000"),
        ({"threads": 0}, "threads is 0; it must be from 1 to"),
        ({"threads": 2**40}, "threads is 1099511627776"),
        ({"isa": "mmx"}, f"'mmx' is not among those this machine runs: {', '.join(usable_isas())}"),
    ],
)
def test_what_cannot_be_built(network: Network, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(NativeError, match=message):
        NativeExecutor(network, **{"kv_blocks": 1, **arguments})  # type: ignore[arg-type]


def test_instruction_set_of_the_environment(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOSTEP_ISA", "portable")
    assert NativeExecutor(network, 1).isa == "portable"
    monkeypatch.setenv("TWOSTEP_ISA", "Portable")
    with pytest.raises(NativeError, match=f"'Portable' is not .*: {', '.join(usable_isas())}"):
        NativeExecutor(network, 1)
    assert NativeExecutor(network, 1, isa=usable_isas()[0]).isa == usable_isas()[0]


def test_a_cache_beyond_all_memory() -> None:
    """128 TiB: more than a process may address, so refused by every system however generous."""
    large = tiny_network(replace(TINY["F32"], kv_heads=3, head_dim=128))
    with pytest.raises(NativeError, match="no memory for a KV cache of 2147483647 blocks"):
        NativeExecutor(large, 2**31 - 1)


def test_floats_and_quantised_weights_cannot_share_an_input() -> None:
    kinds = {"attn_k": TensorType.F16}
    message = "must all be quantised or all be floats, not blk.0.attn_q.weight Q8_0, blk.0.attn_k.weight F16"
    with pytest.raises(NativeError, match=message):
        NativeExecutor(tiny_network(replace(TINY["Q8_0"], kinds=kinds)), 1)


# --- refused steps

REFUSED = [
    ([Slice(0, [40], [0])], "slice 0: token 40 is outside the vocabulary"),
    ([Slice(0, [-1], [0])], "slice 0: token -1 is outside the vocabulary"),
    ([Slice(0, [1], [KV_BLOCKS])], "slice 0: block 8 is outside the cache"),
    ([Slice(0, [1], [-1])], "slice 0: block -1 is outside the cache"),
    ([Slice(16, [1], [0])], "slice 0: its table of 1 blocks holds 16 positions, not 17"),
    ([Slice(0, [1] * 20, [0, 0])], "slice 0: its table names a block twice"),
    ([Slice(-1, [1], [0])], "slice 0: it starts at position -1"),
    ([Slice(0, [], [0])], "slice 0: it has no tokens"),
    ([Slice(0, [1, 2], [0], [1, 0])], "slice 0: its logits indices do not ascend"),
    ([Slice(0, [1, 2], [0], [2])], "slice 0: logits index 2 is outside its tokens"),
    ([Slice(0, [1], [7]), Slice(3, [1], [7])], "slice 1: block 7 is also written by slice 0"),
]


@pytest.mark.parametrize(("slices", "message"), REFUSED)
def test_a_refused_step_changes_nothing(executor: NativeExecutor, slices: list[Slice], message: str) -> None:
    last = Slice(49, IDS[49:], blocks_for(50), [0])
    run_prompt(executor, IDS[:49])
    expected = as_bytes(executor.forward([last]))
    with pytest.raises(ValueError, match=message):
        executor.forward(slices)
    assert as_bytes(executor.forward([last])) == expected


def test_a_step_of_nothing(executor: NativeExecutor, network: Network) -> None:
    assert executor.forward([]).shape == (0, network.shape.vocab)


def test_a_step_without_logits(executor: NativeExecutor, network: Network) -> None:
    assert executor.forward([Slice(0, IDS, blocks_for(50))]).shape == (0, network.shape.vocab)
    alone = run_prompt(NativeExecutor(network, KV_BLOCKS), IDS[:50])
    assert as_bytes(executor.forward([Slice(49, IDS[49:], blocks_for(50), [0])])) == as_bytes(alone[49:])


# --- cancelling


def test_cancelling_while_nothing_runs_does_nothing(executor: NativeExecutor, network: Network) -> None:
    expected = run_prompt(NativeExecutor(network, KV_BLOCKS), IDS)
    executor.cancel()
    assert as_bytes(run_prompt(executor, IDS)) == as_bytes(expected)


@pytest.fixture(scope="module")
def slow() -> NativeExecutor:
    """Its `LONG_STEP` takes many seconds, the interpreter being free meanwhile."""
    deep = tiny_network(replace(TINY["F32"], width=256, ffn_width=512, layers=40))
    return NativeExecutor(deep, 257, threads=2, isa="portable")


LONG_STEP = Slice(16, [1] * 4096, range(257), [4095])


@contextmanager
def long_step(executor: NativeExecutor) -> Iterator[None]:
    """`LONG_STEP` runs in another thread within; afterwards it is cancelled, and it is said that it was."""
    outcome: list[object] = []

    def run() -> None:
        try:
            outcome.append(executor.forward([LONG_STEP]))
        except StepCancelledError as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    time.sleep(0.1)
    try:
        yield
    finally:
        executor.cancel()
        thread.join()
    assert [type(result) for result in outcome] == [StepCancelledError]


def test_a_step_that_runs_hears_of_cancelling(slow: NativeExecutor) -> None:
    """Earlier positions are intact, and the step after it is not cancelled too."""
    expected = run_prompt(slow, IDS[:17])
    start = time.monotonic()
    with long_step(slow):
        pass
    assert time.monotonic() - start < 5
    again = slow.forward([Slice(16, IDS[16:17], range(2), [0])])
    assert as_bytes(again) == as_bytes(expected[16:])


# --- one call at a time


def test_a_second_call_while_a_step_runs_is_refused(slow: NativeExecutor) -> None:
    greedy = SampleRow(TokenSampling(temperature=0), 0, 0)
    sampler = slow.sampler()
    logits = slow.forward([Slice(0, [1], [0], [0])]).copy()
    calls: list[Callable[[], object]] = [
        lambda: slow.forward([Slice(0, [1], [0], [0])]),
        lambda: slow.copy_block(0, 1),
        lambda: slow.reserve(8, 8),
        lambda: sampler.sample(logits, [greedy]),
    ]
    with long_step(slow):
        for call in calls:
            with pytest.raises(RuntimeError, match="a step is running"):
                call()
    for call in calls:
        call()


def test_a_refused_step_leaves_the_turn_to_others(executor: NativeExecutor) -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="block 8 is outside the cache"):
            executor.forward_arrays(StepArrays.of([Slice(0, [1], [KV_BLOCKS])]))
    assert len(executor.forward([Slice(0, [1], [0], [0])])) == 1


# --- memory

STATM = Path("/proc/self/statm")
tells_memory = pytest.mark.skipif(not STATM.exists(), reason="the system does not tell a process its memory")


def memory_bytes(column: int) -> int:
    """Column 0: address space taken; 1: memory that is really there."""
    return int(STATM.read_text().split()[column]) * resource.getpagesize()


@contextmanager
def scarce_memory() -> Iterator[None]:
    """The process may take 64 MB more, no further."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes(0) + (64 << 20), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@tells_memory
def test_no_memory_for_weights() -> None:
    large = tiny_network(replace(TINY["Q8_0"], width=256, vocab=400_000))
    with scarce_memory(), pytest.raises(NativeError, match="no memory for the repacked weights"):
        NativeExecutor(large, 1, threads=1)


@tells_memory
def test_no_memory_for_threads(network: Network) -> None:
    with scarce_memory(), pytest.raises(NativeError, match="the system does not give 1000 threads"):
        NativeExecutor(network, 1, threads=1000)


@tells_memory
def test_a_step_that_memory_does_not_suffice_for(network: Network) -> None:
    """It fails alone: the buffers of the steps after it are as large as they need.

    So many rows that each buffer is more than 32 MiB: such a one is never made of memory that was freed before.
    """
    expected = run_prompt(NativeExecutor(network, KV_BLOCKS), IDS)
    executor = NativeExecutor(network, 12_500, threads=1)
    with scarce_memory(), pytest.raises(MemoryError):
        executor.forward([Slice(0, [1] * 200_000, range(12_500))])
    assert as_bytes(run_prompt(executor, IDS)) == as_bytes(expected)


@tells_memory
def test_steps_take_no_memory(executor: NativeExecutor) -> None:
    """Once a step of its size was run. The buffers of 51 rows take about half a megabyte, 200 times that if kept."""
    slices = [Slice(0, IDS, range(4), [49]), Slice(16, [1], [4, 5], [0])]
    executor.forward([Slice(0, IDS[:16], [4])])
    for _ in range(10):
        executor.forward(slices)
    before = memory_bytes(1)
    for _ in range(200):
        executor.forward(slices)
    assert memory_bytes(1) - before < 1 << 20


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell what is of files")
def test_a_model_is_not_resident_twice(default_model_path: Path) -> None:
    """Once repacked, the file's pages go; embeddings are still read from it, and right."""
    before = resident_file_bytes()
    network = load_network(read_gguf(default_model_path))
    executor = NativeExecutor(network, 1)
    assert resident_file_bytes() - before < default_model_path.stat().st_size // 10
    kept = replace(network, tensors={name: in_memory(tensor) for name, tensor in network.tensors.items()})
    piece = Slice(0, [1, 2, 3], [0], [2])
    assert as_bytes(executor.forward([piece])) == as_bytes(NativeExecutor(kept, 1).forward([piece]))


def resident_file_bytes() -> int:
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssFile"].split()[0]) * 1024


def in_memory(tensor: Tensor) -> Tensor:
    return replace(tensor, data=tensor.data.copy())
