"""Validation against published measurements: rows are read as they were meant, errors are what they are called, the fit
finds what made its kernels, and what the pages say of the results is true of them."""

import random
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from benchmarks import results, two_phases, validation, validation_tables
from benchmarks.validation import Kernel, errors, predicted
from twostep.perf.hardware import hardware_named
from twostep.perf.roofline_model import Efficiency
from twostep.perf.step_work import Work

DATA = Path(__file__).parent.parent / "data" / "published"
"""Excerpts of the tables, see `SOURCES.md` beside it."""


def all_kernels() -> list[Kernel]:
    return [*validation.gemms(DATA), *validation.attentions(DATA), *validation.rtx4090_kernels(DATA)]


# --- reading ----------------------------------------------------------------------------------------------------------


def test_a_published_product_is_read_with_its_work() -> None:
    """The A100 multiplies 4096 x 4096 by 4096 rows at 90 % of its peak or less."""
    found = [one for one in validation.gemms(DATA) if one.hardware == "a100-80-sxm"]
    largest = max(found, key=lambda one: one.work.operations)
    rate = largest.work.operations / largest.seconds
    assert 0.6 * 312e12 < rate < 312e12
    assert largest.arithmetic == "fp16"
    assert {one.arithmetic for one in validation.gemms(DATA)} == {"fp16", "fp8"}


def test_no_kernel_is_faster_than_its_device() -> None:
    """A wrong unit, a doubled size or a missing factor would show here. Consumer cards may exceed their nominal clock,
    and small work is read from caches."""
    for one in all_kernels():
        hardware = hardware_named(one.hardware)
        assert one.work.operations / one.seconds < 1.02 * hardware.peak(one.arithmetic)
        if one.work.bytes > 200e6:
            assert one.work.bytes / one.seconds < hardware.bandwidth


def test_halves_are_the_same_for_every_device() -> None:
    sides: dict[tuple[str, str, Work], set[bool]] = {}
    for one in validation.gemms(DATA):
        sides.setdefault((one.kind, one.arithmetic, one.work), set()).add(one.fitted)
    assert {len(side) for side in sides.values()} == {1}
    assert 0.2 < sum(one.fitted for one in all_kernels()) / len(all_kernels()) < 0.8


def test_decode_seconds_of_a_run_are_steps_of_its_running_requests() -> None:
    ticks = validation.decode_ticks(DATA / "llmservingsim/vllm_runs/RTX4090__Llama-3.1-8B")
    assert len(ticks) > 5
    for tick in ticks:
        assert 0.014 < tick.step_s < 0.06  # 16 GB at 1008 GB/s take 16 ms
        assert 1 <= tick.running <= 50
        assert 500 < tick.context < 3000


# --- errors -----------------------------------------------------------------------------------------------------------


def test_errors_are_relative_and_the_bias_has_a_sign() -> None:
    found = errors("t", "d", "o", [(0.9, 1.0), (1.8, 2.0), (1.3, 1.0)], 0.1)
    assert (found.rows, round(found.median, 6), round(found.bias, 6)) == (3, 0.1, -0.1)
    assert found.p95 == pytest.approx(0.1 + 0.9 * 0.2)


def test_every_table_of_the_excerpts_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    found = validation.validate(DATA, all_kernels())
    titles = {one.table for one in found.errors}
    assert {"GEMM, fp16", "GEMM, fp8", "prefill attention, fp16", "decode attention, fp16"} <= titles
    assert {"prompt time, Splitwise", "token time, Splitwise", "first token, TensorRT-LLM"} <= titles
    assert all(one.rows > 0 and 0 <= one.median <= one.p95 for one in found.errors)
    for one in found.errors:
        if one.table.startswith("GEMM"):
            assert one.median < 0.3


