"""Operations and bytes of a step: the check values of docs/facts.md, and what must hold for every model and shape."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostep.core.cost import StepShape
from twostep.perf.roofline_model import decode_shape_of, prefill_shape
from twostep.perf.step_work import StepWork, Work, attention_operations, step_work, total
from twostep.spec.kv_layout import KvLayout
from twostep.spec.memory import (
    MemoryDemand,
    kv_bytes_per_token,
    sequence_kv_bytes,
    sequences_that_fit,
    weights_bytes,
)
from twostep.spec.model_spec import Experts, ModelSpec
from twostep.spec.number_types import KV_TYPES, NUMBER_TYPES, number_type
from twostep.spec.shape import ModelShape

LLAMA_2_7B = ModelSpec("Llama-2-7B", ModelShape("llama", 32, 4096, 32, 32, 128, 11008, 32000, 4096))
LLAMA_3_8B = ModelSpec("Llama-3-8B", ModelShape("llama", 32, 4096, 32, 8, 128, 14336, 128256, 8192))
LLAMA_3_70B = ModelSpec("Llama-3-70B", ModelShape("llama", 80, 8192, 64, 8, 128, 28672, 128256, 8192))
SEVEN = ModelSpec("7·10⁹ parameters in linear layers", ModelShape("llama", 28, 5000, 50, 50, 100, 10000, 1, 1 << 20))
MIXTRAL = ModelSpec(
    "8x7B", ModelShape("mixtral", 32, 4096, 32, 8, 128, 14336, 32000, 32768), experts=Experts(8, 2, 14336)
)


# --- docs/facts.md ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "expected"), [(LLAMA_2_7B, 524288), (LLAMA_3_8B, 128 * 1024), (LLAMA_3_70B, 320 * 1024)]
)
def test_kv_bytes_per_token(model: ModelSpec, expected: int) -> None:
    assert kv_bytes_per_token(model) == expected


def test_four_sequences_of_4096_tokens_fit_beside_14_gb() -> None:
    assert sequence_kv_bytes(LLAMA_2_7B, 4096) == 2 << 30
    assert weights_bytes(SEVEN) == pytest.approx(14e9, rel=1e-5)
    assert (24e9 - 14e9) // sequence_kv_bytes(LLAMA_2_7B, 4096) == 4 == sequences_that_fit(LLAMA_2_7B, 24e9, 4096)


def test_linear_layers_do_two_operations_a_parameter_and_token() -> None:
    assert SEVEN.linear_parameters == 7_000_000_000
    assert step_work(SEVEN, prefill_shape(350)).linear.operations == 2 * 7e9 * 350
    assert step_work(SEVEN, decode_shape_of(100, 1)).linear.weight_bytes == 14e9


def test_attention_of_one_head_is_8_64e9_operations() -> None:
    head = attention_operations(128, 4096**2)
    assert head == 4 * 128 * 4096**2 + 3 * 4096**2
    assert f"{head:.2e} {32 * head:.2e} {32 * 32 * head:.2e}" == "8.64e+09 2.76e+11 8.85e+12"
    assert f"{head / (8 * 4096**2 + 8 * 4096 * 128):.1f}" == "62.4"


def test_causal_attention_does_half_of_it() -> None:
    whole = 32 * 32 * attention_operations(128, 4096**2)
    assert step_work(LLAMA_2_7B, prefill_shape(4096)).prefill_attention.operations == pytest.approx(whole / 2, rel=3e-4)


@pytest.mark.parametrize(("weights", "operations_per_byte"), [("fp16", 1), ("int8", 2), ("int4", 4)])
def test_intensity_of_linear_layers_in_decode_is_the_batch_times_2_over_the_bytes(
    weights: str, operations_per_byte: int
) -> None:
    model = LLAMA_2_7B.with_types(weights=number_type(weights))
    for batch in (1, 8, 32):
        linear = step_work(model, decode_shape_of(100, batch)).linear
        assert linear.operations / linear.weight_bytes == pytest.approx(batch * operations_per_byte, rel=0.04)


def test_intensity_of_decode_attention_is_heads_over_kv_heads_whatever_the_batch() -> None:
    for model, group in ((LLAMA_2_7B, 1), (LLAMA_3_8B, 4), (LLAMA_3_70B, 8)):
        for batch in (1, 64):
            work = step_work(model, decode_shape_of(2000, batch)).decode_attention
            assert work.operations / work.kv_bytes == pytest.approx(group, rel=0.01)


# --- every model, every shape -----------------------------------------------------------------------------------------


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    group, kv_heads = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    layers = draw(st.integers(1, 6))
    windows = draw(st.sampled_from([(), (None,) * layers, (7,) * layers, (7, None, 300, 1, None, 64)[:layers]]))
    routed = draw(st.integers(1, 16))
    experts = st.builds(Experts, st.just(routed), st.integers(1, routed), st.integers(1, 500), st.integers(0, 2))
    width, head_dim, ffn_width = draw(st.integers(1, 500)), 16 * draw(st.integers(1, 8)), draw(st.integers(1, 900))
    vocab = draw(st.integers(1, 5000))
    shape = ModelShape("x", layers, width, group * kv_heads, kv_heads, head_dim, ffn_width, vocab, 4096)
    kv = st.sampled_from([NUMBER_TYPES[name] for name in KV_TYPES])
    return ModelSpec("any", shape, windows, draw(st.none() | experts), draw(st.booleans()), draw(st.booleans()),
                     draw(st.sampled_from(list(NUMBER_TYPES.values()))), kv_type=draw(kv))  # fmt: skip


slices = st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 700), st.integers(0, 1)), max_size=6)


def shape_of(parts: list[tuple[int, int, int]]) -> StepShape:
    shape = StepShape()
    for part in parts:
        shape = shape.with_slice(*part)
    return shape


def amounts(work: StepWork) -> list[float]:
    """Every operation and byte that must not decrease as a step grows, in which a decode may become a chunk."""
    attention = total((work.prefill_attention, work.decode_attention))
    parts = (work.projections, work.feed_forward, work.elementwise, attention, work.logits, work.fixed)
    return [amount for part in parts for amount in part]


@given(models(), slices, st.integers(0, 3000), st.integers(1, 300))
def test_no_amount_decreases_as_a_slice_grows(
    model: ModelSpec, parts: list[tuple[int, int, int]], start: int, tokens: int
) -> None:
    """With a window, a decode that becomes a chunk may take its part of the sum over all decodes with it: a step shape
    has sums only, so there the two kinds are compared apart."""
    load = shape_of(parts)
    decode, *chunks = [load.with_slice(start, count, 1) for count in (1, 2, 1 + tokens, 2 + tokens)]
    chains = [[load, decode], [load, *chunks]]
    if not any(model.layer_windows):
        chains.append([decode, *chunks])
    for chain in chains:
        for less, more in pairwise(amounts(step_work(model, shape)) for shape in chain):
            assert all(b >= a * (1 - 1e-12) for a, b in zip(less, more, strict=True))


@given(models(), st.integers(1, 2000), st.integers(1, 40))
def test_no_amount_decreases_with_the_context(model: ModelSpec, context: int, batch: int) -> None:
    less, more = (amounts(step_work(model, decode_shape_of(seen, batch))) for seen in (context, context + 1))
    assert all(b >= a for a, b in zip(less, more, strict=True))


@given(models())
def test_kv_bytes_in_fp16_are_those_that_the_engine_plans(model: ModelSpec) -> None:
    fp16 = model.with_types(kv=NUMBER_TYPES["fp16"])
    demand = MemoryDemand(model.shape, KvLayout.full_attention(model.shape), 0, step_tokens=0, logit_rows=0)
    assert kv_bytes_per_token(fp16) == demand.kv_bytes_per_token == model.shape.kv_bytes_per_token()


@given(models(), st.integers(1, 3000))
def test_decode_reads_what_the_cache_of_a_sequence_holds(model: ModelSpec, context: int) -> None:
    read = step_work(model, decode_shape_of(context, 1)).decode_attention.kv_bytes
    assert read == pytest.approx(sequence_kv_bytes(model, context))


@given(models())
def test_a_step_without_tokens_has_no_work(model: ModelSpec) -> None:
    assert step_work(model, StepShape()).whole == Work()


@given(models(), slices)
def test_linear_layers_read_no_more_than_all_weights(model: ModelSpec, parts: list[tuple[int, int, int]]) -> None:
    read = step_work(model, shape_of(parts)).linear.weight_bytes
    assert read <= model.linear_parameters * model.weight_type.bytes * (1 + 1e-9)


@given(slices, st.integers(1, 2000))
def test_a_window_bounds_work_from_above_by_what_each_row_sees(parts: list[tuple[int, int, int]], window: int) -> None:
    """Against counting every pair: never less, and exact where a window holds all or none of the contexts."""
    model = ModelSpec("windowed", LLAMA_3_8B.shape, (window,) * 32)
    work = step_work(model, shape_of(parts))
    found = (work.prefill_attention.operations + work.decode_attention.operations) / (
        32 * 32 * attention_operations(128, 1)
    )
    exact = sum(min(position + 1, window) for start, count, _ in parts for position in range(start, start + count))
    assert found >= exact * (1 - 1e-9)
    if all(start + count <= window for start, count, _ in parts) or all(start >= window for start, _, _ in parts):
        assert found == pytest.approx(exact)


# --- experts ----------------------------------------------------------------------------------------------------------


def test_one_token_reads_the_active_experts_and_many_tokens_all() -> None:
    expert = 3 * 4096 * 14336 * 2.0 * 32
    router = 4096 * 8 * 2.0 * 32
    one, many = (step_work(MIXTRAL, decode_shape_of(1, batch)).feed_forward for batch in (1, 200))
    assert one.weight_bytes == pytest.approx(2 * expert + router)
    assert many.weight_bytes == pytest.approx(8 * expert + router)
    assert many.operations == pytest.approx(200 * one.operations)


def test_expected_experts_are_those_of_random_routing() -> None:
    """Two tokens that choose 2 of 8: they share none with probability 15/28, one 12/28, both 1/28: 3.5 on average."""
    matrix = next(matrix for matrix in MIXTRAL.matrices if matrix.name == "expert up")
    assert matrix.copies_read(2) == pytest.approx(4 * 15 / 28 + 3 * 12 / 28 + 2 / 28)


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_impossible_models_are_refused() -> None:
    with pytest.raises(ValueError, match="2 windows for 32 layers"):
        ModelSpec("x", LLAMA_2_7B.shape, (1, 2))
    with pytest.raises(ValueError, match="9 active experts of 8"):
        ModelSpec("x", LLAMA_2_7B.shape, experts=Experts(8, 9, 1))
    with pytest.raises(ValueError, match="at least 1 position"):
        ModelSpec("x", LLAMA_2_7B.shape, (0,) * 32)


def test_an_unknown_number_type_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean fp16"):
        number_type("f16")
