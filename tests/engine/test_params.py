"""What a request may ask for, what is refused, and which tokens end its answer."""

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostep.engine.params import SamplingParams, forbid
from twostep.errors import ContextLengthError, InvalidParameterError
from twostep.kernels.sampling import Sampler, SampleRow

EOS = frozenset({2, 7})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("n", 0, "n is 0; it has to be an integer from 1 to 128"),
        ("n", True, "n is True; it has to be an integer from 1 to 128"),
        ("max_tokens", 0, "max_tokens is 0; it has to be an integer from 1"),
        ("max_tokens", 1.0, "max_tokens is 1.0; it has to be an integer from 1"),
        ("min_tokens", -1, "min_tokens is -1; it has to be an integer from 0"),
        ("min_tokens", None, "min_tokens is None; it has to be an integer from 0"),
        ("stop", "", "a member of stop is ''; it has to be a string of 1 to 1024 characters"),
        ("stop", ["a", 3], "a member of stop is 3; it has to be a string of 1 to 1024 characters"),
        ("stop", 3, "stop is 3; it has to be a list of at most 32 strings"),
        ("stop", ["x" * 1024] * 5, "stop has 5120 characters; it has to have at most 4096 in all"),
        ("stop", {"a": 1}, "stop is {'a': 1}; it has to be a list of at most 32 strings"),
        ("stop_token_ids", [-1], "a member of stop_token_ids is -1; it has to be an integer from 0 to 2147483647"),
        ("stop_token_ids", "12", "stop_token_ids is '12'; it has to be a list of at most 32 token ids"),
        ("stop_token_ids", None, "stop_token_ids is None; it has to be a list of at most 32 token ids"),
        ("ignore_eos", 1, "ignore_eos is 1; it has to be true or false"),
        ("skip_special_tokens", "no", "skip_special_tokens is 'no'; it has to be true or false"),
        ("include_stop_str_in_output", None, "include_stop_str_in_output is None; it has to be true or false"),
        ("temperature", "hot", "temperature is 'hot'; it has to be a number from 0, finite"),
    ],
)
def test_refuses_and_names_parameter_value_and_range(name: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidParameterError) as refused:
        SamplingParams(**{name: value})
    assert str(refused.value) == message
    assert refused.value.param == name


@pytest.mark.parametrize("stop", [["x"] * 33, "x" * 1025])
def test_too_much_to_stop_at_is_refused_in_a_short_line(stop: Any) -> None:
    with pytest.raises(InvalidParameterError, match=r"^(a member of )?stop is .{60}\.\.\.; it has to be") as refused:
        SamplingParams(stop=stop)
    assert len(str(refused.value)) < 160


def test_contradictory_lengths_are_refused() -> None:
    with pytest.raises(InvalidParameterError, match=r"^min_tokens is 5; it has to be at most max_tokens, 4$"):
        SamplingParams(min_tokens=5, max_tokens=4)
    assert SamplingParams(min_tokens=4, max_tokens=4).min_tokens == 4


@pytest.mark.parametrize(("stop", "strings"), [(None, ()), ("ab", ("ab",)), (["a", "b"], ("a", "b"))])
def test_stop_strings_become_a_tuple(stop: Any, strings: tuple[str, ...]) -> None:
    params = SamplingParams(stop=stop)
    assert params.stop == params.stop_strings == strings


def test_survives_pickling_and_seeding() -> None:
    params = SamplingParams(stop="x", stop_token_ids=[1], n=3, logit_bias={2: 1.0})
    assert pickle.loads(pickle.dumps(params)) == params
    seeded = params.seeded()
    assert (type(seeded), seeded.n, seeded.stop) == (SamplingParams, 3, ("x",))
    assert seeded.seed is not None


def test_an_error_survives_pickling_with_its_parameter() -> None:
    error = pickle.loads(pickle.dumps(InvalidParameterError("n is 0", "n")))
    assert (str(error), error.param) == ("n is 0", "n")


