"""The roofline cost model: check values of docs/facts.md, ridge points, and what schedulers rely on."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from perf.test_step_work import LLAMA_2_7B, SEVEN, models, shape_of, slices

from twostep.core.cost import StepShape, largest_slice
from twostep.errors import InvalidParameterError
from twostep.perf.hardware import Hardware, hardware_named, shipped_hardware
from twostep.perf.model_table import model_named
from twostep.perf.roofline import Question, Roofline
from twostep.perf.roofline_model import (
    PEAKS,
    RooflineModel,
    decode_shape_of,
    efficiency_of,
    prefill_shape,
    typical_efficiency,
)
from twostep.spec.model_spec import ModelSpec
from twostep.spec.number_types import number_type

T4 = replace(hardware_named("t4"), bandwidth=300e9)
"""The datasheet says 300 to 320 GB/s; the literature, and docs/facts.md with it, takes 300."""
A10, A10G, A100, H100 = (hardware_named(name) for name in ("a10", "a10g", "a100", "h100"))
ANY = Hardware("any", "Any", 1e12, 1e12, dict.fromkeys(("fp32", "fp16", "fp8", "int8", "fp4"), 1e14), 1e11, 300)


def kind_s(model: ModelSpec, hardware: Hardware, shape: StepShape, *names: str) -> float:
    """Seconds at the peaks of the kinds of work with these names."""
    times = RooflineModel(model, hardware, PEAKS).times(shape)
    return sum(kind.seconds for kind in times if kind.name in names)


# --- docs/facts.md ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "shown"), [(350, "39.2"), (4096, "459")])
def test_linear_layers_of_a_prompt_on_an_a10(tokens: int, shown: str) -> None:
    seconds = kind_s(SEVEN, A10, prefill_shape(tokens), "projections", "feed-forward")
    assert f"{1e3 * seconds:.3g}" == shown


@pytest.mark.parametrize(("hardware", "shown"), [(T4, "46.7"), (A10, "23.3"), (A100, "6.87")])
def test_a_decode_step_reads_all_weights_once(hardware: Hardware, shown: str) -> None:
    seconds = kind_s(SEVEN, hardware, decode_shape_of(1, 1), "projections", "feed-forward")
    assert f"{1e3 * seconds:.3g}" == shown


@pytest.mark.parametrize(("hardware", "shown"), [(A10, "208"), (A10G, "117"), (A100, "153")])
def test_ridge_points(hardware: Hardware, shown: str) -> None:
    assert f"{hardware.ridge('fp16'):.3g}" == shown


@pytest.mark.parametrize(("hardware", "shown"), [(T4, 7.03), (A10, 3.52), (A100, 1.04)])
def test_150_tokens_take_one_prefill_and_149_decode_steps(hardware: Hardware, shown: float) -> None:
    """The literature counts linear layers alone; attention, activations and norms add up to 6 %."""
    ideal = RooflineModel(SEVEN, hardware, PEAKS)
    ttft, itl, whole = ideal.generation_s(350, 150)
    assert whole == pytest.approx(ttft + 149 * itl)
    assert shown < whole < 1.06 * shown


# --- what every model keeps -------------------------------------------------------------------------------------------


@given(models(), slices, st.integers(0, 3000), st.integers(1, 300), st.sampled_from([1, 2]))
def test_a_step_never_gets_cheaper_when_a_slice_grows(
    model: ModelSpec, parts: list[tuple[int, int, int]], start: int, tokens: int, devices: int
) -> None:
    """With a window, a decode that becomes a chunk is left out: the positions of all decodes are bounded together, so
    that one beyond its window counts wholly where the others are within theirs."""
    devices = devices if model.shape.heads % devices == 0 else 1
    windowed = any(window is not None for window in model.layer_windows)
    counts = (1, 2, 1 + tokens, 2 + tokens)[windowed:]
    for share in (PEAKS, typical_efficiency("fp16")):
        cost, load = RooflineModel(model, ANY, share, tensor_parallel=devices), shape_of(parts)
        bounds = [cost.estimate(load.with_slice(start, count, 1)).bound_ns for count in counts]
        assert all(more >= less - 1 for less, more in pairwise(bounds))


@given(models(), slices)
def test_terms_add_up_and_the_bound_is_no_less(model: ModelSpec, parts: list[tuple[int, int, int]]) -> None:
    cost = RooflineModel(model, ANY).estimate(shape_of(parts))
    assert sum(cost.terms) == pytest.approx(cost.expected_ns, abs=1)
    assert cost.bound_ns >= cost.expected_ns


@given(models(), slices)
def test_real_kernels_are_never_faster_than_the_peaks(model: ModelSpec, parts: list[tuple[int, int, int]]) -> None:
    real = RooflineModel(model, ANY)
    shape = shape_of(parts)
    assert real.with_efficiency(PEAKS).estimate(shape).expected_ns <= real.estimate(shape).expected_ns


@given(models(), slices)
def test_each_kind_takes_the_larger_roof(model: ModelSpec, parts: list[tuple[int, int, int]]) -> None:
    """Against the formula written out: operations / peak or bytes / bandwidth, whichever is longer."""
    for kind in RooflineModel(model, ANY, PEAKS).times(shape_of(parts)):
        assert kind.seconds == max(kind.work.operations / 1e14, kind.work.bytes / 1e12)


def test_a_time_budget_is_used_up() -> None:
    cost = RooflineModel(LLAMA_2_7B, A10)
    load = decode_shape_of(500, 4)
    budget = 60_000_000
    fits = largest_slice(cost, load, 0, 4096, budget)
    assert 0 < fits < 4096
    assert cost.estimate(load.with_slice(0, fits, 1)).bound_ns <= budget
    assert cost.estimate(load.with_slice(0, fits + 1, 1)).bound_ns > budget


def test_observing_changes_nothing() -> None:
    cost, shape = RooflineModel(LLAMA_2_7B, A10), prefill_shape(100)
    before = cost.estimate(shape)
    cost.observe(shape, 1)
    assert cost.estimate(shape) == before


# --- devices ----------------------------------------------------------------------------------------------------------


def test_devices_divide_work_and_meet_in_an_all_reduce() -> None:
    shape = decode_shape_of(1000, 8)
    one, four = (RooflineModel(LLAMA_2_7B, H100, PEAKS, tensor_parallel=n).times(shape) for n in (1, 4))
    times = {kind.name: (kind, other) for kind, other in zip(one, four, strict=True)}
    for name in ("projections", "feed-forward", "decode attention", "logits"):
        alone, shared = times[name]
        assert shared.seconds == pytest.approx(alone.seconds / 4)
    reduced = times["all-reduce"][1]
    sent = 2 * 3 / 4 * 8 * 4096 * 2  # a ring sends 2·(n-1)/n of eight rows of fp16
    assert reduced.seconds == pytest.approx(2 * 32 * sent / 450e9)
    assert times["all-reduce"][0].seconds == 0


def test_more_devices_than_kv_heads_keep_copies_of_the_kv() -> None:
    model = model_named("qwen3-235b-a22b")  # 4 KV heads, 64 heads
    four, eight = (RooflineModel(model, H100, PEAKS, tensor_parallel=n).times(decode_shape_of(9, 1)) for n in (4, 8))
    kv = [next(kind.work.kv_bytes for kind in times if kind.name == "decode attention") for times in (four, eight)]
    assert kv[0] == kv[1] > 0


@pytest.mark.parametrize("devices", [0, 5, 33])
def test_devices_have_to_divide_the_heads(devices: int) -> None:
    with pytest.raises(InvalidParameterError, match="possible: 1, 2, 4, 8, 16, 32"):
        RooflineModel(LLAMA_2_7B, H100, tensor_parallel=devices)


def test_devices_without_a_link_cannot_share_layers() -> None:
    with pytest.raises(InvalidParameterError, match="no link between devices is known for m4"):
        RooflineModel(LLAMA_2_7B, hardware_named("m4"), tensor_parallel=2)


# --- arithmetic and efficiency ----------------------------------------------------------------------------------------


def test_fp8_needs_hardware_that_has_it() -> None:
    fp8 = LLAMA_2_7B.with_types(weights=number_type("fp8"))
    assert RooflineModel(fp8, H100).arithmetic == "fp8"
    with pytest.raises(InvalidParameterError, match=r"A10.*has no FP8.*it has FP16, INT8"):
        RooflineModel(fp8, A10)
    assert RooflineModel(fp8, A10, arithmetic="fp16").arithmetic == "fp16"


def test_stored_4_bit_weights_are_widened() -> None:
    int4 = LLAMA_2_7B.with_types(weights=number_type("int4"))
    assert RooflineModel(int4, A10).arithmetic == "fp16"
    only_integers = replace(ANY, peaks={"int8": 1e13, "fp32": 1e12})
    assert RooflineModel(int4, only_integers).arithmetic == "int8"


def test_weights_are_not_narrowed() -> None:
    with pytest.raises(InvalidParameterError, match="fp16 weights are wider"):
        RooflineModel(LLAMA_2_7B, A10, arithmetic="int8")
    with pytest.raises(InvalidParameterError, match="known: fp32, fp16, fp8, int8, fp4"):
        RooflineModel(LLAMA_2_7B, A10, arithmetic="fp3")


def test_efficiency_says_whether_this_device_was_measured() -> None:
    assert efficiency_of(A100, "fp16").origin == "measured"
    assert efficiency_of(A10, "fp16").origin == "datasheet"
    assert efficiency_of(A10, "int8").origin == "datasheet"
    assert efficiency_of(replace(A10, measured=True), "fp16") == PEAKS._replace(origin="measured")


def test_typical_efficiency_leaves_out_the_device_that_it_is_to_predict() -> None:
    shares = {typical_efficiency("fp4", without=device) for device in ("b200", "gb200", "rtxpro6000", None)}
    assert len(shares) == 4


def test_shares_are_shares() -> None:
    for hardware in shipped_hardware().values():
        for arithmetic in hardware.peaks:
            share = efficiency_of(hardware, arithmetic)
            assert all(0 < part <= 1 for part in share[:5])
            assert min(share.kernel_s, share.attention_kernel_s, share.step_s, share.margin) >= 0
            assert share.prefill_kv <= share.decode_attention


# --- the answer -------------------------------------------------------------------------------------------------------


def test_an_answer_is_the_sum_of_its_parts() -> None:
    answer = Roofline(LLAMA_2_7B, A10, Question(350, 150, 4))
    times = answer.times(answer.expected)
    assert times.e2e_s == pytest.approx(times.ttft_s + 149 * times.itl_s)
    assert times.ttft_s == pytest.approx(answer.prefill.expected_s, rel=1e-6)
    assert answer.output_rate == pytest.approx(600 / times.e2e_s)
    assert answer.joules_per_token == pytest.approx(150 * times.e2e_s / 600)
    assert answer.crossing_batch == 208
    assert answer.json()["sequences_that_fit"] == answer.sequences == 40


def test_one_output_token_needs_no_decode_step() -> None:
    answer = Roofline(LLAMA_2_7B, A10, Question(350, 1))
    times = answer.times(answer.expected)
    assert times.e2e_s == times.ttft_s


def test_an_answer_longer_than_the_context_is_refused() -> None:
    with pytest.raises(InvalidParameterError, match=r"4000 \+ 150 tokens"):
        Roofline(LLAMA_2_7B, A10, Question(4000, 150))
