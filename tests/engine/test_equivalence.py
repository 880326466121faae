"""What is answered depends on the request alone: not on company, batching, chunks, cache, threads or preemption."""

import os
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from support.engines import (
    Asked,
    Place,
    WatchedSampler,
    answer,
    assert_no_residue,
    engine,
    mixed_requests,
    run,
    said,
    submit,
    tokens_of,
)
from support.engines import prompt as prompt_of

from twostep.config.values import MemoryBlocks
from twostep.core.scheduler import Counters
from twostep.engine.outputs import RequestOutput
from twostep.engine.params import SamplingParams

CROWD = mixed_requests(200, seed=3)
TINY_CACHE = 48
"""Blocks: less than two of the longest requests."""


@dataclass(frozen=True)
class Served:
    outputs: dict[str, RequestOutput]
    logits: dict[Place, bytes]
    """A hash of the logits from which each token was chosen."""
    counters: Counters

    def said(self) -> dict[str, Any]:
        return {id_: said(output) for id_, output in self.outputs.items()}


def serve(asked: list[Asked], *, alone: bool = False, **settings: Any) -> Served:
    """All at once, or one after the other."""
    watched: list[WatchedSampler] = []

    def watch(kernels: Any, sampler: Any) -> tuple[Any, Any]:
        watched.append(WatchedSampler(sampler))
        return kernels, watched[0]

    outputs: dict[str, RequestOutput] = {}
    with engine(watch, **settings) as served:
        for request in asked:
            submit(served, request)
            if alone:
                outputs |= run(served)
        outputs |= run(served)
        assert_no_residue(served)
        return Served(outputs, watched[0].seen, served.scheduler.counters)


@cache
def alone() -> Served:
    """Each request by itself, unchunked, without a prefix cache: nothing that could go wrong is there."""
    return serve(CROWD, alone=True, chunking="none", enable_prefix_caching=False, overlap=False)


def test_the_crowd_has_every_kind_of_request() -> None:
    """Else the other tests would say less than they seem to."""
    params = [asked.params for asked in CROWD]
    assert {p.n for p in params} == {1, 2, 3}
    assert {p.temperature == 0 for p in params} == {p.logprobs is None for p in params} == {True, False}
    assert {p.reads_history for p in params} == {p.min_tokens > 0 for p in params} == {True, False}
    assert {asked.priority for asked in CROWD} == {0, 1, 2}
    assert min(len(asked.prompt) for asked in CROWD) < 16
    assert max(len(asked.prompt) for asked in CROWD) > 380
    reasons = [choice.finish_reason for output in alone().outputs.values() for choice in output.choices]
    assert min(reasons.count("stop"), reasons.count("length")) > 50


SETTINGS: dict[str, dict[str, Any]] = {
    "all at once": {},
    "many seats": {"max_num_seqs": 256},
    "one seat": {"max_num_seqs": 1},
    "static": {"batching": "static=16", "max_num_seqs": 16},
    "static, unchunked": {"batching": "static=7", "chunking": "none"},
    "unchunked": {"chunking": "none"},
    "tokens=1": {"chunking": "tokens=1", "max_num_seqs": 16},
    "tokens=7": {"chunking": "tokens=7"},
    "tokens=16": {"chunking": "tokens=16"},
    "time=0.5": {"chunking": "time=0.5"},
    "narrow steps": {"max_num_batched_tokens": 272, "max_num_seqs": 16},
    "no prefix cache": {"enable_prefix_caching": False},
    "no overlap": {"overlap": False},
    "two threads": {"threads": min(2, os.cpu_count() or 1)},
    "shortest-prefill": {"admission": "shortest-prefill"},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_tokens_logprobs_and_logits_are_those_of_each_request_alone(settings: dict[str, Any]) -> None:
    """Logits bit for bit, hence log-probabilities as equal floats."""
    served = serve(CROWD, **settings)
    assert served.said() == alone().said()
    assert served.logits == alone().logits
    assert served.counters.preemptions == 0
    assert (served.counters.prefix_hit_tokens > 0) == settings.get("enable_prefix_caching", True)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"enable_prefix_caching": False},
        {"chunking": "tokens=40", "overlap": False},
        {"chunking": "none"},
        {"priority_preempts": True},
        {"batching": "static=5"},
    ],
    ids=["usual", "no prefix cache", "chunked, no overlap", "unchunked", "priority preempts", "static"],
)
def test_a_cache_so_small_that_they_preempt_each_other_changes_nothing(settings: dict[str, Any]) -> None:
    """CASES 17: all finish."""
    served = serve(CROWD, kv_memory=MemoryBlocks(TINY_CACHE), **settings)
    assert served.counters.preemptions > 10
    assert served.said() == alone().said()
    assert served.logits == alone().logits


