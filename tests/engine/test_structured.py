"""Structured output: every answer keeps to its form, whatever else runs, and others do not notice."""

import json
import pickle
import sys
from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from support.engines import engine, run

from twostep.engine.engine import Engine
from twostep.engine.outputs import RequestOutput
from twostep.engine.params import SamplingParams
from twostep.engine.text.constraint import LIMITS, Constraint, Grammars
from twostep.engine.text.structured_output import ANY_OBJECT, MAX_CHARACTERS, StructuredOutput
from twostep.errors import InvalidParameterError
from twostep.model.loaded import LoadedModel, open_model
from twostep.openai_api.api_error import ApiError
from twostep.openai_api.api_request import read_request
from twostep.openai_api.tool_calls import parse_tool_calls

pytest.importorskip("llguidance")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", '\u00e9\n"']}, "minItems": 1, "maxItems": 3},
        "home": {"$ref": "#/$defs/place"},
    },
    "required": ["name", "age", "tags", "home"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "anyOf": [
                {"type": "null"},
                {
                    "type": "object",
                    "properties": {"x": {"type": "number", "minimum": -1, "maximum": 1, "multipleOf": 0.25}},
                    "required": ["x"],
                    "additionalProperties": False,
                },
            ]
        }
    },
}
SCHEMAS: dict[str, Any] = {
    "object": PERSON,
    "list": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    "pattern": {"type": "string", "pattern": "^[a-f]{2,4}-[0-9]+$", "maxLength": 8},
    "format": {"type": "object", "properties": {"id": {"type": "string", "format": "uuid"}}, "required": ["id"],
               "additionalProperties": False},
    "const": {"const": {"a": [1, None, "\u6f22"]}},
}  # fmt: skip
ENOUGH = 220
"""Tokens for any answer to these."""


def schema(value: Any) -> StructuredOutput:
    return StructuredOutput("json_schema", json.dumps(value))


@pytest.fixture(scope="module")
def model(default_model_path: Path) -> LoadedModel:
    return open_model(default_model_path)


@pytest.fixture(scope="module")
def prompt(model: LoadedModel) -> list[int]:
    messages = [{"role": "user", "content": "Describe somebody as JSON."}]
    return model.tokenizer.encode(model.template.render(messages).text, special=True)


@pytest.fixture(scope="module")
def served(model: LoadedModel) -> Iterator[Engine]:
    with engine(model=model, threads=2, max_num_seqs=16, max_model_len=512) as made:
        yield made


def texts(output: RequestOutput) -> list[str]:
    assert [(choice.finish_reason, choice.error) for choice in output.choices] == [("stop", None)] * len(output.choices)
    return [choice.text for choice in output.choices]


# --- answers ----------------------------------------------------------------------------------------------------------


def test_every_answer_follows_its_schema(served: Engine, prompt: list[int]) -> None:
    for name, wanted in SCHEMAS.items():
        params = SamplingParams(n=4, seed=len(name), max_tokens=ENOUGH, structured=schema(wanted))
        served.submit(prompt, params, id=name)
    outputs = run(served)
    for name, wanted in SCHEMAS.items():
        for text in texts(outputs[name]):
            jsonschema.validate(json.loads(text), wanted, format_checker=jsonschema.FormatChecker())


def test_other_forms_are_kept_too(served: Engine, prompt: list[int]) -> None:
    forms = {
        "regex": StructuredOutput("regex", "[0-9]{3}-(ab|cd)"),
        "choice": StructuredOutput("choice", '["yes", "no \\"\\n"]'),
        "lark": StructuredOutput("grammar", 'start: "a" ("b" | "c"){2}'),
        "gbnf": StructuredOutput("grammar", 'root ::= "a" ("b" | "c") "d"'),
    }
    for name, form in forms.items():
        served.submit(prompt, SamplingParams(n=3, seed=1, max_tokens=30, structured=form), id=name)
    answers = {name: set(texts(output)) for name, output in run(served).items()}
    assert all(len(text) == 6 and text[3:] in ("-ab", "-cd") and text[:3].isdecimal() for text in answers["regex"])
    assert answers["choice"] <= {"yes", 'no "\n'}
    assert answers["lark"] <= {"abb", "abc", "acb", "acc"}
    assert answers["gbnf"] <= {"abd", "acd"}


