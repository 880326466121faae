"""An engine on a model whose layers have windows: its memory, its tables and copies by group, and answers that depend
on the request alone while windows free blocks."""

import secrets
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from support.engines import (
    WatchedSampler,
    answer,
    assert_no_residue,
    engine,
    mixed_requests,
    prompt,
    run,
    said,
    stories,
    submit,
)
from support.networks import FAMILY, Traits, with_traits

from twostep.config.values import MemoryBlocks
from twostep.core.blocks import root_hash
from twostep.engine import engine as engine_module
from twostep.engine.engine import Engine
from twostep.model.loaded import LoadedModel

WINDOWS = (24, None, 40)
CROWD = mixed_requests(40, seed=5)


@cache
def model(windows: tuple[int | None, ...] = WINDOWS) -> LoadedModel:
    """Five layers: groups of one with all positions, two each with a window of 24 and of 40."""
    return replace(stories(), network=with_traits(stories().network, replace(FAMILY, windows=windows)))


def test_blocks_by_group_are_those_of_the_layout() -> None:
    with engine(
        model=model(), kv_memory=MemoryBlocks(50), max_num_seqs=2, max_num_batched_tokens=600, skip_tokenizer_init=True
    ) as made:
        capabilities = made.kernels.executor.capabilities
        assert capabilities.layout.windows == (None, 24, 40)
        assert [len(group.layers) for group in capabilities.layout.groups] == [2, 2, 1]
        assert capabilities.blocks == (50, 50, 50)
    with engine(
        model=model(), kv_memory=MemoryBlocks(500), max_num_seqs=2, max_num_batched_tokens=600, skip_tokenizer_init=True
    ) as made:
        capabilities = made.kernels.executor.capabilities
        assert capabilities.blocks == (500, 2 * -(-(24 + 600 + 16) // 16), 2 * -(-(40 + 600 + 16) // 16))
        assert [group.blocks for group in made.scheduler.config.groups] == list(capabilities.blocks)
        assert "KV cache of 2 layers with a window of 24: 80 blocks" in list(made.describe())


def logits_of(alone: bool, **settings: Any) -> tuple[dict[Any, bytes], dict[str, Any], Engine]:
    """Hashes of all sampled rows, what was said, and the engine that said it."""
    watched: list[WatchedSampler] = []

    def watch(kernels: Any, sampler: Any) -> tuple[Any, Any]:
        watched.append(WatchedSampler(sampler))
        return kernels, watched[0]

    outputs = {}
    with engine(watch, model=model(), skip_tokenizer_init=True, **settings) as made:
        for asked in CROWD:
            submit(made, asked)
            outputs |= run(made) if alone else {}
        outputs |= run(made)
        assert_no_residue(made)
        return watched[0].seen, {id_: said(output) for id_, output in outputs.items()}, made


@cache
def alone() -> tuple[dict[Any, bytes], dict[str, Any]]:
    """Each request by itself, unchunked, without a prefix cache."""
    return logits_of(True, chunking="none", enable_prefix_caching=False, overlap=False)[:2]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"chunking": "tokens=64"},
        {"kv_memory": MemoryBlocks(60)},
        {"kv_memory": MemoryBlocks(60), "threads": 2, "chunking": "tokens=33"},
    ],
)
def test_answers_depend_on_the_request_alone(settings: dict[str, Any]) -> None:
    """With 60 blocks requests are preempted, and their prefixes found again as far as the windows are still there."""
    seen, outputs, made = logits_of(False, **settings)
    assert outputs == alone()[1]
    assert {place: seen[place] for place in alone()[0]} == alone()[0]
    assert made.scheduler.counters.prefix_hit_tokens > 0
    assert (made.scheduler.counters.preemptions > 0) == ("kv_memory" in settings)


def test_a_window_is_felt() -> None:
    """The same model without windows answers otherwise, but only once a prompt is longer than the window."""

    def answers(windows: tuple[int | None, ...], tokens: int) -> list[tuple[Any, ...]]:
        with engine(model=model(windows), skip_tokenizer_init=True) as made:
            return said(answer(made, prompt(tokens), max_tokens=8, logprobs=1))

    assert answers((24,), 16) == answers((None,), 16)
    assert answers((24,), 300) != answers((None,), 300)


def test_prefixes_of_another_layout_have_other_names() -> None:
    """Hashes of blocks contain the layout, so that nobody reads a block of another one as its own."""
    names = [with_traits(stories().network, Traits(windows=w)).kv_layout.name for w in ((None,), (24,), WINDOWS)]
    assert len(set(names)) == 3
    roots: list[bytes] = []

    def watched(*arguments: Any) -> bytes:
        roots.append(root_hash(*arguments))
        return roots[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "root_hash", watched)
        patch.setattr(secrets, "token_bytes", lambda count: bytes(count))
        for windows in ((None,), (24,), WINDOWS):
            with engine(model=model(windows), skip_tokenizer_init=True) as made:
                answer(made, prompt(20))
    assert len(set(roots)) == len(roots) == 3