@pytest.mark.parametrize(
    ("params", "ids"),
    [
        (SamplingParams(), {2, 7}),
        (SamplingParams(stop_token_ids=[9]), {2, 7, 9}),
        (SamplingParams(stop_token_ids=[9], ignore_eos=True), {9}),
        (SamplingParams(stop_token_ids=[7], ignore_eos=True), {7}),
    ],
)
def test_tokens_that_end_an_answer(params: SamplingParams, ids: set[int]) -> None:
    assert params.stop_ids(EOS) == ids


def test_nothing_that_ends_an_answer_comes_before_min_tokens() -> None:
    params = SamplingParams(stop_token_ids=[9], min_tokens=2)
    forbidden = [params.forbidden_ids(EOS, output_tokens) for output_tokens in range(4)]
    assert forbidden == [{2, 7, 9}, {2, 7, 9}, set(), set()]


def test_tokens_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(InvalidParameterError, match=r"^stop_token_ids has token 10; the vocabulary is 0 to 9$"):
        SamplingParams(stop_token_ids=[9, 10]).check_vocabulary(10)
    with pytest.raises(InvalidParameterError, match=r"^logit_bias has token 12; the vocabulary is 0 to 9$"):
        SamplingParams(logit_bias={12: 1.0}).check_vocabulary(10)
    SamplingParams(stop_token_ids=[9], logit_bias={0: 1.0}).check_vocabulary(10)


def test_an_answer_may_fill_the_context_and_no_more() -> None:
    assert SamplingParams().answer_limit(90, context=100) == 10
    assert SamplingParams(max_tokens=10).answer_limit(90, context=100) == 10
    assert SamplingParams(max_tokens=3).answer_limit(90, context=100) == 3


@pytest.mark.parametrize(
    ("params", "prompt_tokens", "message", "param"),
    [
        (SamplingParams(), 100, "the prompt has 100 tokens; prompt and answer together have at most 100", None),
        (SamplingParams(max_tokens=11), 90, "max_tokens is 11; at most 10 fit: the context of 100", "max_tokens"),
        (SamplingParams(min_tokens=11), 90, "min_tokens is 11; at most 10 fit: the context of 100", "min_tokens"),
    ],
)
def test_what_exceeds_the_context_is_refused_with_the_numbers(
    params: SamplingParams, prompt_tokens: int, message: str, param: str | None
) -> None:
    with pytest.raises(ContextLengthError, match=f"^{message}") as refused:
        params.answer_limit(prompt_tokens, context=100)
    assert refused.value.param == param


@given(data=st.data(), vocab=st.integers(1, 100))
def test_a_mask_forbids_these_tokens_and_no_others(data: st.DataObject, vocab: int) -> None:
    ids = data.draw(st.sets(st.integers(0, vocab - 1)))
    mask = forbid(ids, vocab)
    assert (mask.dtype, mask.shape) == (np.uint32, (-(-vocab // 32),))
    assert {i for i in range(vocab) if not mask[i // 32] >> (i % 32) & 1} == ids


def test_the_sampler_heeds_the_mask() -> None:
    logits = np.arange(40, dtype=np.float32)[None]
    row = SampleRow(SamplingParams(temperature=0), choice=0, position=0, mask=forbid({39, 38, 31}, 40))
    [sampled] = Sampler(40).sample(logits, [row])
    assert not isinstance(sampled, Exception)
    assert sampled.token == 37


def test_an_unknown_parameter_gets_a_hint() -> None:
    with pytest.raises(InvalidParameterError, match=r"^'max_tokns' is no parameter; .*; did you mean max_tokens"):
        SamplingParams(max_tokns=5)  # type: ignore[call-arg]


def test_a_top_k_of_minus_one_is_off() -> None:
    assert SamplingParams(top_k=-1) == SamplingParams()
