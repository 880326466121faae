"""Fields of other servers' APIs: each is served, refused with words that help, or a hint that changes nothing."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from twostep.engine.text.structured_output import ANY_OBJECT, StructuredOutput
from twostep.model.loaded import LoadedModel, open_model
from twostep.model.template import ChatTemplate
from twostep.openai_api.api_error import ApiError
from twostep.openai_api.api_request import ApiRequest, read_request
from twostep.openai_api.fields import KNOWN, Hint, Refused
from twostep.server.api.openapi import document

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}]},
    "/v1/completions": {"prompt": "Once"},
}
CHAT, COMPLETIONS = BODIES


@pytest.fixture(scope="module")
def model(default_model_path: Path) -> LoadedModel:
    return open_model(default_model_path)


def read(model: LoadedModel, path: str, **fields: Any) -> ApiRequest:
    return read_request(path, {**BODIES[path], **fields}, model, ["small"])


def served(path: str) -> set[str]:
    body = document()["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    return set(body["schema"]["properties"])


def left_over(kind: type) -> Iterator[tuple[str, str]]:
    """Paths and fields of this kind that the path does not serve."""
    return ((path, name) for path in BODIES for name in KNOWN.keys() - served(path) if isinstance(KNOWN[name], kind))


@pytest.mark.parametrize(("path", "name"), sorted(left_over(Refused)))
def test_what_would_change_an_answer_is_refused_by_name(model: LoadedModel, path: str, name: str) -> None:
    known = KNOWN[name]
    assert isinstance(known, Refused)
    with pytest.raises(ApiError) as refused:
        read(model, path, **{name: "something else"})
    assert (refused.value.status, refused.value.param) == (400, name)
    assert str(refused.value).startswith(f"{name} is 'something else'; {name} is not supported here")
    assert str(refused.value).endswith(known.instead)
    for value in (*known.allowed, None):
        request = read(model, path, **{name: value})
        assert (request.params, request.unknown) == (read(model, path).params, ())


@pytest.mark.parametrize(("path", "name"), sorted(left_over(Hint)))
def test_hints_are_accepted_whatever_they_say(model: LoadedModel, path: str, name: str) -> None:
    for value in (True, -7, "low", {"a": [1]}):
        assert read(model, path, **{name: value}) == read(model, path)


def test_a_refusal_says_what_is_allowed_and_what_to_send_instead(model: LoadedModel) -> None:
    with pytest.raises(ApiError) as refused:
        read(model, CHAT, best_of=4)
    assert str(refused.value) == "best_of is 4; best_of is not supported here, only 1; use n for several answers"


# --- llama.cpp --------------------------------------------------------------------------------------------------------

GBNF = 'root ::= "yes" | "no"'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
HELD = StructuredOutput("json_schema", json.dumps(SCHEMA))


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("fields", "form", "field"),
    [
        ({"grammar": GBNF}, StructuredOutput("grammar", GBNF), "grammar"),
        ({"grammar": ""}, None, ""),
        ({"json_schema": SCHEMA}, HELD, "json_schema"),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, HELD, "response_format"),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, HELD, "response_format"),
        ({"response_format": {"type": "json_object"}}, ANY_OBJECT, "response_format"),
        ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": False}}, HELD, "structured_outputs"),
    ],
)
def test_forms_by_the_names_of_others(
    model: LoadedModel, path: str, fields: dict[str, Any], form: StructuredOutput | None, field: str
) -> None:
    request = read(model, path, **fields)
    assert request.params.structured == form
    assert request.unknown == ()
    assert request.form_field == (field or ("tools" if path == CHAT else ""))


def test_lengths_by_the_names_of_others(model: LoadedModel) -> None:
    for path, default in ((CHAT, None), (COMPLETIONS, 16)):
        assert read(model, path).params.max_tokens == default
        assert read(model, path, n_predict=5).params.max_tokens == 5
        assert read(model, path, max_completion_tokens=6).params.max_tokens == 6
        assert read(model, path, n_predict=7, max_tokens=7).params.max_tokens == 7
        assert read(model, path, n_predict=-1).params.max_tokens is None


def test_penalties_by_the_names_of_others(model: LoadedModel) -> None:
    for path in BODIES:
        assert read(model, path, repeat_penalty=1.2).params.repetition_penalty == 1.2
        assert read(model, path, repeat_penalty=1.2, repeat_last_n=-1).params.repetition_penalty == 1.2
        assert read(model, path, repeat_penalty=1.2, repeat_last_n=0).params.repetition_penalty == 1
        assert read(model, path, repeat_penalty=1.0, repeat_last_n=64).params.repetition_penalty == 1
        assert read(model, path, repeat_penalty=1.2, repetition_penalty=1.2).params.repetition_penalty == 1.2


def test_log_probabilities_by_the_names_of_others(model: LoadedModel) -> None:
    for path in BODIES:
        assert read(model, path, n_probs=0).params.logprobs is None
        assert read(model, path, n_probs=3).params.logprobs == 3


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        ({"n_predict": 0}, "n_predict is 0; it has to be an integer from 1", "n_predict"),
        ({"n_predict": 3, "max_tokens": 4}, "max_tokens is 4 and n_predict is 3; they mean the same", "max_tokens"),
        ({"max_tokens": -1}, "max_tokens is -1; it has to be an integer from 1", "max_tokens"),
        ({"max_completion_tokens": [1]}, "max_completion_tokens is [1]; it has to be", "max_completion_tokens"),
        ({"repeat_penalty": "x"}, "repeat_penalty is 'x'; it has to be a number", "repeat_penalty"),
        ({"repeat_penalty": 1.1, "repeat_last_n": 64}, "repeat_last_n is 64; repeat_penalty", "repeat_last_n"),
        ({"repeat_penalty": 1.1, "repeat_last_n": -2}, "repeat_last_n is -2; it has to be", "repeat_last_n"),
        (
            {"repeat_penalty": 1.1, "repetition_penalty": 1.2},
            "repetition_penalty is 1.2 and repeat_penalty is 1.1; send one",
            "repetition_penalty",
        ),
        ({"n_probs": 21}, "n_probs is 21; it has to be an integer from 0 to 20", "n_probs"),
        ({"n_probs": 3, "logprobs": 1}, "n_probs and logprobs are both set; they mean the same, send one", "n_probs"),
        ({"grammar": 3}, "grammar is 3; it has to be a string", "grammar"),
        ({"json_schema": 3}, "json_schema is 3; it has to be a JSON schema", "json_schema"),
        ({"grammar": GBNF, "json_schema": SCHEMA}, "grammar and json_schema each set the answer's form", "grammar"),
        (
            {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
            "structured_outputs is {",
            "structured_outputs",
        ),
        (
            {"stream": True, "stream_options": {"include_obfuscation": 1}},
            "include_obfuscation is 1; it has to be true or false",
            "include_obfuscation",
        ),
    ],
)
def test_bad_values_of_others_fields_are_refused(
    model: LoadedModel, path: str, fields: dict[str, Any], message: str, param: str
) -> None:
    with pytest.raises(ApiError) as refused:
        read(model, path, **fields)
    assert str(refused.value).startswith(message)
    assert refused.value.param == param


def test_a_prompt_at_the_other_endpoint_is_not_passed_over(model: LoadedModel) -> None:
    for path, other in ((CHAT, COMPLETIONS), (COMPLETIONS, CHAT)):
        with pytest.raises(ApiError, match=f"is not a field of this endpoint; use {other}"):
            read(model, path, **BODIES[other])


def test_members_of_stream_options_that_nobody_knows_are_named(model: LoadedModel) -> None:
    options = {"include_usage": True, "include_obfuscation": False, "include_wisdom": True}
    request = read(model, CHAT, stream=True, stream_options=options)
    assert request.unknown == ("stream_options.include_wisdom",)


# --- reasoning --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "rendered"),
    [
        ({"reasoning_effort": "low"}, "low True"),
        ({"reasoning": {"effort": "none"}}, "none False"),
        ({"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}}, "high False"),
        ({}, "- -"),
    ],
)
def test_the_effort_of_reasoning_goes_to_a_template_that_knows_it(
    model: LoadedModel, fields: dict[str, Any], rendered: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "{{ messages[0].content }} {{ reasoning_effort | default('-') }} {{ enable_thinking | default('-') }}"
    with closing(ChatTemplate(source, "test")) as template:
        monkeypatch.setattr(LoadedModel, "template", template)
        request = read(model, CHAT, **fields)
    assert model.tokenizer.decode(request.prompts[0]) == f"Hello {rendered}"


def test_the_effort_of_reasoning_changes_nothing_elsewhere(model: LoadedModel) -> None:
    assert read(model, CHAT, reasoning_effort="high") == read(model, CHAT)
    with pytest.raises(ApiError, match="reasoning_effort is 3; it has to be a string"):
        read(model, CHAT, reasoning_effort=3)
