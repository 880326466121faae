"""The reference executor against Hugging Face transformers, by the golden files."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.compare import (
    Golden,
    blocks_for,
    continue_greedily,
    kl_per_position,
    load_golden,
    perplexity,
    run_golden,
    top50_error,
)

from twostep.kernels.reference import ReferenceExecutor
from twostep.model.families import load_network
from twostep.model.gguf import read_gguf
from twostep.model.network import Network

STORIES = Path(__file__).parents[1] / "data" / "stories260k.gguf"
LARGER = ("qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b")


def executor_for(network: Network, golden: Golden, **modes: str) -> ReferenceExecutor:
    return ReferenceExecutor(network, len(blocks_for(max(golden.prompts) + 32)), **modes)  # type: ignore[arg-type]


def assert_like_the_oracle(path: Path, name: str) -> None:
    """Keys and values unrounded, as the oracle's."""
    golden = load_golden(name)
    executor = executor_for(load_network(read_gguf(path)), golden, kv="float32")
    errors = {length: top50_error(prompt, run_golden(executor, prompt)) for length, prompt in golden.prompts.items()}
    assert len(errors) >= 7
    assert max(errors.values()) <= 1e-3, errors


def test_stories_like_the_oracle() -> None:
    assert_like_the_oracle(STORIES, "stories260k")


def test_default_model_like_the_oracle(default_model_path: Path) -> None:
    assert_like_the_oracle(default_model_path, "smollm2-135m")


@pytest.mark.models
@pytest.mark.parametrize("name", LARGER)
def test_larger_models_like_the_oracle(model_path: Callable[[str], Path], name: str) -> None:
    assert_like_the_oracle(model_path(name), name)


def test_perplexity_is_the_oracles() -> None:
    golden = load_golden("stories260k")
    executor = executor_for(load_network(read_gguf(STORIES)), golden)
    assert perplexity(executor, golden.text_ids) == pytest.approx(golden.perplexity, rel=1e-4)


def test_continuations_are_the_oracles() -> None:
    golden = load_golden("stories260k")
    executor = executor_for(load_network(read_gguf(STORIES)), golden)
    told = {length: prompt.greedy for length, prompt in golden.prompts.items() if prompt.greedy is not None}
    assert len(told) >= 4
    for length, expected in told.items():
        assert continue_greedily(executor, golden.prompts[length].ids, len(expected)) == expected, length


def test_default_model_continues_as_the_oracle(default_model_path: Path) -> None:
    golden = load_golden("smollm2-135m")
    executor = executor_for(load_network(read_gguf(default_model_path)), golden)
    prompt = golden.prompts[16]
    assert continue_greedily(executor, prompt.ids, 32) == prompt.greedy


def test_half_precision_kv_stays_close(default_model_path: Path) -> None:
    """What every executor but the oracle pays for a cache of half the size."""
    golden = load_golden("smollm2-135m")
    executor = executor_for(load_network(read_gguf(default_model_path)), golden)
    prompt = golden.prompts[100]
    logits = run_golden(executor, prompt)
    assert 1e-3 < top50_error(prompt, logits) <= 2e-2
    assert kl_per_position(prompt, logits).mean() <= 1e-5