def test_numpy_kernels_give_the_same_in_a_crowd_as_alone() -> None:
    """The engine itself, over kernels whose rounding may depend on a step's width: tokens, not bits."""
    few = [asked for asked in CROWD if len(asked.prompt) < 100 and asked.params.temperature == 0][:12]
    by_one = serve(few, alone=True, executor="reference")
    together = serve(few, executor="reference", kv_memory="24 blocks")
    assert together.counters.preemptions > 0
    assert {id_: tokens_of(output) for id_, output in together.outputs.items()} == {
        id_: tokens_of(output) for id_, output in by_one.outputs.items()
    }
    assert len(few) == 12


# --- seeds (CASES 29) ---------------------------------------------------------------------------------------------


def test_without_a_seed_two_answers_differ() -> None:
    with engine() as made:
        first, second = (answer(made, prompt_of(20), temperature=1.0, max_tokens=30) for _ in range(2))
        assert tokens_of(first) != tokens_of(second)


def test_choices_of_one_seed_differ_from_each_other_and_repeat() -> None:
    with engine() as made:
        first, second = (answer(made, prompt_of(20), temperature=1.0, max_tokens=30, n=3, seed=5) for _ in range(2))
        assert tokens_of(first) == tokens_of(second)
        assert len({tuple(tokens) for tokens in tokens_of(first)}) == 3


def test_the_first_choice_of_several_is_the_only_one_of_one() -> None:
    with engine() as made:
        one, three = (answer(made, prompt_of(20), temperature=1.0, n=n, seed=5) for n in (1, 3))
        assert tokens_of(one) == tokens_of(three)[:1]


# --- prefix cache (CASES 7, 11 to 14) -----------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 100, 256])
def test_a_full_hit_recomputes_the_last_token_and_answers_the_same(length: int) -> None:
    with engine() as made:
        miss, hit = (answer(made, prompt_of(length), logprobs=3) for _ in range(2))
        assert said(miss) == said(hit)
        assert (miss.cached_tokens, hit.cached_tokens) == (0, (length - 1) // 16 * 16)
        assert sum(chunk.tokens for chunk in hit.choices[0].timeline.chunks) == length - hit.cached_tokens
        assert made.scheduler.counters.prefix_queried_tokens in (0, 2 * length)


def test_an_answer_is_found_by_the_request_that_goes_on_from_it() -> None:
    with engine() as made:
        first = answer(made, prompt_of(20), max_tokens=40)
        [tokens] = tokens_of(first)
        second = answer(made, [*prompt_of(20), *tokens, 9])
        assert second.cached_tokens == 48  # of 61; the 60th token was sampled, never computed


@pytest.mark.parametrize("filled_by", ["tokens=16", "tokens=50", "none", "time=0.5"])
def test_caches_filled_by_other_chunks_are_found_alike(filled_by: str) -> None:
    with engine(chunking=filled_by) as made:
        answer(made, prompt_of(300), n=2)
        again = answer(made, [*prompt_of(300)[:200], *prompt_of(60, seed=8)])
        assert again.cached_tokens == 192
        with engine(enable_prefix_caching=False) as other:
            assert said(again) == said(answer(other, [*prompt_of(300)[:200], *prompt_of(60, seed=8)]))


def test_the_same_block_after_another_prefix_is_not_found() -> None:
    """Hashes cover the parent: a block's KV depends on all that is before it."""
    with engine() as made:
        answer(made, prompt_of(16, seed=1) + prompt_of(32))
        assert answer(made, prompt_of(16, seed=2) + prompt_of(32)).cached_tokens == 0
        assert answer(made, prompt_of(32)).cached_tokens == 0


def test_without_a_prefix_cache_nothing_is_found_and_the_count_is_there() -> None:
    with engine(enable_prefix_caching=False) as made:
        counts = [answer(made, prompt_of(100)).cached_tokens for _ in range(2)]
        assert counts == [0, 0]
        assert made.scheduler.counters.prefix_queried_tokens == 0


def test_engines_do_not_find_each_others_blocks_by_hash() -> None:
    """Roots are keyed with a secret of the engine, so that nobody can construct a collision."""
    with engine() as one, engine() as other:
        assert one._key != other._key


def test_salts_keep_what_is_found_apart() -> None:
    with engine() as made:
        cached = []
        for salt in ("a", "b", "a"):
            made.submit(prompt_of(100), SamplingParams(max_tokens=1), id=f"{len(cached)}", cache_salt=salt)
            cached.append(run(made)[f"{len(cached)}"].cached_tokens)
        assert cached == [0, 0, 96]


def test_a_short_cache_keeps_the_beginnings_of_what_came_last() -> None:
    """The end of a prefix is of no use without its beginning, so it is given up first."""
    with engine(kv_memory="32 blocks", max_model_len=400) as made:
        for seed in (1, 2, 3):
            answer(made, prompt_of(200, seed))
        assert answer(made, prompt_of(200, seed=3)).cached_tokens == 192
        assert 0 < answer(made, prompt_of(200, seed=1)).cached_tokens < 192
