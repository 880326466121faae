"""Tools: what a body offers, how a conversation shows it, and calls read from answers, whole and as they come."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostep.engine.outputs import ChoiceOutput, Delta, RequestOutput, Timeline
from twostep.model.loaded import LoadedModel, open_model
from twostep.model.template import ChatTemplate
from twostep.openai_api.api_error import ApiError
from twostep.openai_api.api_request import ApiRequest, read_request
from twostep.openai_api.responses import Chunks, response_body
from twostep.openai_api.tool_calls import CLOSE, OPEN, ToolStream, finish_reason, parse_tool_calls
from twostep.openai_api.tools import called_messages, knows_tools

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}
HELLO = [{"role": "user", "content": "Hello"}]

# --- reading calls ----------------------------------------------------------------------------------------------------


def call_text(name: str, arguments: str) -> str:
    return f'{OPEN}\n{{"name": "{name}", "arguments": {arguments}}}\n{CLOSE}'


def put_together(deltas: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Content and calls in the order in which they came, pieces joined."""
    parts: list[tuple[str, ...]] = []
    for delta in deltas:
        if "content" in delta:
            before = parts.pop()[1] if parts and parts[-1][0] == "content" else ""
            parts.append(("content", before + delta["content"]))
        for piece in delta.get("tool_calls", ()):
            if "id" in piece:
                parts.append(("call", piece["id"], piece["function"]["name"], piece["function"]["arguments"]))
            else:
                *call, arguments = parts.pop()
                parts.append((*call, arguments + piece["function"]["arguments"]))
    return parts


