"""What `TokenSampling` accepts, and what it says of the rest."""

import pickle
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from twostep.errors import InvalidParameterError
from twostep.kernels.sampling import TokenSampling

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("temperature", -0.1, "a number from 0, finite"),
        ("temperature", NAN, "a number from 0, finite"),
        ("temperature", INF, "a number from 0, finite"),
        ("temperature", 10**400, "a number from 0, finite"),
        ("temperature", "1", "a number from 0, finite"),
        ("temperature", True, "a number from 0, finite"),
        ("temperature", None, "a number from 0, finite"),
        ("temperature", Decimal(1), "a number from 0, finite"),
        ("top_k", -2, "an integer from -1"),
        ("top_k", 1.0, "an integer from -1"),
        ("top_p", -0.1, "a number from 0 to 1"),
        ("top_p", 1.1, "a number from 0 to 1"),
        ("top_p", NAN, "a number from 0 to 1"),
        ("min_p", 1.5, "a number from 0 to 1"),
        ("min_p", -1e-9, "a number from 0 to 1"),
        ("repetition_penalty", 0, "a number above 0, finite"),
        ("repetition_penalty", INF, "a number above 0, finite"),
        ("presence_penalty", 2.1, "a number from -2 to 2"),
        ("frequency_penalty", -2.1, "a number from -2 to 2"),
        ("frequency_penalty", NAN, "a number from -2 to 2"),
        ("seed", 2**63, "an integer from -9223372036854775808 to 9223372036854775807"),
        ("seed", 1.5, "an integer from -9223372036854775808 to 9223372036854775807"),
        ("logprobs", 21, "an integer from 0 to 20"),
        ("logprobs", -1, "an integer from 0 to 20"),
        ("logprobs", True, "an integer from 0 to 20"),
        ("logit_bias", [(1, 2.0)], "map token ids to numbers"),
    ],
)
def test_refuses_and_names_parameter_value_and_range(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(InvalidParameterError) as refused:
        TokenSampling(**{name: value})
    message = str(refused.value)
    assert message.startswith(f"{name} is {value!r}; it has to")
    assert message.endswith(allowed)


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        ({5: 101}, "logit_bias of token 5 is 101; it has to be a number from -100 to 100"),
        ({5: NAN}, "logit_bias of token 5 is nan; it has to be a number from -100 to 100"),
        ({-1: 0.0}, "a token id in logit_bias is -1; it has to be an integer from 0 to 2147483647"),
        ({"5": 0.0}, "a token id in logit_bias is '5'; it has to be an integer from 0 to 2147483647"),
    ],
)
def test_refuses_bias_and_names_the_token(bias: Any, message: str) -> None:
    with pytest.raises(InvalidParameterError) as refused:
        TokenSampling(logit_bias=bias)
    assert str(refused.value) == message


def test_accepts_the_ends_of_each_range_and_numpy_numbers() -> None:
    low = TokenSampling(temperature=0, top_k=0, top_p=0, min_p=0, presence_penalty=-2, seed=-(2**63), logprobs=0)
    numpy_numbers: Any = {"repetition_penalty": np.float32(1e30), "logit_bias": {np.int64(3): np.float32(-100)}}
    high = TokenSampling(
        temperature=1e300, top_k=10**30, top_p=1, min_p=1, frequency_penalty=2, seed=2**63 - 1, **numpy_numbers
    )
    assert low.packed is not None
    assert high.packed is not None


def test_drawing_tokens_needs_a_seed() -> None:
    with pytest.raises(InvalidParameterError, match="seed is None"):
        _ = TokenSampling().packed
    assert TokenSampling(temperature=0).packed is not None


def test_seeded_draws_a_seed_once_and_keeps_one_that_is_there() -> None:
    first, second = TokenSampling().seeded(), TokenSampling().seeded()
    assert first.seed != second.seed
    assert first.seeded() is first
    assert TokenSampling(seed=0).seeded().seed == 0


def test_survives_pickling_after_it_was_packed() -> None:
    params = TokenSampling(seed=1, top_k=3, logit_bias={2: 1.0})
    assert params.packed is params.packed
    copy = pickle.loads(pickle.dumps(params))
    assert copy == params
    assert copy.packed is not None


def test_keeps_its_own_copy_of_the_bias() -> None:
    bias = {1: 2.0}
    params = TokenSampling(logit_bias=bias)
    bias[1] = 3.0
    assert params.logit_bias == {1: 2.0}
