"""The sampler against each of its steps written plainly in numpy (`native/sampling.h` states them)."""

from typing import Any

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from twostep.kernels.sampling import Sampled, Sampler, SampleRow, TokenSampling

Floats = NDArray[np.float32]
DRAWS = 32
NEAR = 1e-5
"""How far float32 weights may move the limits of a token in the cumulative distribution."""


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = p1 >> 32 ^ c1 ^ k0, p1 & 0xFFFFFFFF, p0 >> 32 ^ c3 ^ k1, p0 & 0xFFFFFFFF
        k0, k1 = k0 + 0x9E3779B9 & 0xFFFFFFFF, k1 + 0xBB67AE85 & 0xFFFFFFFF
    return c0, c1, c2, c3


def uniform(seed: int, choice: int, position: int) -> float:
    key = (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)
    low, high, _, _ = philox((position & 0xFFFFFFFF, position >> 32, choice, 0), key)
    return ((high << 32 | low) >> 11) / 2**53


def adjusted(logits: Floats, row: SampleRow) -> Floats:
    """Mask, bias, penalties."""
    params, x = row.params, logits.copy()
    if row.mask is not None:
        x[~np.unpackbits(row.mask.view(np.uint8), bitorder="little")[: x.size].astype(bool)] = -np.inf
    for token, bias in params.logit_bias.items():
        x[token] += np.float32(bias)
    assert row.prompt is not None
    assert row.output is not None
    seen = np.unique(np.concatenate([row.prompt, row.output]))
    repetition = np.float32(params.repetition_penalty)
    x[seen] = np.where(x[seen] > 0, x[seen] / repetition, x[seen] * repetition)
    times = np.bincount(row.output, minlength=x.size).astype(np.float32)
    x -= np.float32(params.frequency_penalty) * times
    x -= np.float32(params.presence_penalty) * (times > 0)
    return x


def kept_after_truncation(x: Floats, params: TokenSampling, slack: float) -> NDArray[np.float64]:
    """Probabilities (0 where dropped) after temperature, top-k, top-p and min-p, the last two loosened by `slack`."""
    order = np.lexsort((np.arange(x.size), -x))
    z = (x[order].astype(np.float64) - x.max()) / params.temperature
    p = np.exp(z)
    if params.top_k:
        p[params.top_k :] = 0
    if params.top_p < 1:
        before = np.concatenate([[0], np.cumsum(p)[:-1]]) / p.sum()
        p[(before >= params.top_p + slack) & (np.arange(p.size) > 0)] = 0
    p[p < min(params.min_p - slack, 1)] = 0
    result = np.empty(x.size)
    result[order] = p / p.sum()
    return result


def log_softmax(x: Floats) -> NDArray[np.float64]:
    z: NDArray[np.float64] = x.astype(np.float64) - x.max()
    return z - float(np.log(np.exp(z).sum()))


@st.composite
def rows(draw: st.DrawFn) -> tuple[Floats, SampleRow]:
    vocab = draw(st.one_of(st.integers(1, 40), st.integers(120, 300)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    logits = (rng.standard_normal(vocab) * draw(st.sampled_from([0.01, 1, 5, 30]))).astype(np.float32)
    if draw(st.booleans()):
        logits = np.round(logits)  # ties
    logits[rng.random(vocab) < draw(st.sampled_from([0, 0.3]))] = -np.inf
    token = st.integers(0, vocab - 1)
    history = st.lists(token, max_size=30).map(lambda ids: np.array(ids, np.int32))
    row = SampleRow(draw(parameters(token)), 1, 5, draw(history), draw(history), draw(masks(vocab, rng)))
    assume(np.isfinite(adjusted(logits, row).max()))
    return logits, row


def parameters(token: st.SearchStrategy[int]) -> st.SearchStrategy[TokenSampling]:
    choices: dict[str, st.SearchStrategy[Any]] = {
        "temperature": st.sampled_from([0, 1e-6, 0.3, 1, 1.7, 1e6]),
        "top_k": st.sampled_from([0, 0, 1, 2, 5, 150, 10**9]),
        "top_p": st.one_of(st.just(1.0), st.floats(0, 1)),
        "min_p": st.one_of(st.just(0.0), st.floats(0, 1)),
        "repetition_penalty": st.sampled_from([1, 1, 1.3, 0.5, 1e20]),
        "presence_penalty": st.sampled_from([0, 0, 2, -1.5]),
        "frequency_penalty": st.sampled_from([0, 0, 2, -0.25]),
        "logit_bias": st.dictionaries(token, st.floats(-100, 100, width=32), max_size=4),
        "seed": st.integers(-(2**63), 2**63 - 1),
        "logprobs": st.sampled_from([None, 0, 1, 20]),
    }
    return st.builds(TokenSampling, **choices)


@st.composite
def masks(draw: st.DrawFn, vocab: int, rng: np.random.Generator) -> NDArray[np.uint32] | None:
    words = -(-vocab // 32)
    return rng.integers(0, 2**32, words, dtype=np.uint32) if draw(st.booleans()) else None


def sample_positions(logits: Floats, row: SampleRow) -> list[Sampled]:
    """The row at `DRAWS` positions."""
    many = [row._replace(position=position) for position in range(DRAWS)]
    results = Sampler(logits.size).sample(np.tile(logits, (DRAWS, 1)), many)
    return [result for result in results if isinstance(result, Sampled)]


def test_philox_gives_the_published_numbers() -> None:
    """Known answers of the authors' Random123."""
    ones = 0xFFFFFFFF
    assert philox((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert philox((ones, ones, ones, ones), (ones, ones)) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)


@settings(max_examples=400, deadline=None)
@given(rows())
def test_tokens_are_those_of_the_reference(case: tuple[Floats, SampleRow]) -> None:
    logits, row = case
    results = sample_positions(logits, row)
    assert len(results) == DRAWS
    x = adjusted(logits, row)
    if row.params.temperature == 0:
        assert {result.token for result in results} == {int(np.argmax(x))}
        return
    p = kept_after_truncation(x, row.params, 0.0)
    for slack in (-1e-6, 1e-6):  # a token on the edge of top-p or min-p may fall to either side
        assume(np.array_equal(p > 0, kept_after_truncation(x, row.params, slack) > 0))
    ends = np.cumsum(p)
    assert row.params.seed is not None
    for position, result in enumerate(results):
        u = uniform(row.params.seed, row.choice, position)
        assert p[result.token] > 0
        assert ends[result.token] - p[result.token] - NEAR <= u <= ends[result.token] + NEAR


@settings(max_examples=200, deadline=None)
@given(rows())
def test_logprobs_are_those_of_the_untouched_logits(case: tuple[Floats, SampleRow]) -> None:
    logits, row = case
    result = sample_positions(logits, row)[0]
    if row.params.logprobs is None:
        assert (result.logprob, result.rank, result.top) == (None, None, ())
        return
    expected = log_softmax(logits)
    order = [int(i) for i in np.lexsort((np.arange(logits.size), -logits)) if logits[i] > -np.inf]
    assert result.logprob is not None
    np.testing.assert_allclose(result.logprob, expected[result.token], rtol=1e-6, atol=2e-6)
    assert result.rank == order.index(result.token) + 1
    wanted = order[: row.params.logprobs]
    assert [token for token, _ in result.top] == wanted
    np.testing.assert_allclose([value for _, value in result.top], expected[wanted], rtol=1e-6, atol=2e-6)
