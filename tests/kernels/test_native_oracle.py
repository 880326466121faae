"""How true the native executor is: against Hugging Face transformers by the golden files, and against the reference.

Rounding activations to 8 bits makes a network chaotic: a difference in the last bit of a float32 sum moves, now and
then, a value over the edge between two integers, and each such step makes others later. So whole networks agree with
the reference only as well as the reference agrees with itself when it sums in another order.
`test_native_reference.py` compares layers, `test_kernels_native.py` the kernels one by one.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
from support.compare import (
    Golden,
    blocks_for,
    kl_divergence,
    kl_per_position,
    load_golden,
    perplexity,
    run_golden,
    run_prompt,
    top50_difference,
    top50_error,
)
from support.networks import with_matrices_as

from twostep.kernels.native import NativeExecutor
from twostep.kernels.reference import ReferenceExecutor
from twostep.kernels.step import Executor
from twostep.model.families import load_network
from twostep.model.gguf import read_gguf
from twostep.model.network import Network
from twostep.model.tensor import TensorType

STORIES = Path(__file__).parents[1] / "data" / "stories260k.gguf"
LARGER = ("qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b")
FLOAT_TYPES = (TensorType.F32, TensorType.F16, TensorType.BF16)


@pytest.fixture(scope="module")
def network(default_model_path: Path) -> Network:
    return load_network(read_gguf(default_model_path))


@pytest.fixture(scope="module")
def golden() -> Golden:
    return load_golden("smollm2-135m")


def native(network: Network, golden: Golden) -> NativeExecutor:
    return NativeExecutor(network, len(blocks_for(max(golden.prompts))))


def assert_quantised_is_true(network: Network, golden: Golden) -> None:
    executor = native(network, golden)
    assert mean_kl(executor, golden, golden.prompts) <= 2e-3
    assert perplexity(executor, golden.text_ids) == pytest.approx(golden.perplexity, rel=5e-3)


def mean_kl(executor: Executor, golden: Golden, lengths: Iterable[int]) -> float:
    prompts = [golden.prompts[length] for length in lengths]
    return float(np.concatenate([kl_per_position(p, run_golden(executor, p)) for p in prompts]).mean())


def test_quantised_weights_against_the_oracle(network: Network, golden: Golden) -> None:
    assert_quantised_is_true(network, golden)


@pytest.mark.models
@pytest.mark.parametrize("name", LARGER)
def test_larger_quantised_models_against_the_oracle(model_path: Callable[[str], Path], name: str) -> None:
    assert_quantised_is_true(load_network(read_gguf(model_path(name))), load_golden(name))


def test_float_weights_against_the_oracle(network: Network, golden: Golden) -> None:
    """The dequantised values themselves, as the oracle has them."""
    executor = native(with_matrices_as(network, TensorType.F32), golden)
    errors = {n: top50_error(prompt, run_golden(executor, prompt)) for n, prompt in golden.prompts.items()}
    assert max(errors.values()) <= 2e-2, errors
    assert mean_kl(executor, golden, golden.prompts) <= 1e-4


@pytest.mark.parametrize("kind", [TensorType.F16, TensorType.BF16], ids=lambda kind: kind.name)
def test_half_weights_against_the_reference(network: Network, golden: Golden, kind: TensorType) -> None:
    """Rounded weights are another model than the oracle's; the reference, proven on the oracle's, stands in for it."""
    halves = with_matrices_as(network, kind)
    ids = golden.prompts[100].ids
    expected = run_prompt(ReferenceExecutor(halves, 8, kv="float32"), ids)
    logits = run_prompt(NativeExecutor(halves, 8), ids)
    assert top50_difference(expected, logits) <= 2e-2
    assert kl_divergence(expected, logits).mean() <= 1e-4


@pytest.mark.parametrize("kind", FLOAT_TYPES, ids=lambda kind: kind.name)
def test_a_tiny_model_of_odd_widths(kind: TensorType) -> None:
    """A feed-forward of 172, heads of 8: nothing is a multiple of a vector."""
    stories = with_matrices_as(load_network(read_gguf(STORIES)), kind)
    ids = load_golden("stories260k").text_ids
    expected = run_prompt(ReferenceExecutor(stories, 32, kv="float32"), ids)
    assert kl_divergence(expected, run_prompt(NativeExecutor(stories, 32), ids)).mean() <= 1e-5


def test_all_layers_differ_no_more_than_the_reference_from_itself(network: Network, golden: Golden) -> None:
    ids = golden.prompts[100].ids[:40]
    reference = ReferenceExecutor(network, 8, activations="int8")
    expected = run_prompt(reference, ids)
    own_noise = kl_divergence(expected, run_prompt(reference, ids, [1] * len(ids))).mean()
    noise = kl_divergence(expected, run_prompt(NativeExecutor(network, 8), ids)).mean()
    assert 0 < noise <= 2 * own_noise
