"""The simulator's benchmarks: kernel tables as a cost model, and the tables that are made of results."""

import gzip
from pathlib import Path

import pytest

from benchmarks import simulator_tables
from benchmarks.simulated_vllm import LAYER, LAYERS, ONCE, KernelTables, figures, published
from twostep.core.cost import StepShape, decode_shape


def written(path: Path, head: str, rows: list[tuple[object, ...]]) -> None:
    lines = [head, *(",".join(map(str, row)) for row in rows)]
    path.write_bytes(gzip.compress("\n".join(lines).encode()))


@pytest.fixture
def tables(tmp_path: Path) -> KernelTables:
    """Linear layers take 2 us a token, the head 5 us a sequence; attention 1 us for each 100 positions that a decode
    reads and 10 us for each token of a chunk."""
    dense = [(name, tokens, 2 * tokens) for name in {*LAYER, *ONCE} for tokens in (1, 100)]
    written(tmp_path / "dense.csv.gz", "layer,tokens,time_us", dense)
    written(tmp_path / "per_sequence.csv.gz", "layer,sequences,time_us", [("lm_head", n, 5 * n) for n in (1, 50)])
    attention = [
        (chunk, before, n, kv, 10 * chunk + n * kv / 100)
        for chunk in (0, 16, 64)
        for before in (0, 128)
        for n in (0, 1, 8)
        for kv in (0, 100, 1000)
        if (n > 0) == (kv > 0) and (chunk > 0 or (before == 0 and n > 0))
    ]
    head = "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us"
    written(tmp_path / "attention.csv.gz", head, attention)
    return KernelTables(tmp_path)


def expected_us(tokens: int, logit_rows: int, attention: float) -> float:
    return LAYERS * (len(LAYER) * 2 * tokens + attention) + len(ONCE) * 2 * tokens + 5 * logit_rows


def test_steps_are_the_sum_of_their_kernels(tables: KernelTables) -> None:
    decode = tables.estimate(decode_shape(4, 4 * 500)).expected_ns
    assert decode == pytest.approx(1e3 * expected_us(4, 4, 4 * 5), rel=1e-6)
    prompt = tables.estimate(StepShape().with_slice(64, 32, 1)).expected_ns
    assert prompt == pytest.approx(1e3 * expected_us(32, 1, 320), rel=1e-6)
    mixed = tables.estimate(decode_shape(4, 4 * 500).with_slice(0, 40, 0)).expected_ns
    assert mixed == pytest.approx(1e3 * expected_us(44, 4, 400 + 20), rel=1e-6)


def test_chunks_of_several_prompts_each_take_their_own_time(tables: KernelTables) -> None:
    two = tables.estimate(StepShape().with_slice(0, 32, 1).with_slice(0, 32, 1)).expected_ns
    assert two == pytest.approx(1e3 * expected_us(64, 2, 640), rel=1e-6)


def test_a_published_run_is_read_as_times_of_requests(tmp_path: Path) -> None:
    lines = [
        '{"input_toks": 7, "output_toks": 3, "queued_ts": 12.0, "first_token_ts": 13.0, "last_token_ts": 14.0}',
        '{"input_toks": 5, "output_toks": 1, "queued_ts": 10.0, "first_token_ts": 10.5, "last_token_ts": 10.5}',
    ]
    (tmp_path / "requests.jsonl").write_text("\n".join(lines))
    made, times = published(tmp_path)
    assert [(one.arrival_s, one.input_tokens, one.output_tokens) for one in made.requests] == [(0, 5, 1), (2, 7, 3)]
    found = figures(times)
    assert (found.ttft_mean, found.tpot_mean) == (0.75, 0.5)
    assert found.output_rate == pytest.approx(4 / 4)


def test_differences_with_a_measured_run_are_shown_with_their_sign() -> None:
    measured = dict.fromkeys(simulator_tables.LATENCIES, 0.2)
    simulated = measured | {"ttft_p50": 0.1, "request_rate": 0.22}
    machine = {"commit": "abc", "modified": False, "busy": 0.0, "flags": [], "cpu": "x", "cores": 2, "kernel": "6",
               "date": "2026-12-01T00:00:00"}  # fmt: skip
    one = {"workload": "rag", "share": 0.5, "rate": 1.0, "measured": measured, "simulated": simulated}
    shown = simulator_tables.here({"comparisons": [one], "machine": machine, "command": "c"})
    assert "| -50% | +0% | +0% | +0% | +0% | +10% |" in shown