def streamed(text: str, cuts: list[int]) -> list[tuple[str, ...]]:
    stream, deltas = ToolStream("call_", ["f", "g"]), list[dict[str, Any]]()
    ends = [*sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    for start, end in zip([0, *ends], ends, strict=False):
        deltas += stream.push(text[start:end])
    return put_together([*deltas, *stream.finish()])


PIECES = st.sampled_from(
    [
        OPEN, CLOSE, call_text("f", '{"a": "}</tool_call>\\""}'), '{"name": "f", "arguments": {', "{", "}", "}}",
        '"a": "<tool_call>"', '{"arguments": {"x": 1}, "name": "g"}', '{"name": "h", "arguments": "{}"}', "<", "<tool",
        '{"name": "</tool_call>", "arguments": {}}', "```", "json",
        '{"name": "f", "arguments": {"a": 1}}', '"name":', " ", "\n", "\u3000", "text", '"', "\\", "[",
    ]
)  # fmt: skip


@given(st.lists(PIECES, max_size=10).map("".join) | st.text(), st.lists(st.integers(0, 10_000), max_size=30))
def test_any_chunking_of_any_text_gives_the_same(text: str, cuts: list[int]) -> None:
    assert streamed(text, cuts) == streamed(text, [])
    assert streamed(text, list(range(len(text)))) == streamed(text, [])


NAMES = st.from_regex("[a-zA-Z0-9_-]{1,64}", fullmatch=True)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(st.tuples(NAMES, st.dictionaries(st.text(), JSON, max_size=3)), min_size=1, max_size=4)


@given(CALLS, st.text().filter(lambda text: "<" not in text), st.lists(st.integers(0, 10_000), max_size=20))
def test_calls_that_a_model_wrote_are_found_with_their_arguments(
    calls: list[tuple[str, dict[str, Any]]], content: str, cuts: list[int]
) -> None:
    text = content + "\n" + "\n".join(call_text(name, json.dumps(arguments)) for name, arguments in calls) + "\n"
    parsed = parse_tool_calls(text, "call_")
    assert parsed.content == (content.rstrip() or None)
    found = [call["function"] for call in parsed.tool_calls]
    assert [(call["name"], json.loads(call["arguments"])) for call in found] == calls
    assert [call["id"] for call in parsed.tool_calls] == [f"call_{number}" for number in range(len(calls))]
    said = [("content", parsed.content)] if parsed.content else []
    written = [("call", call["id"], *call["function"].values()) for call in parsed.tool_calls]
    assert streamed(text, cuts) == [*said, *written]


@given(st.text().filter(lambda text: OPEN not in text))
def test_text_without_calls_is_content_to_the_letter(text: str) -> None:
    assert parse_tool_calls(text, "") == (text, [])


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f'{OPEN}{{"arguments": {{"é": 1}}, "name": "f"}}{CLOSE}', None, [("f", '{"é": 1}')]),
        (f'{OPEN}{{"name": "f"}}{CLOSE}', None, [("f", "{}")]),
        (f'{OPEN}{{"name": "f", "arguments": "{{}}"}}', None, [("f", "{}")]),
        (call_text("f", "{ }") + "\nafter ", "after ", [("f", "{ }")]),
        (call_text("f", "{}") + OPEN + '{"name": "g", "arguments": {}}', None, [("f", "{}"), ("g", "{}")]),
        (f'{OPEN}{{"name": "f", "arguments": {{"a": "x', None, [("f", '{"a": "x')]),
        (f'{OPEN}{{"name": "f", "arguments": {{"a": {CLOSE} after', "after", [("f", '{"a": ')]),
        (f"see: {OPEN}no call{CLOSE}", f"see: {OPEN}no call{CLOSE}", []),
        (f'{OPEN}{{"name": 1}}{CLOSE}.', f'{OPEN}{{"name": 1}}{CLOSE}.', []),
        (f'{OPEN}{{"name": "f", "arguments": 1}}{CLOSE}', f'{OPEN}{{"name": "f", "arguments": 1}}{CLOSE}', []),
        (f"{OPEN}{{", f"{OPEN}{{", []),
        (f"{OPEN}{'[' * 100_000}{CLOSE}", f"{OPEN}{'[' * 100_000}{CLOSE}", []),
    ],
)
def test_what_is_odd_is_a_call_or_content_and_never_lost(
    text: str, content: str | None, calls: list[tuple[str, str]]
) -> None:
    parsed = parse_tool_calls(text, "")
    assert parsed.content == content
    assert [tuple(call["function"].values()) for call in parsed.tool_calls] == calls


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('{"name": "f", "arguments": {"a": 1}}', None, [("f", '{"a": 1}')]),
        ('```json\n{\n  "name": "f",\n  "arguments": {"a": 1}\n}\n```', None, [("f", '{"a": 1}')]),
        ('```\n{"name":"f","arguments":{}}\n{"name":"g","arguments":{}}```', None, [("f", "{}"), ("g", "{}")]),
        ('{"name": "f", "arguments": {}}\nDone', "Done", [("f", "{}")]),
        ('{"name": "f", "arguments": {"a', None, [("f", '{"a')]),
        ('{"name": "other", "arguments": {}}', '{"name": "other", "arguments": {}}', []),
        ('{"name": "f", "argu', '{"name": "f", "argu', []),
        ('See: {"name": "f", "arguments": {}}', 'See: {"name": "f", "arguments": {}}', []),
        ("```json\n[1]\n```", "```json\n[1]\n```", []),
    ],
)
def test_a_bare_call_of_an_offered_function_is_one(
    text: str, content: str | None, calls: list[tuple[str, str]]
) -> None:
    """So Qwen2.5-Coder's small models call."""
    parsed = parse_tool_calls(text, "", ["f", "g"])
    assert parsed.content == content
    assert [tuple(call["function"].values()) for call in parsed.tool_calls] == calls


def test_only_what_could_be_a_bare_call_is_held_back() -> None:
    stream = ToolStream("call_", ["f"])
    assert stream.push('{"na') == []
    assert stream.push("tion") == [{"content": '{"nation'}]
    assert stream.push('": "x"}') == [{"content": '": "x"}'}]