def test_an_answer_cut_short_is_a_beginning(served: Engine, prompt: list[int]) -> None:
    served.submit(prompt, SamplingParams(seed=1, max_tokens=6, structured=schema(PERSON)), id="cut")
    served.submit(prompt, SamplingParams(seed=1, max_tokens=60, structured=schema(PERSON), stop='",'), id="stopped")
    outputs = run(served)
    [cut], [stopped] = outputs["cut"].choices, outputs["stopped"].choices
    assert (cut.finish_reason, cut.text[0]) == ("length", "{")
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", '",')
    assert stopped.text.lstrip("{ \n\t").startswith('"name"')


def test_min_tokens_hold_the_end_back_only_where_the_form_goes_on(served: Engine, prompt: list[int]) -> None:
    word = SamplingParams(seed=1, max_tokens=40, min_tokens=12, structured=StructuredOutput("regex", "([a-z]{1,5} )+"))
    fixed = SamplingParams(seed=1, max_tokens=40, min_tokens=30, structured=StructuredOutput("choice", '["yes"]'))
    served.submit(prompt, word, id="word")
    served.submit(prompt, fixed, id="fixed")
    outputs = run(served)
    assert len(outputs["word"].choices[0].token_ids) >= 12
    assert texts(outputs["fixed"]) == ["yes"]


# --- company ----------------------------------------------------------------------------------------------------------


def requests() -> dict[str, SamplingParams]:
    """Free and constrained ones, alternately."""
    asked = {}
    for seed in range(4):
        asked[f"free {seed}"] = SamplingParams(seed=seed, max_tokens=40, logprobs=3, n=1 + seed % 2)
        asked[f"kept {seed}"] = SamplingParams(
            seed=seed, max_tokens=60, logprobs=3, n=2, structured=schema(PERSON), min_tokens=seed * 4
        )
    return asked


def said(output: RequestOutput) -> list[Any]:
    return [(choice.token_ids, choice.text, choice.logprobs, choice.finish_reason) for choice in output.choices]


def answers(model: LoadedModel, prompt: list[int], alone: bool = False, **settings: Any) -> tuple[dict[str, Any], int]:
    with engine(model=model, threads=2, **settings) as made:
        outputs = {}
        for name, params in requests().items():
            made.submit(prompt, params, id=name)
            if alone:
                outputs |= run(made)
        outputs |= run(made)
        return {name: said(output) for name, output in outputs.items()}, made.scheduler.counters.preemptions


def test_neither_company_nor_preemption_nor_who_makes_masks_matters(model: LoadedModel, prompt: list[int]) -> None:
    alone, _ = answers(model, prompt, alone=True, overlap=False)
    together, preemptions = answers(model, prompt)
    assert together == alone
    assert preemptions == 0
    tight, preemptions = answers(model, prompt, kv_memory="24 blocks", max_model_len=256)
    assert tight == alone
    assert preemptions > 0


# --- masks ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def grammars(model: LoadedModel) -> Grammars:
    return Grammars(model.tokenizer, model.network.shape.vocab)


def allowed(mask: np.ndarray[Any, np.dtype[np.uint32]]) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def walk(constraint: Constraint, tokens: list[int]) -> Iterator[set[int]]:
    """What may follow the first 0, 1, ... all tokens."""
    for count in range(len(tokens) + 1):
        yield allowed(constraint.mask(np.array(tokens[:count], np.int32), None))


def test_the_end_is_allowed_only_when_the_form_is_complete(grammars: Grammars, model: LoadedModel) -> None:
    ends = model.tokenizer.eos_ids
    tokens = model.tokenizer.encode("abab", special=False)
    masks = list(walk(grammars.constraint(StructuredOutput("regex", "(ab){1,2}")), tokens))
    seen = [model.tokenizer.decode(tokens[:count]) for count in range(len(tokens) + 1)]
    assert [ends <= mask for mask in masks] == [text in ("ab", "abab") for text in seen]
    assert masks[-1] == ends
    assert all(not mask & model.tokenizer.vocabulary.control.keys() - ends for mask in masks)


def test_a_mask_allows_exactly_what_can_go_on(grammars: Grammars, model: LoadedModel) -> None:
    """Against a naive search of the vocabulary."""
    words = ["yes", "yellow", "no"]
    [mask] = walk(grammars.constraint(StructuredOutput("choice", json.dumps(words))), [])
    ids = range(model.tokenizer.vocab_size)
    spelt = {id_: model.tokenizer.token_bytes(id_).decode(errors="replace") for id_ in ids}
    begins = {id_ for id_, text in spelt.items() if any(word.startswith(text) for word in words)}
    assert mask == begins


