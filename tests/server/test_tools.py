"""Structured output and tools over HTTP, as the official client uses them."""

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel
from support.http_server import NAME, Served

pytest.importorskip("llguidance")

ASKED: dict[str, Any] = {"model": NAME, "seed": 4, "max_tokens": 120}
QUESTION: Any = [{"role": "user", "content": "What is 2 + 3?"}]


class Digits(BaseModel):
    """Adds."""

    a: bool
    b: bool


TOOLS: Any = [openai.pydantic_function_tool(Digits, name="add")]
CALL: dict[str, Any] = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "add"}}}


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as made:
        yield made


def test_a_schema_made_by_pydantic_is_kept_to(client: openai.OpenAI) -> None:
    reply = client.chat.completions.parse(messages=QUESTION, response_format=Digits, **ASKED)
    assert isinstance(reply.choices[0].message.parsed, Digits)


def test_a_forced_call_comes_whole_and_in_pieces(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(messages=QUESTION, **CALL, **ASKED).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content is None
    assert whole.message.tool_calls
    [call] = whole.message.tool_calls
    assert call.type == "function"
    Digits.model_validate_json(call.function.arguments)

    pieces, name, arguments = 0, "", ""
    chunks = list(client.chat.completions.create(messages=QUESTION, stream=True, **CALL, **ASKED))
    for delta in (chunk.choices[0].delta for chunk in chunks):
        assert not delta.content
        for piece in delta.tool_calls or ():
            assert piece.function
            pieces += 1
            name += piece.function.name or ""
            arguments += piece.function.arguments or ""
    assert (name, arguments) == ("add", call.function.arguments)
    assert pieces > 3
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_a_conversation_goes_on_with_the_result(client: openai.OpenAI) -> None:
    message = client.chat.completions.create(messages=QUESTION, **CALL, **ASKED).choices[0].message
    assert message.tool_calls
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "5"}
    following: Any = [*QUESTION, message, result]
    reply = client.chat.completions.create(messages=following, tools=TOOLS, tool_choice="none", **ASKED)
    assert reply.choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_cannot_be_kept_to_is_a_bad_request(client: openai.OpenAI, stream: bool) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strin"}}}
    with pytest.raises(openai.BadRequestError, match="the JSON schema cannot be used: Invalid type: strin"):
        client.chat.completions.create(messages=QUESTION, response_format=form, stream=stream, **ASKED)


@pytest.mark.parametrize(
    ("fields", "answers"),
    [
        ({"grammar": 'root ::= "\\u00e9" ("a" | "b")'}, {"\u00e9a", "\u00e9b"}),
        ({"grammar": 'start: "x" ("a" | "b")'}, {"xa", "xb"}),
        ({"json_schema": {"enum": [1, "e\u0301"]}}, {"1", '"e\u0301"'}),
        ({"response_format": {"type": "json_object", "schema": {"const": 7}}}, {"7"}),
    ],
)
def test_forms_in_llama_cpp_s_fields_are_kept(client: openai.OpenAI, fields: dict[str, Any], answers: set[str]) -> None:
    reply = client.chat.completions.create(messages=QUESTION, extra_body=fields, **ASKED)
    assert reply.choices[0].message.content in answers


PATTERN = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string", "pattern": "(?=a)b"}}}


@pytest.mark.parametrize(
    ("field", "form", "reason"),
    [
        ("response_format", PATTERN, "look-around, including look-ahead and look-behind, is not supported"),
        ("guided_choice", ["yes", "\x04"], "it spells out U+0004"),  # the engine finds this and the next
        ("structured_outputs", {"regex": "a\x04"}, "it spells out U+0004"),
        ("guided_regex", "[^\\x00-\U0010ffff]", "no text satisfies it"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_the_refusal_of_a_form_names_the_body_s_field_and_the_reason(
    client: openai.OpenAI, field: str, form: Any, reason: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError, match=re.escape(reason)) as refused:
        client.chat.completions.create(messages=QUESTION, stream=stream, extra_body={field: form}, **ASKED)
    assert refused.value.param == field
    assert refused.value.body["message"].startswith(f"{field}: the ")  # type: ignore[index]


def chained(length: int) -> dict[str, Any]:
    rules = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**rules, f"d{length}": {"type": "null"}}}


DOUBLED = "start: T0\n" + "\n".join(f"T{i}: T{i + 1} T{i + 1}" for i in range(1500)) + '\nT1500: "a"'


@pytest.mark.parametrize(
    ("field", "form", "message"),
    [("guided_json", chained(1300), "too deep"), ("guided_grammar", DOUBLED, "takes more than 1 s")],
)
def test_what_would_break_the_engine_is_a_bad_request(
    client: openai.OpenAI, field: str, form: Any, message: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        client.chat.completions.create(messages=QUESTION, extra_body={field: form}, **ASKED)
    assert client.chat.completions.create(messages=QUESTION, **{**ASKED, "max_tokens": 2}).choices


def test_json_mode_gives_an_object_or_the_beginning_of_one(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(messages=QUESTION, response_format={"type": "json_object"}, **ASKED)
    text = reply.choices[0].message.content or ""
    assert text.startswith("{")
    assert reply.choices[0].finish_reason == "length" or isinstance(json.loads(text), dict)
