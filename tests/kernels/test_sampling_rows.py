"""Rows of a batch: each for itself, repeatable, and with an error of its own."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from twostep.errors import SamplingError
from twostep.kernels.native import NativeExecutor
from twostep.kernels.sampling import Sampled, Sampler, SampleRow, TokenSampling
from twostep.kernels.step import Slice
from twostep.model.families import load_network
from twostep.model.gguf import read_gguf

Floats = NDArray[np.float32]
VOCAB = 301
STORIES = Path(__file__).parents[1] / "data" / "stories260k.gguf"
GREEDY = TokenSampling(temperature=0)
NONE = np.array([], np.int32)


def tokens(*ids: int) -> NDArray[np.int32]:
    return np.array(ids, np.int32)


def one(logits: list[float] | Floats, params: TokenSampling, **fields: object) -> Sampled | SamplingError:
    row = np.asarray(logits, np.float32)[None]
    where: Any = {"choice": 0, "position": 0} | fields
    return Sampler(row.shape[1]).sample(row, [SampleRow(params, **where)])[0]


def token(logits: list[float] | Floats, params: TokenSampling, **fields: object) -> int:
    result = one(logits, params, **fields)
    assert isinstance(result, Sampled)
    return result.token


def draws(logits: list[float], params: TokenSampling, count: int) -> NDArray[np.int64]:
    rows = [SampleRow(params, 0, position) for position in range(count)]
    results = Sampler(len(logits)).sample(np.tile(np.array(logits, np.float32), (count, 1)), rows)
    return np.array([result.token for result in results if isinstance(result, Sampled)])


def mixed_batch() -> tuple[Floats, list[SampleRow]]:
    rng = np.random.default_rng(1)
    logits = (rng.standard_normal((24, VOCAB)) * 3).astype(np.float32)
    logits[5, 7] = np.nan
    history = rng.integers(0, VOCAB, 50).astype(np.int32)
    mask = rng.integers(0, 2**32, -(-VOCAB // 32), dtype=np.uint32)
    kinds = [
        GREEDY,
        TokenSampling(seed=1, logprobs=20),
        TokenSampling(seed=2, top_k=40, top_p=0.9, repetition_penalty=1.2, frequency_penalty=1, logprobs=0),
        TokenSampling(seed=3, top_p=0.7, min_p=0.01, logit_bias={3: 4.0}),
    ]
    masks = [mask, None]
    return logits, [SampleRow(kinds[i % 4], i, 100 + i, history, history[:20], masks[i % 3 % 2]) for i in range(24)]


def plain(results: list[Sampled | SamplingError]) -> list[object]:
    return [str(result) if isinstance(result, SamplingError) else result for result in results]


def test_rows_do_not_depend_on_their_company() -> None:
    logits, rows = mixed_batch()
    sampler = Sampler(VOCAB)
    together = plain(sampler.sample(logits, rows))
    backwards = plain(sampler.sample(logits[::-1].copy(), rows[::-1]))[::-1]
    alone = [plain(Sampler(VOCAB).sample(logits[i : i + 1], rows[i : i + 1]))[0] for i in range(24)]
    assert together == alone == backwards


def test_rows_do_not_depend_on_the_number_of_threads() -> None:
    logits, rows = mixed_batch()
    assert plain(Sampler(VOCAB, 1).sample(logits, rows)) == plain(Sampler(VOCAB, 3).sample(logits, rows))


def test_logits_are_only_read() -> None:
    logits, rows = mixed_batch()
    before = logits.copy()
    Sampler(VOCAB).sample(logits, rows)
    np.testing.assert_array_equal(logits, before)


def test_seed_choice_and_position_each_give_other_tokens_and_nothing_else_does() -> None:
    logits = np.zeros(VOCAB, np.float32)
    base = token(logits, TokenSampling(seed=7), choice=1, position=9)
    assert token(logits, TokenSampling(seed=7), choice=1, position=9) == base
    assert token(logits, TokenSampling(seed=8), choice=1, position=9) != base
    assert token(logits, TokenSampling(seed=7 + 2**40), choice=1, position=9) != base
    assert token(logits, TokenSampling(seed=7), choice=2, position=9) != base
    assert token(logits, TokenSampling(seed=7), choice=1, position=10) != base
    assert token(logits, TokenSampling(seed=7), choice=1, position=9 + 2**32) != base


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_distribution(temperature: float) -> None:
    logits = [0.0, 1.0, 2.0, -1.0, 0.5, 1.5, -0.5]
    drawn = draws(logits, TokenSampling(seed=11, temperature=temperature), 20_000)
    p = np.exp(np.array(logits) / temperature)
    expected = p / p.sum() * 20_000
    chi_square = ((np.bincount(drawn, minlength=7) - expected) ** 2 / expected).sum()
    assert chi_square < 22.46  # exceeded once in a thousand seeds by 6 degrees of freedom


def test_equal_logits_rank_by_token_id() -> None:
    logits = [1.0, 3.0, 3.0, 3.0, 0.0]
    result = one(logits, TokenSampling(temperature=0, logprobs=3))
    assert isinstance(result, Sampled)
    assert (result.token, result.rank, [t for t, _ in result.top]) == (1, 1, [1, 2, 3])
    assert set(draws(logits, TokenSampling(seed=1, top_k=2), 200)) == {1, 2}
    assert set(draws(logits, TokenSampling(seed=1, top_p=0.5), 200)) == {1, 2}
    assert set(draws([2.0] * 300, TokenSampling(seed=1, top_k=200, top_p=0.01), 200)) == {0, 1}


def test_rank_counts_the_tokens_before_it() -> None:
    result = one([1.0, 3.0, 3.0, 0.0], TokenSampling(temperature=0, logprobs=0, logit_bias={2: 1.0}))
    assert isinstance(result, Sampled)
    assert (result.token, result.rank, result.top) == (2, 2, ())


@pytest.mark.parametrize("temperature", [1e-300, 1e-6, 1.0, 1e6, 1e300])
def test_top_k_of_one_is_greedy_at_any_temperature(temperature: float) -> None:
    logits, _ = mixed_batch()
    top_1 = TokenSampling(seed=1, temperature=temperature, top_k=1)
    for row in (0, 1, 2):
        assert token(logits[row], top_1) == token(logits[row], GREEDY) == int(np.argmax(logits[row]))


@pytest.mark.parametrize("narrow", [{"top_p": 0.0}, {"min_p": 1.0}, {"temperature": 1e-6}, {"temperature": 1e-300}])
def test_narrowest_parameters_leave_the_most_likely_token(narrow: dict[str, Any]) -> None:
    assert set(draws([1.0, 5.0, 4.99, -3.0], TokenSampling(seed=1, **narrow), 50)) == {1}


def test_greatest_temperature_still_never_draws_what_is_impossible() -> None:
    logits = [0.0, -np.inf, 5.0, -np.inf]
    assert set(draws(logits, TokenSampling(seed=1, temperature=1e300), 100)) == {0, 2}


def test_extreme_but_finite_logits_are_fine() -> None:
    top = float(np.finfo(np.float32).max)
    logits = [-top, top, 0.0, -top]
    assert set(draws(logits, TokenSampling(seed=1, top_p=0.9, top_k=3), 20)) == {1}
    assert set(draws([-top, -np.inf, -top], TokenSampling(seed=1, top_p=0.9), 50)) == {0, 2}


def test_mask_decides_over_bias_and_penalties() -> None:
    only_33 = np.array([0, 2], np.uint32)
    logits = np.zeros(40, np.float32)
    params = TokenSampling(temperature=0, logit_bias={1: 100.0, 33: -100.0}, repetition_penalty=50)
    assert token(logits, params, mask=only_33, prompt=tokens(33, 33), output=tokens(33)) == 33


def test_presence_and_frequency_look_at_the_output_only_and_repetition_at_both() -> None:
    history: Any = {"prompt": tokens(0, 0, 0), "output": tokens(1, 1)}
    logits = [2.0, 2.5, 1.0]
    assert token(logits, TokenSampling(temperature=0, presence_penalty=1), **history) == 0
    assert token(logits, TokenSampling(temperature=0, frequency_penalty=0.3), **history) == 0
    assert token(logits, TokenSampling(temperature=0, frequency_penalty=0.2), **history) == 1
    assert token(logits, TokenSampling(temperature=0, repetition_penalty=3), **history) == 2


@pytest.mark.parametrize(
    ("logits", "params", "fields", "message"),
    [
        ([0, np.nan, 1], GREEDY, {}, "the logits hold NaN or +infinity"),
        ([0, np.inf, 1], GREEDY, {}, "the logits hold NaN or +infinity"),
        ([-np.inf] * 3, GREEDY, {}, "every logit is -infinity"),
        ([0, 1, 2], GREEDY, {"mask": np.zeros(1, np.uint32)}, "the mask allows no token"),
        ([0, -np.inf, 2], GREEDY, {"mask": np.array([2], np.uint32)}, "the mask allows no token"),
        ([0, 1, 2], TokenSampling(temperature=0, logit_bias={3: 1.0}), {}, "token 3 in logit_bias"),
        ([0, 1, 2], TokenSampling(temperature=0, presence_penalty=1), {"prompt": NONE, "output": tokens(0, -1)},
         "token -1 in logit_bias, prompt or output is not one of the 3 of the vocabulary"),
        ([0, 1, 2], TokenSampling(temperature=0, repetition_penalty=1e-45), {"prompt": tokens(1), "output": NONE},
         "the penalties took the logits"),
    ],
)  # fmt: skip
def test_bad_row_has_its_own_error_and_the_others_go_on(
    logits: list[float], params: TokenSampling, fields: dict[str, Any], message: str
) -> None:
    batch = np.array([[5, 0, 0], logits, [0, 0, 5]], np.float32)
    bad = SampleRow(params, 0, 0, **fields)
    good = SampleRow(GREEDY, 0, 0)
    first, error, last = Sampler(3).sample(batch, [good, bad, good])
    assert isinstance(error, SamplingError)
    assert str(error).startswith(message)
    assert (first, last) == (Sampled(0, None, None, ()), Sampled(2, None, None, ()))


def test_history_is_forgotten_between_calls() -> None:
    sampler, logits = Sampler(3), np.array([[2.0, 1.9, 0.0]], np.float32)
    params = TokenSampling(temperature=0, presence_penalty=0.05, repetition_penalty=1.01)
    for _ in range(3):  # twice the penalty would make it token 1
        assert sampler.sample(logits, [SampleRow(params, 0, 0, NONE, tokens(0))]) == [Sampled(0, None, None, ())]


@pytest.mark.parametrize("logits", [np.zeros((1, 3)), np.zeros((1, 6), np.float32)[:, ::2], np.zeros(3, np.float32)])
def test_logits_of_wrong_type_or_layout_are_refused(logits: Any) -> None:
    with pytest.raises(TypeError):
        Sampler(3).sample(logits, [SampleRow(GREEDY, 0, 0)])


def test_logits_of_wrong_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"logits of shape \(2, 3\) for 1 rows and a vocabulary of 3"):
        Sampler(3).sample(np.zeros((2, 3), np.float32), [SampleRow(GREEDY, 0, 0)])


@pytest.mark.parametrize(
    ("params", "fields", "message"),
    [
        (GREEDY, {"mask": np.zeros(2, np.uint32)}, "mask has 2 words; a vocabulary of 3 needs 1"),
        (GREEDY, {"mask": np.zeros(1, np.int64)}, "mask has to be a contiguous uint32 array"),
        (TokenSampling(temperature=0, repetition_penalty=2), {}, "prompt and output have to be contiguous int32"),
    ],
)
def test_wrong_masks_and_histories_are_refused(params: TokenSampling, fields: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        one([0.0, 1.0, 2.0], params, **fields)


def test_an_empty_batch_is_fine() -> None:
    assert Sampler(3).sample(np.zeros((0, 3), np.float32), []) == []


def test_a_sampler_on_an_executors_threads_chooses_the_same() -> None:
    executor = NativeExecutor(load_network(read_gguf(STORIES)), kv_blocks=1, threads=2)
    logits = executor.forward([Slice(0, [1, 5, 9], [0], [0, 1, 2])])
    rows = [SampleRow(TokenSampling(temperature=0.9, seed=3), choice=0, position=i) for i in range(3)]
    assert executor.sampler().sample(logits, rows) == Sampler(logits.shape[1]).sample(logits, rows)