def test_arguments_come_as_they_are_written_and_tags_are_held_back() -> None:
    stream = ToolStream("call_")
    assert stream.push("I look") == [{"content": "I look"}]
    assert stream.push(" \n<tool_") == []
    assert stream.push('call>\n{"name": "f", "arguments":') == []
    [begun, braced] = stream.push(' {"a"')
    assert begun["tool_calls"][0] == {
        "index": 0, "id": "call_0", "type": "function", "function": {"name": "f", "arguments": ""},
    }  # fmt: skip
    assert braced == {"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]}
    assert stream.push(": 1}") == [{"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]}]
    assert stream.push("}\n</tool_call>") == stream.finish() == []


def test_the_end_of_an_answer_says_whether_it_calls() -> None:
    assert [finish_reason("stop", 0), finish_reason("stop", 2)] == ["stop", "tool_calls"]
    assert finish_reason("length", 1) == "length"


# --- bodies -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm(default_model_path: Path) -> LoadedModel:
    return open_model(default_model_path)


def chat(model: LoadedModel, /, **body: Any) -> ApiRequest:
    return read_request("/v1/chat/completions", {"messages": HELLO, **body}, model, ["small"])


def prompt_text(model: LoadedModel, request: ApiRequest) -> str:
    return model.tokenizer.decode(request.prompts[0], skip_special=False)


def test_a_template_without_tools_says_them_in_the_system_message(smollm: LoadedModel) -> None:
    assert not knows_tools(smollm.template)
    system = [{"role": "system", "content": "Be brief."}, *HELLO]
    text = prompt_text(smollm, chat(smollm, tools=[WEATHER, TIME], messages=system))
    assert text.startswith("<|im_start|>system\nBe brief.\n\n")
    assert json.dumps(WEATHER) in text
    assert json.dumps(TIME) in text
    assert OPEN in text
    assert prompt_text(smollm, chat(smollm, tools=[WEATHER])).count("<|im_start|>system") == 1


def test_tools_are_said_in_the_message_of_a_developer_too(smollm: LoadedModel) -> None:
    """Many templates allow one system message, which the developer's becomes."""
    developer = [{"role": "developer", "content": "Be brief."}, *HELLO]
    text = prompt_text(smollm, chat(smollm, tools=[WEATHER], messages=developer))
    assert text.startswith("<|im_start|>system\nBe brief.\n\nYou can call")
    assert text.count("<|im_start|>system") == 1


def test_no_tools_are_said_where_none_may_be_called(smollm: LoadedModel) -> None:
    quiet = chat(smollm, tools=[WEATHER], tool_choice="none")
    assert quiet == chat(smollm) == chat(smollm, tools=[])
    assert quiet.functions == ()
    assert chat(smollm, tools=[WEATHER]).functions == ("get_weather",)


@pytest.mark.models
def test_a_template_with_tools_says_them_itself(model_path: Callable[[str], Path]) -> None:
    qwen = open_model(model_path("qwen2.5-coder-0.5b"))
    assert knows_tools(qwen.template)
    text = prompt_text(qwen, chat(qwen, tools=[WEATHER], messages=CONVERSATION))
    assert f"<tools>\n{json.dumps(WEATHER)}\n</tools>" in text
    assert call_text("get_weather", '{"city": "Paris"}') in text
    assert "<tool_response>\n22 degrees\n</tool_response>" in text


CONVERSATION = [
    {"role": "user", "content": "How warm is Paris?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "22 degrees"},
]


def test_calls_and_results_are_text_where_the_template_knows_no_tools(smollm: LoadedModel) -> None:
    text = prompt_text(smollm, chat(smollm, messages=CONVERSATION))
    call = call_text("get_weather", '{"city": "Paris"}')
    assert f"<|im_start|>assistant\n{call}<|im_end|>" in text
    assert "<|im_start|>user\n<tool_response>\n22 degrees\n</tool_response><|im_end|>" in text


@pytest.mark.models
def test_no_answer_continues_after_calls_that_the_template_writes(
    smollm: LoadedModel, model_path: Callable[[str], Path]
) -> None:
    """A prompt that ends with the content would lack the calls. Where they are text, they are content."""
    messages = [CONVERSATION[0], {**CONVERSATION[1], "content": "Let me see."}]
    with pytest.raises(ApiError, match="ends with tool calls, which cannot be continued"):
        chat(open_model(model_path("qwen2.5-coder-0.5b")), messages=messages, continue_final_message=True)
    text = prompt_text(smollm, chat(smollm, messages=messages, continue_final_message=True))
    call = call_text("get_weather", '{"city": "Paris"}')
    assert text.endswith(f"Let me see.\n{call}")


@pytest.fixture
def knowing() -> Iterator[ChatTemplate]:
    template = ChatTemplate(f"{{{{ tools }}}} {OPEN} {{{{ messages | tojson }}}}", "a file: its template")
    yield template
    template.close()


def test_a_template_with_tools_reads_arguments_as_objects(knowing: ChatTemplate) -> None:
    [message] = called_messages([CONVERSATION[1]], knowing)
    function = {"name": "get_weather", "arguments": {"city": "Paris"}}
    assert message["tool_calls"] == [{"type": "function", "function": function}]


def many_words(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"word": {"enum": ["w" * 1000 + str(i) for i in range(40)]}}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def past(call: Any) -> list[dict[str, Any]]:
    return [*HELLO, {"role": "assistant", "content": None, "tool_calls": call}]


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        ({"tools": "x"}, "tools is 'x'; it has to be a list of at most 128 tools", "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0] is {'type': 'function'}; it has to be", "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name is 'a b'", "tools"),
        ({"tools": [TIME, TIME]}, "tools has 'get_time' more than once", "tools"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
            "tools[0].function.parameters is {'type': 'array'}; it has to be a JSON schema of type 'object'",
            "tools",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": "yes"}}]},
            "tools[0].function.strict is 'yes'; it has to be true or false",
            "tools",
        ),
        ({"tools": [TIME], "tool_choice": "any"}, "tool_choice is 'any'; it has to be 'none'", "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice is 'required'; the tools are: none", "tool_choice"),
        (
            {"tools": [TIME], "tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
            "tool_choice is {'type': 'function', 'function': {'name': 'get_weather'}}; the tools are: get_time",
            "tool_choice",
        ),
        ({"tools": [TIME], "parallel_tool_calls": 1}, "parallel_tool_calls is 1; it has", "parallel_tool_calls"),
        ({"tools": [TIME], "guided_regex": "a", "parallel_tool_calls": False}, "tools are combined with con", "tools"),
        (
            {"tools": [many_words("a"), many_words("b")], "tool_choice": "required"},
            "tools, as a grammar: structured: text has ",
            "tools",
        ),
        ({"messages": past("x")}, "messages[1].tool_calls is 'x'; it has to be a list", "messages"),
        ({"messages": past([{}])}, "messages[1].tool_calls[0] is {}; it has to be an object", "messages"),
        (
            {"messages": past([{"function": {"name": "f", "arguments": "[1]"}}])},
            "messages[1].tool_calls[0].function.arguments is '[1]'; it has to be the JSON text of an object",
            "messages",
        ),
        ({"messages": past([{"function": {"name": "f", "arguments": "{"}}])}, "messages[1].tool", "messages"),
    ],
)
def test_bad_tools_are_refused(smollm: LoadedModel, body: dict[str, Any], message: str, param: str) -> None:
    with pytest.raises(ApiError) as refused:
        chat(smollm, **body)
    assert str(refused.value).startswith(message)
    assert (refused.value.status, refused.value.param) == (400, param)


# --- replies ----------------------------------------------------------------------------------------------------------

ANSWER = "I look.\n" + call_text("get_weather", '{"city": "Rome"}') + "\n" + call_text("get_time", "{}")


def output(model: LoadedModel, text: str) -> RequestOutput:
    tokens = model.tokenizer.encode(text, special=False)
    return RequestOutput("r", (1,), (ChoiceOutput(0, text, tokens, "stop", Timeline(0, 1, (), (2,), (), 3)),), 0)


def test_a_whole_reply_has_calls_instead_of_tags(smollm: LoadedModel) -> None:
    request = chat(smollm, tools=[WEATHER, TIME])
    body = response_body(request, [output(smollm, ANSWER)], smollm.tokenizer, unique="u", created_s=0)
    [choice] = body["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": "I look.",
        "refusal": None,
        "tool_calls": [
            {"id": f"call_u_0_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for number, (name, arguments) in enumerate([("get_weather", '{"city": "Rome"}'), ("get_time", "{}")])
        ],
    }


def test_without_tools_a_reply_keeps_its_text(smollm: LoadedModel) -> None:
    body = response_body(chat(smollm), [output(smollm, ANSWER)], smollm.tokenizer, unique="u", created_s=0)
    assert body["choices"][0]["message"] == {"role": "assistant", "content": ANSWER, "refusal": None}
    assert body["choices"][0]["finish_reason"] == "stop"


def events(raw: bytes) -> list[Mapping[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in raw.decode().split("\n\n") if line]


def test_a_streamed_reply_has_the_same_calls(smollm: LoadedModel) -> None:
    request, done = chat(smollm, tools=[WEATHER, TIME], stream=True), output(smollm, ANSWER)
    chunks = Chunks(request, smollm.tokenizer, unique="u", created_s=0)
    raw = b"".join(chunks.delta(0, Delta("r", 0, ANSWER[at : at + 7], (5,))) for at in range(0, len(ANSWER), 7))
    choices = [event["choices"][0] for event in events(raw + chunks.finished(0, done))]
    assert choices[0]["delta"]["role"] == "assistant"
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["tool_calls"]
    whole = parse_tool_calls(ANSWER, "call_u_0_")
    calls = [("call", call["id"], *call["function"].values()) for call in whole.tool_calls]
    assert put_together([choice["delta"] for choice in choices]) == [("content", whole.content), *calls]