def test_rows_of_the_head_that_are_no_tokens_are_never_allowed(model: LoadedModel) -> None:
    vocab = model.tokenizer.vocab_size
    [mask] = walk(Grammars(model.tokenizer, vocab + 100).constraint(StructuredOutput("regex", "(.|\n)*")), [])
    assert max(mask) < vocab
    words = Grammars(model.tokenizer, vocab + 100).constraint(ANY_OBJECT).mask(np.empty(0, np.int32), None)
    assert (words.dtype, len(words)) == (np.uint32, -(-(vocab + 100) // 32))


def test_a_mask_is_the_same_however_often_it_is_asked_for(grammars: Grammars, model: LoadedModel) -> None:
    tokens = np.array(model.tokenizer.encode('{"name": "A', special=False), np.int32)
    stepwise, at_once = grammars.constraint(schema(PERSON)), grammars.constraint(schema(PERSON))
    for count in range(len(tokens) + 1):
        first = stepwise.mask(tokens[:count], None).copy()
        assert (stepwise.mask(tokens[:count], None) == first).all()
    assert (at_once.mask(tokens, None) == first).all()


# --- refusals ---------------------------------------------------------------------------------------------------------


def refusal(served: Engine, form: StructuredOutput) -> str:
    with pytest.raises(InvalidParameterError) as refused:
        served.submit([5], SamplingParams(structured=form))
    assert refused.value.param == "structured"
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (schema({"type": "strin"}), "JSON schema cannot be used: Invalid type: strin"),
        (schema({"type": "array", "uniqueItems": True}), 'JSON schema cannot be used: Unimplemented keys: ["uniqueIt'),
        (schema({"$ref": "#"}), "JSON schema cannot be used: no text satisfies it"),
        (schema({"$ref": "https://example.com/schema"}), "JSON schema cannot be used: "),
        (StructuredOutput("regex", "(("), "regex cannot be used: "),
        (StructuredOutput("grammar", "start: unknown"), "grammar cannot be used: "),
        (schema({"type": "object", "properties": {f"p{i}": {} for i in range(2500)}}), "JSON schema cannot be used: "),
        (schema({"properties": {f"p{i}": {"maximum": 10**15 - i} for i in range(1500)}}), "JSON schema cannot be used"),
    ],
    ids=["unknown type", "not enforced", "empty", "elsewhere", "regex", "grammar", "wide", "large"],
)
def test_what_cannot_be_kept_to_is_refused_with_the_reason(
    served: Engine, form: StructuredOutput, message: str
) -> None:
    assert refusal(served, form).startswith("structured: the " + message)


def test_a_grammar_that_exceeds_a_limit_later_ends_its_answer_alone(
    served: Engine, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LIMITS, "max_lexer_states", 500)
    for name, regex in (("large", "(x.{0,200}y.{0,200}){20}"), ("small", "[ab]{20}")):
        params = SamplingParams(seed=1, max_tokens=60, structured=StructuredOutput("regex", regex))
        served.submit(prompt, params, id=name)
    outputs = run(served)
    [failed] = outputs["large"].choices
    assert failed.finish_reason == "error"
    assert str(failed.error).startswith("the answer's grammar cannot be followed: lexer error: too many states")
    assert len(texts(outputs["small"])[0]) == 20


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("xml", "x", "structured: kind is 'xml'; it has to be one of json_schema, regex, choice, grammar"),
        ("regex", "", "structured: text is ''; it has to be a string of at least one character"),
        ("regex", "a" * (MAX_CHARACTERS + 1), f"structured: text has {MAX_CHARACTERS + 1} characters; at most"),
        ("json_schema", "[]", "structured: text is []; a JSON schema has to be an object, true or false"),
        ("json_schema", "{", "structured: text is '{', which is not JSON: "),
        ("json_schema", "[" * 60_000, "structured: text is '[[["),
        ("choice", '["a", 1]', 'structured: text is ["a", 1]; it has to be a JSON list of at least one non-empty'),
        ("choice", "[]", "structured: text is []; it has to be a JSON list of at least one non-empty string"),
    ],
)
def test_a_form_that_is_none_is_refused(kind: Any, text: str, message: str) -> None:
    with pytest.raises(InvalidParameterError) as refused:
        StructuredOutput(kind, text)
    assert str(refused.value).startswith(message)


