"""What a step costs: its shape tells apart what costs differently, and any cost model can be inverted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostep.core.cost import Cost, StepShape, Terms, decode_shape, largest_slice
from twostep.perf.linear import LinearCostModel

slices = st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 600), st.integers(0, 3)), max_size=8)


@given(slices)
def test_counts_are_those_of_the_slices_one_by_one(added: list[tuple[int, int, int]]) -> None:
    shape = StepShape()
    for start, count, logit_rows in added:
        shape = shape.with_slice(start, count, logit_rows)
    several = [(start, count) for start, count, _ in added if count > 1]
    single = [start for start, count, _ in added if count == 1]
    assert shape.tokens == sum(count for _, count, _ in added)
    assert shape.prefill_pairs == sum(start + i + 1 for start, count in several for i in range(count))
    assert shape.prefill_kv_tokens == sum(start + count for start, count in several)
    assert shape.decode_kv_tokens == sum(start + 1 for start in single)
    assert shape.logit_rows == sum(rows for _, _, rows in added)
    assert (shape.prefills, shape.decodes, shape.sequences) == (len(several), len(single), len(added))


@given(slices, st.integers(0, 5000), st.integers(1, 600), st.integers(0, 3))
def test_a_slice_taken_out_leaves_no_trace(
    added: list[tuple[int, int, int]], start: int, count: int, rows: int
) -> None:
    shape = StepShape()
    for one in added:
        shape = shape.with_slice(*one)
    assert shape.with_slice(start, count, rows).without_slice(start, count, rows) == shape


def test_a_decode_batch_is_the_sum_of_its_decodes() -> None:
    shape = StepShape()
    for start in (10, 20, 33):
        shape = shape.with_slice(start, 1, 1)
    assert decode_shape(3, 11 + 21 + 34) == shape


@pytest.mark.parametrize(("tokens", "edge", "rows"), [(0, 12, 0), (1, 12, 12), (12, 12, 12), (13, 12, 24), (9, 4, 12)])
def test_kernels_that_work_in_tiles_compute_whole_ones(tokens: int, edge: int, rows: int) -> None:
    assert StepShape(tokens).tile_rows(edge) == rows


@given(slices)
def test_terms_add_up_to_the_expected_time(added: list[tuple[int, int, int]]) -> None:
    model, shape = LinearCostModel(), StepShape()
    for i, one in enumerate(added):
        shape = shape.with_slice(*one)
        model.observe(shape, 10_000_000 * (i + 1))
    cost = model.estimate(shape)
    assert sum(cost.terms) == pytest.approx(cost.expected_ns, abs=2)
    assert cost.expected_ns <= cost.bound_ns <= 1.5 * cost.expected_ns + 1


class InTiles:
    """A roofline in tiles of 12 rows, the kind of model that no formula inverts."""

    def estimate(self, shape: StepShape) -> Cost:
        linear = max(5_000_000.0, 400_000.0 * shape.tile_rows(12))
        attention = max(30.0 * shape.prefill_pairs, 500.0 * shape.prefill_kv_tokens)
        terms = Terms(1e6, linear, attention, 800.0 * shape.decode_kv_tokens, 2e5 * shape.logit_rows)
        return Cost(int(sum(terms)), int(1.1 * sum(terms)), terms)

    def observe(self, shape: StepShape, measured_ns: int) -> None:
        pass


@given(st.integers(0, 40), st.integers(0, 4000), st.integers(0, 700), st.integers(0, 400_000_000))
def test_the_largest_slice_of_any_model_fits_and_one_token_more_does_not(
    decodes: int, start: int, most: int, budget_ns: int
) -> None:
    model, load = InTiles(), decode_shape(decodes, 100 * decodes)
    tokens = largest_slice(model, load, start, most, budget_ns)
    assert 0 <= tokens <= most
    if tokens:
        assert model.estimate(load.with_slice(start, tokens, 1)).bound_ns <= budget_ns
    if tokens < most:
        assert model.estimate(load.with_slice(start, tokens + 1, 1)).bound_ns > budget_ns
