"""Settings as a user writes them: what each becomes, and errors that name the value and what is allowed."""

import pytest

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
from twostep.settings import GATHER_NS, Settings


def test_the_defaults_cut_by_time_and_do_not_preempt_by_priority() -> None:
    config = Settings(blocks=(100,)).config()
    assert isinstance(config.chunking, TimeBudget)
    assert config.chunking.budget_ns == 50_000_000
    assert (config.batching, config.order, config.priority_preempts) == (Continuous(), by_priority, False)


@pytest.mark.parametrize(
    ("written", "field", "value"),
    [
        ({"chunking": "none"}, "chunking", Unchunked(1024)),
        ({"chunking": "tokens=512"}, "chunking", TokenBudget(512)),
        ({"batching": "static=8"}, "batching", Static(8, GATHER_NS)),
        ({"admission": "fcfs"}, "order", fcfs),
        ({"admission": "shortest-prefill"}, "order", ShortestPrefill(8192)),
    ],
)
def test_what_a_setting_becomes(written: dict[str, str], field: str, value: object) -> None:
    assert getattr(Settings((100,), **written).config(), field) == value  # type: ignore[arg-type]


def test_a_time_may_have_a_fraction() -> None:
    chunking = Settings((100,), chunking="time=12.5").config().chunking
    assert isinstance(chunking, TimeBudget)
    assert chunking.budget_ns == 12_500_000


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ({"chunking": "tokens=0"}, "chunking is 'tokens=0'; it has to be none, tokens=N or time=MILLISECONDS"),
        ({"chunking": "tokens=-5"}, "chunking is 'tokens=-5'; it has to be none"),
        ({"chunking": "time=0"}, "chunking is 'time=0'; it has to be none"),
        ({"chunking": "time=nan"}, "chunking is 'time=nan'; it has to be none"),
        ({"chunking": ""}, "chunking is ''; it has to be none"),
        ({"batching": "static"}, "batching is 'static'; it has to be continuous or static=SIZE"),
        ({"batching": "static=0"}, "batching is 'static=0'; it has to be continuous or static=SIZE"),
        ({"admission": "lifo"}, "admission is 'lifo'; it has to be fcfs, priority, shortest-prefill"),
        ({"step_tokens": 100}, "max_num_batched_tokens is 100; it has to be at least 320"),
        ({"seats": 0}, "max_num_seqs is 0"),
        ({"priority_preempts": True, "admission": "fcfs"}, "priority_preempts needs an order by priority"),
    ],
)
def test_a_bad_setting_is_refused_by_name(written: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Settings((100,), **written).config()  # type: ignore[arg-type]