def test_parameters_check_the_form_and_travel() -> None:
    params = SamplingParams(structured=ANY_OBJECT)
    assert pickle.loads(pickle.dumps(params)) == params
    with pytest.raises(InvalidParameterError, match="structured is 'json'; it has to be a StructuredOutput"):
        SamplingParams(structured="json")  # type: ignore[arg-type]
    with pytest.raises(InvalidParameterError, match="ignore_eos is true and structured given"):
        SamplingParams(structured=ANY_OBJECT, ignore_eos=True)


def test_without_the_package_the_refusal_says_what_to_install(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(InvalidParameterError, match=r"pip install 'llguidance>=1.9'$"):
        Grammars(model.tokenizer, model.tokenizer.vocab_size).check(ANY_OBJECT)


def test_without_a_token_that_ends_an_answer_it_is_refused(model: LoadedModel) -> None:
    endless = copy(model.tokenizer)
    endless.vocabulary = replace(endless.vocabulary, eos_ids=frozenset())
    with pytest.raises(InvalidParameterError, match="the model has no token that ends an answer"):
        Grammars(endless, endless.vocab_size).check(ANY_OBJECT)


def test_without_a_tokenizer_it_is_refused() -> None:
    with engine() as tokens_only, pytest.raises(InvalidParameterError, match="skip_tokenizer_init"):
        tokens_only.submit([5], SamplingParams(structured=ANY_OBJECT))


# --- bodies -----------------------------------------------------------------------------------------------------------


def asked(model: LoadedModel, **body: Any) -> StructuredOutput | None:
    messages = [{"role": "user", "content": "Hello"}]
    return read_request("/v1/chat/completions", {"messages": messages, **body}, model, ["small"]).params.structured


@pytest.mark.parametrize(
    ("body", "form"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, ANY_OBJECT),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": PERSON, "strict": True}}},
            schema(PERSON),
        ),
        ({"guided_json": PERSON}, schema(PERSON)),
        ({"guided_json": json.dumps(PERSON)}, schema(PERSON)),
        ({"guided_regex": "a+"}, StructuredOutput("regex", "a+")),
        ({"guided_choice": ["a", "b"]}, StructuredOutput("choice", '["a", "b"]')),
        ({"guided_grammar": 'start: "a"'}, StructuredOutput("grammar", 'start: "a"')),
        ({"structured_outputs": {"json": PERSON, "regex": None}}, schema(PERSON)),
        ({"structured_outputs": {"json_object": True}}, ANY_OBJECT),
        ({"guided_choice": ["a"], "response_format": {"type": "text"}}, StructuredOutput("choice", '["a"]')),
    ],
)
def test_bodies_ask_for_forms(model: LoadedModel, body: dict[str, Any], form: StructuredOutput | None) -> None:
    assert asked(model, **body) == form
    raw = read_request("/v1/completions", {"prompt": "Once", **body}, model, ["small"])
    assert raw.params.structured == form


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        ({"response_format": "json"}, "response_format is 'json'; it has to be an object with type", "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema is None; it", "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}},
            "response_format.json_schema.strict is 1; it has to be true or false",
            "response_format",
        ),
        ({"guided_json": 3}, "guided_json is 3; it has to be a JSON schema", "guided_json"),
        ({"guided_json": "{"}, "guided_json: structured: text is '{', which is not JSON", "guided_json"),
        ({"guided_choice": "a"}, "guided_choice is 'a'; it has to be a list of strings", "guided_choice"),
        ({"guided_choice": []}, "guided_choice: structured: text is []", "guided_choice"),
        ({"guided_regex": 1}, "guided_regex is 1; it has to be a string", "guided_regex"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs is {", "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs is {", "structured_outputs"),
        (
            {"guided_regex": "a", "response_format": {"type": "json_object"}},
            "response_format and guided_regex each set the answer's form; send one of them",
            "response_format",
        ),
    ],
)
def test_bad_forms_in_bodies_are_refused(model: LoadedModel, body: dict[str, Any], message: str, param: str) -> None:
    with pytest.raises(ApiError) as refused:
        asked(model, **body)
    assert str(refused.value).startswith(message)
    assert (refused.value.status, refused.value.param) == (400, param)


# --- forced calls -----------------------------------------------------------------------------------------------------

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/digit"}, "b": {"$ref": "#/$defs/digit"}},
            "required": ["a", "b"],
            "additionalProperties": False,
            "$defs": {"digit": {"type": "integer", "minimum": 0, "maximum": 9}},
        },
    },
}
NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "additionalProperties": False}}}