def test_a_constant_per_step_explains_the_old_software(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [one for one in validation.splitwise_errors(DATA) if one.table.startswith("token time")]
    bare = {one.hardware: one.median for one in found if one.predicted_from == "measured"}
    fixed = {one.hardware: one.median for one in found if one.predicted_from.startswith("measured +")}
    assert all(fixed[device] < 0.3 * bare[device] for device in bare)


# --- fit --------------------------------------------------------------------------------------------------------------


def made(share: Efficiency, noise: float) -> list[Kernel]:
    """Kernels of an A10 that follow the model exactly, up to noise."""
    rng, hardware = random.Random(1), hardware_named("a10")
    kinds = ("GEMM", "prefill attention", "decode attention")
    found = []
    for kind, operations, traffic in product(kinds, (1e7, 1e9, 1e11, 1e13), (1e4, 1e6, 1e8, 1e9)):
        if kind == "decode attention":
            operations = traffic
        one = Kernel("a10", "fp16", kind, Work(operations, traffic), 1.0, fitted=True)
        seconds = predicted(one, hardware, share) * (1 + rng.uniform(-noise, noise))
        found += [replace(one, seconds=seconds), replace(one, seconds=seconds, fitted=False)]
    return found


@pytest.mark.parametrize(("noise", "tolerance"), [(0.0, 0.03), (0.1, 0.12)])
def test_the_fit_finds_the_shares_that_made_its_kernels(noise: float, tolerance: float) -> None:
    true = Efficiency(0.6, 0.75, 0.35, 0.5, 0.85, 4e-6, 9e-6)
    [row] = validation.fitted(made(true, noise))
    for field in ("linear", "bandwidth", "prefill_attention", "prefill_kv", "decode_attention", "kernel_s"):
        assert float(row[field]) == pytest.approx(getattr(true, field), rel=tolerance), field
    assert float(row["margin"]) <= noise + tolerance


# --- what the pages say -----------------------------------------------------------------------------------------------


def committed(table: str, device: str, origin: str) -> dict[str, float]:
    [result] = results.read("validation")
    [found] = [one for one in result["errors"]
               if (one["table"], one["hardware"], one["predicted_from"]) == (table, device, origin)]  # fmt: skip
    return found  # type: ignore[no-any-return]


def test_rtx_4090_steps_meet_their_target_from_kernels_and_from_the_datasheet() -> None:
    name = "whole decode steps of llama-3.1-8b, vLLM"
    assert committed(name, "rtx4090", "its kernel tables, interpolated")["median"] <= 0.1
    assert committed(name, "rtx4090", "measured")["median"] <= 0.1
    assert committed(name, "rtx4090", "datasheet")["median"] <= 0.3


def test_the_misses_that_the_page_explains_are_those_of_the_results() -> None:
    [result] = results.read("validation")
    missed = {one["table"] for one in result["errors"] if one["target"] and one["median"] > one["target"]}
    assert {name.partition(",")[0] for name in missed} == {
        "whole decode steps of qwen3-30b-a3b", "prompt time", "token time", "prefill attention", "decode attention",
    }  # fmt: skip
    assert validation_tables.steps(result).count("**missed**") == 6
    for device in ("a100-80-sxm", "h100-sxm"):
        assert 0.3 < committed("token time, Splitwise", device, "measured")["median"] < 0.45
        assert committed("token time, Splitwise", device, "measured + a constant per step")["median"] < 0.035
        assert -0.2 < committed("linear layers of one layer, Vidur", device, "measured")["bias"] < -0.13


def test_what_the_guide_says_of_its_tables_is_in_them() -> None:
    one = two_phases.answer("llama-2-7b", "a10", two_phases.Question(350, 150))
    assert one.prefill.operations / one.decode.operations == pytest.approx(340, rel=0.01)
    assert one.decode.expected_s == pytest.approx(one.prefill.expected_s / 2, rel=0.1)
    assert (one.sequences, one.crossing_batch) == (40, 208)
    long = two_phases.answer("llama-3.1-8b", "a100", two_phases.Question(65536, 1)).prefill
    attention = next(row.expected.seconds for row in long.rows if row.ideal.name == "prefill attention")
    assert attention / long.expected_s == pytest.approx(2 / 3, abs=0.03)
