"""Settings as typed values: what each text becomes and back, keywords of Python, what a recording's header keeps."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostep.config.configs import EngineConfig, SchedulerSettings
from twostep.config.settings import BY_NAME, ENGINE_PARTS, of_parts
from twostep.config.values import (
    GATHER_NS,
    AdmissionOrder,
    MemoryBlocks,
    MemoryBytes,
    MemoryShare,
    parse_batching,
    parse_chunking,
    parse_kv_memory,
    text_of,
)
from twostep.core.policies import (
    Continuous,
    ShortestPrefill,
    Static,
    TimeBudget,
    TokenBudget,
    Unchunked,
    by_priority,
    fcfs,
)
from twostep.errors import InvalidParameterError

# --- values and their texts ---------------------------------------------------------------------------------------

POLICIES = [
    ("chunking", "none", Unchunked()),
    ("chunking", "tokens=512", TokenBudget(512)),
    ("chunking", "time=12.5", TimeBudget(12_500_000)),
    ("chunking", "time=0.001", TimeBudget(1000)),
    ("batching", "continuous", Continuous()),
    ("batching", "static=8", Static(8, GATHER_NS)),
    ("batching", "static=8,wait=0", Static(8)),
    ("batching", "static=8,wait=2.5", Static(8, 2_500_000)),
    ("admission", "fcfs", AdmissionOrder.FCFS),
    ("kv_memory", "0.5", MemoryShare(0.5)),
    ("kv_memory", "1", MemoryShare(1.0)),
    ("kv_memory", "2GiB", MemoryBytes(2 << 30)),
    ("kv_memory", "1500MB", MemoryBytes(1_500_000_000)),
    ("kv_memory", "300 blocks", MemoryBlocks(300)),
]


@pytest.mark.parametrize(("name", "text", "value"), POLICIES)
def test_a_keyword_may_be_the_typed_value_or_its_text(name: str, text: str, value: object) -> None:
    by_text, by_value = EngineConfig(**{name: text}), EngineConfig(**{name: value})
    assert by_text == by_value
    assert getattr(by_text, name) == value
    assert BY_NAME[name].show(value) == text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (".25", MemoryShare(0.25)),
        ("0.000000001", MemoryShare(1e-9)),
        ("1.5 GB", MemoryBytes(1_500_000_000)),
        ("3000000B", MemoryBytes(3_000_000)),
        ("7blocks", MemoryBlocks(7)),
    ],
)
def test_other_ways_to_write_memory(text: str, value: object) -> None:
    assert parse_kv_memory(text) == value


@given(st.integers(1000, 86_400_000 * 10**6), st.integers(1, 10**9), st.booleans())
def test_every_text_reads_back(ns: int, count: int, by_share: bool) -> None:
    assert parse_chunking(text_of(TimeBudget(ns))) == TimeBudget(ns)
    assert parse_chunking(text_of(TokenBudget(count))) == TokenBudget(count)
    assert parse_batching(text_of(Static(count, ns))) == Static(count, ns)
    memory = MemoryShare(count / 10**9) if by_share else MemoryBytes(count)
    assert parse_kv_memory(text_of(memory)) == memory


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("chunking", Unchunked(300)),
        ("chunking", TimeBudget(10**6, ceiling_ns=5)),
        ("chunking", TokenBudget(0)),
        ("chunking", TokenBudget(64, least_tokens=1)),
        ("chunking", "time=0.0001"),
        ("chunking", "time=1e3"),
        ("chunking", b"none"),
        ("batching", Static(0)),
        ("batching", "static=4,wait=-1"),
        ("admission", fcfs),
        ("kv_memory", MemoryShare(2)),
        ("kv_memory", MemoryShare(-0.1)),
        ("kv_memory", MemoryShare(float("inf"))),
        ("kv_memory", MemoryShare(float("nan"))),
        ("kv_memory", MemoryBytes(0)),
        ("kv_memory", MemoryBlocks(-1)),
        ("kv_memory", True),
        ("kv_memory", 0),
        ("kv_memory", 1.5),
        ("kv_memory", "1.5 blocks"),
        ("kv_memory", "9" * 400 + "B"),
    ],
)
def test_a_typed_value_that_no_text_stands_for_is_refused(name: str, value: object) -> None:
    """What could not be written into a recording or a file could not be repeated."""
    with pytest.raises(InvalidParameterError, match=f"^{name} is .*; it has to be ") as caught:
        EngineConfig(**{name: value})
    assert caught.value.param == name


# --- keywords -----------------------------------------------------------------------------------------------------


def test_defaults_are_those_of_the_table() -> None:
    config = EngineConfig()
    assert {row.name: getattr(config, row.name) for row in of_parts(*ENGINE_PARTS)} == {
        row.name: row.default for row in of_parts(*ENGINE_PARTS)
    }
    scheduler = SchedulerSettings((100,))
    for row in of_parts("scheduler"):
        assert getattr(scheduler, row.name) == (8192 if row.name == "max_model_len" else row.default)


def test_a_preset_is_a_keyword() -> None:
    batch = EngineConfig(preset="batch", max_num_seqs=5)
    assert (batch.max_num_seqs, batch.chunking, batch.max_num_batched_tokens) == (5, TokenBudget(1024), 1024)
    with pytest.raises(InvalidParameterError, match=r"^preset is 'fast'; it has to be chat, rag or batch$"):
        EngineConfig(preset="fast")


def test_an_itl_budget_is_a_keyword() -> None:
    assert EngineConfig(itl_budget=20).chunking == TimeBudget(20_000_000)
    assert EngineConfig(itl_budget=None).chunking == EngineConfig().chunking
    with pytest.raises(InvalidParameterError, match=r"^itl_budget and chunking set the same thing"):
        EngineConfig(itl_budget=20, chunking="none")


def test_keywords_move_defaults_as_flags_do() -> None:
    assert EngineConfig(max_num_batched_tokens=272).max_num_seqs == 16
    assert EngineConfig(max_num_seqs=1000).max_num_batched_tokens == 1256
    assert EngineConfig(chunking="none").max_num_batched_tokens is None


@pytest.mark.parametrize(
    ("keyword", "hint"),
    [
        ("max_seqs", "did you mean max_num_seqs"),
        ("kv_bytes", "did you mean kv_memory?"),
        ("kv_blocks", "did you mean kv_memory?"),
        ("max_step_tokens", "did you mean max_num_batched_tokens?"),
        ("gpu", "settings are preset, max_num_seqs, "),
    ],
)
def test_an_unknown_keyword_is_refused_with_the_nearest(keyword: str, hint: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        EngineConfig(**{keyword: 1})
    assert str(caught.value).startswith(f"'{keyword}' is not a setting; {hint}")


@pytest.mark.parametrize("name", ["overlap", "chunking", "max_num_seqs", "kv_memory", "block_size"])
def test_none_is_refused_where_nothing_is_decided_later(name: str) -> None:
    with pytest.raises(InvalidParameterError, match=f"^{name} is None; it has to be "):
        EngineConfig(**{name: None})


# --- the scheduler's ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "field", "value"),
    [
        ({"chunking": "none"}, "chunking", Unchunked(1024)),
        ({"chunking": "tokens=512"}, "chunking", TokenBudget(512)),
        ({"batching": "static=8"}, "batching", Static(8, GATHER_NS)),
        ({"admission": "fcfs"}, "order", fcfs),
        ({"admission": "priority"}, "order", by_priority),
        ({"admission": "shortest-prefill"}, "order", ShortestPrefill(8192)),
    ],
)
def test_what_a_setting_becomes(written: dict[str, Any], field: str, value: object) -> None:
    assert getattr(SchedulerSettings((100,), **written).config(), field) == value


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ({"max_num_batched_tokens": 100}, "max_num_batched_tokens is 100; it has to be at least 320"),
        ({"priority_preempts": True, "admission": "fcfs"}, "priority_preempts needs an order by priority"),
    ],
)
def test_a_contradiction_is_refused_by_the_scheduler_too(written: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SchedulerSettings((100,), **written).config()


def test_a_setting_of_another_part_is_not_the_scheduler_s() -> None:
    with pytest.raises(InvalidParameterError, match=r"^'threads' is not a setting; "):
        SchedulerSettings((100,), threads=2)