@pytest.mark.parametrize(
    ("choice", "parallel", "names"),
    [("required", True, {"add", "now"}), ("required", False, {"add", "now"}), ("add", True, {"add"})],
)
def test_forced_calls_are_calls_with_arguments_of_their_schema(
    model: LoadedModel, served: Engine, choice: str, parallel: bool, names: set[str]
) -> None:
    forced = choice if choice == "required" else {"type": "function", "function": {"name": choice}}
    body = {"tools": [ADD, NOW], "tool_choice": forced, "parallel_tool_calls": parallel, "n": 6, "seed": 2}
    messages = [{"role": "user", "content": "What is 2 + 3?"}]
    request = read_request("/v1/chat/completions", {"messages": messages, "max_tokens": 250, **body}, model, ["small"])
    served.submit(request.prompts[0], request.params, id="forced")
    for choice_output in run(served)["forced"].choices:
        parsed = parse_tool_calls(choice_output.text, "")
        assert parsed.content is None
        assert len(parsed.tool_calls) == 1 or (parallel and choice == "required")
        for call in parsed.tool_calls if choice_output.finish_reason == "stop" else ():
            function = call["function"]
            assert function["name"] in names
            wanted = ADD if function["name"] == "add" else NOW
            jsonschema.validate(json.loads(function["arguments"]), wanted["function"]["parameters"])


def follows(model: LoadedModel, grammars: Grammars, text: str, **body: Any) -> bool:
    """Whether the answer may be this text."""
    form = asked(model, **body)
    assert form is not None
    tokens = model.tokenizer.encode(text, special=False)
    *before, last = walk(grammars.constraint(form), tokens)
    may_end = bool(model.tokenizer.eos_ids & last)
    return may_end and all(token in mask for token, mask in zip(tokens, before, strict=True))


def test_calls_left_to_the_model_are_bound_only_after_their_tag(model: LoadedModel, grammars: Grammars) -> None:
    good = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    bad = good.replace("1", "true")
    tools = {"tools": [ADD, NOW]}
    for text in ("free < text", good, f"text {good}\n{good} text"):
        assert follows(model, grammars, text, **tools)
    for text in (bad, f"{good}\n{bad}", '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>'):
        assert not follows(model, grammars, text, **tools)
    assert follows(model, grammars, "```python\nx = {}\n```", **tools)
    bare = good.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
    for text in (bare, f"```json\n{bare}\n```"):
        assert follows(model, grammars, text, **tools)
        assert not follows(model, grammars, text.replace("1", "true"), **tools)
    assert follows(model, grammars, f"text {good}", **tools, parallel_tool_calls=False)
    assert not follows(model, grammars, good + good, **tools, parallel_tool_calls=False)


def test_content_with_a_form_and_calls_exclude_each_other(model: LoadedModel, grammars: Grammars) -> None:
    body = {"tools": [ADD], "guided_json": {"type": "object", "properties": {"x": {"type": "null"}}}}
    good = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    assert follows(model, grammars, '{"x": null}', **body)
    assert follows(model, grammars, good, **body)
    assert not follows(model, grammars, "text", **body)
    assert not follows(model, grammars, good + '{"x": null}', **body)


def test_an_ambiguous_grammar_ends_its_answer_before_its_masks_hold_others_up(
    grammars: Grammars, model: LoadedModel
) -> None:
    """Items of the parser grow with the square of the answer's length: counted, not timed."""
    form = StructuredOutput("grammar", 'start: a\na: a a | "x" | b\nb: a b | b a | "y" b?\n')
    constraint, output, rng = grammars.constraint(form), list[int](), np.random.default_rng(0)
    pieces = [piece for text in ("x", "y", "xy", "yx", "xx", "yy") for piece in encoded(model, text)]
    while constraint.problem is None and len(output) < 200:
        constraint.mask(np.array(output, np.int32), None)
        output.append(int(rng.choice(pieces)))
    assert constraint.problem is not None
    assert "Too many items" in constraint.problem


def encoded(model: LoadedModel, text: str) -> list[int]:
    return model.tokenizer.encode(text, special=False, add_bos=False)
