"""The least time of a step on a calibrated machine, against operations and bytes counted by hand."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from perf.test_step_work import LLAMA_2_7B, SEVEN, models, shape_of, slices
from support.calibrated import profile_for

from twostep.core.cost import LeastTimes, StepShape
from twostep.perf.machine_limits import MachineLimits
from twostep.perf.machine_profile import Identity, MachineProfile, Roofs
from twostep.perf.roofline_model import decode_shape_of, prefill_shape
from twostep.spec.model_spec import ModelSpec
from twostep.spec.number_types import NUMBER_TYPES

INT8, FP32, NEAR, FAR = 1e12, 2e11, 1e11, 2e10
READ = ((1 << 20, NEAR), (1 << 30, FAR))
PLACE = Identity("Any", "avx2", 2, "m", "f16", "0", "k")
MACHINE: MachineProfile = replace(profile_for(PLACE), roofs=Roofs(INT8, FP32, READ))


def test_a_decode_step_reads_weights_and_kv_once() -> None:
    """14 GB of weights and 2 MB of head, beyond the largest measured size; KV of 100 positions of 28 layers."""
    least = MachineLimits(SEVEN, MACHINE).least_ns(decode_shape_of(100, 1))
    kv_bytes = 100 * 2 * 28 * 5000 * 2
    assert least.bandwidth == pytest.approx(1e9 * (14e9 + 5000 * 2 + kv_bytes) / FAR, rel=1e-9)


def test_quantised_layers_count_against_the_integer_peak_and_attention_against_the_other() -> None:
    four_bits = replace(SEVEN, weight_type=NUMBER_TYPES["q4_1"])
    shape, pairs = prefill_shape(350), 350 * 351 / 2
    attention_s = 28 * 50 * pairs * (4 * 100 + 3) / FP32
    for model, peak in ((four_bits, INT8), (replace(SEVEN, weight_type=NUMBER_TYPES["fp32"]), FP32)):
        least = MachineLimits(model, MACHINE).least_ns(shape)
        assert least.arithmetic == pytest.approx(1e9 * (2 * (7e9 * 350 + 5000) / peak + attention_s), rel=1e-6)


def test_a_small_working_set_is_read_from_a_cache() -> None:
    """Half a megabyte lies below the smallest measured size."""
    tiny = replace(LLAMA_2_7B.shape, layers=1, width=16, heads=1, kv_heads=1, head_dim=16, ffn_width=16, vocab=1000)
    model = ModelSpec("tiny", tiny)
    weight_bytes = 2 * (4 * 16 * 16 + 3 * 16 * 16 + 16 * 1000)
    least = MachineLimits(model, MACHINE).least_ns(StepShape().with_slice(0, 1, 1))
    assert least.bandwidth == int(1e9 * (weight_bytes + 2 * 16 * 2) / NEAR)


@given(models(), slices, st.integers(0, 3000))
def test_more_work_never_takes_less(model: ModelSpec, parts: list[tuple[int, int, int]], start: int) -> None:
    limits, shape = MachineLimits(model, MACHINE), shape_of(parts)
    assert limits.least_ns(StepShape()) == LeastTimes()
    less, more = limits.least_ns(shape), limits.least_ns(shape.with_slice(start, 5, 1))
    assert less.arithmetic <= more.arithmetic
    assert less.bandwidth <= more.bandwidth
