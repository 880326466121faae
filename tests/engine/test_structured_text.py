"""Structured output and the characters of a form: those that a normaliser changes, and those that no token has."""

import json
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from time import process_time

import numpy as np
import pytest
from support.gguf_writer import write_gguf
from support.small_vocabulary import small_tokenizer_metadata

from twostep.engine.text.constraint import LIMITS, LONGEST_REASON, Grammars, refused
from twostep.engine.text.form_worker import problem
from twostep.engine.text.literals import needed_characters, plain_gbnf
from twostep.engine.text.structured_output import MAX_CHARACTERS, Kind, StructuredOutput
from twostep.errors import InvalidParameterError
from twostep.model.gguf import read_gguf
from twostep.model.tokenizer import Tokenizer, load_tokenizer

pytest.importorskip("llguidance")

UNCOMPOSED = ["e\u0301", "\u2126", "\u212b", "\u0958", "\ufb1d", "\u1100\u1161\u11a8", "a\u0323\u0307", "\u0344"]
"""Strings that normalisation to NFC changes."""

Small = Callable[..., Tokenizer]


@pytest.fixture
def small(tmp_path: Path) -> Small:
    """A tokenizer of single bytes and `hello` with the cut of this name, without a token for these bytes."""

    def load(pre: str, lacking: bytes = b"") -> Tokenizer:
        values = small_tokenizer_metadata() | {"tokenizer.ggml.pre": pre}
        made = load_tokenizer(read_gguf(write_gguf(tmp_path / "all.gguf", values)).metadata)
        gone = {id_ for id_ in range(256) if made.token_bytes(id_)[0] in lacking}
        for key in ("tokens", "token_type"):
            kept = [value for id_, value in enumerate(values[f"tokenizer.ggml.{key}"]) if id_ not in gone]  # type: ignore
            values[f"tokenizer.ggml.{key}"] = kept if key == "tokens" else np.array(kept, np.int32)
        return load_tokenizer(read_gguf(write_gguf(tmp_path / "some.gguf", values)).metadata)

    return load


def forms(text: str) -> Iterator[tuple[StructuredOutput, str]]:
    """Forms that only one answer has, with it."""
    quoted = json.dumps(text, ensure_ascii=False)
    for schema in ({"const": text}, {"enum": [text]}, {"type": "string", "pattern": f"^{text}$"}):
        yield StructuredOutput("json_schema", json.dumps(schema)), quoted
    named = {"properties": {text: {"const": 1}}, "required": [text], "additionalProperties": False}
    yield StructuredOutput("json_schema", json.dumps({"type": "object", **named})), f"{{{quoted}:1}}"
    kinds: dict[Kind, str] = {"choice": json.dumps([text]), "regex": text, "grammar": f'start: "{text}"'}
    for kind, written in kinds.items():
        yield StructuredOutput(kind, written), text
    yield StructuredOutput("grammar", f'root ::= "{text}"'), text


def only_answer(grammars: Grammars, tokenizer: Tokenizer, form: StructuredOutput) -> str:
    """The answer made of the first token that is allowed, each time."""
    constraint, output = grammars.constraint(form), list[int]()
    while len(output) < 100:
        mask = constraint.mask(np.array(output, np.int32), None)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        assert constraint.problem is None
        if set(allowed) <= tokenizer.eos_ids:
            break
        output.append(min(set(allowed) - tokenizer.eos_ids))
    return b"".join(map(tokenizer.token_bytes, output)).decode()


def check_uncomposed(tokenizer: Tokenizer) -> None:
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    for text in (*UNCOMPOSED, "".join(UNCOMPOSED), "hello e\u0301 \u2126hello"):
        for form, answer in forms(text):
            assert only_answer(grammars, tokenizer, form) == answer


@pytest.mark.parametrize("pre", ["qwen2", "gpt-2", "smollm"])
def test_texts_that_a_normaliser_would_change_are_kept(small: Small, pre: str) -> None:
    check_uncomposed(small(pre))


@pytest.mark.models
def test_texts_that_a_normaliser_would_change_are_kept_by_qwen(model_path: Callable[[str], Path]) -> None:
    check_uncomposed(load_tokenizer(read_gguf(model_path("qwen2.5-coder-0.5b")).metadata))


def test_tokens_for_a_grammar_have_exactly_the_text_s_bytes(small: Small) -> None:
    tokenizer = small("qwen2")
    for text in (*UNCOMPOSED, "hello<|im_end|>", "\r\n\x04\u4e00"):
        assert b"".join(map(tokenizer.token_bytes, tokenizer.encode_exact(text))) == text.encode()
        assert not set(tokenizer.encode_exact(text)) & tokenizer.eos_ids
    some = small("qwen2", lacking=b"\x04")
    assert tokenizer.missing_bytes == frozenset()
    assert (some.missing_bytes, some.decode(some.encode_exact("ab\x04c"))) == (frozenset({4}), "ab")


@pytest.mark.parametrize("pre", ["qwen2", "smollm"])
@pytest.mark.parametrize(
    ("kind", "text", "named"),
    [
        ("choice", json.dumps(["yes", "a\x04b"]), "U+0004"),
        ("regex", "ab\x04", "U+0004"),
        ("regex", r"ab\x04?", "U+0004"),
        ("regex", r"ab\u{4}", "U+0004"),
        ("regex", r"ab[\x04]", "U+0004"),
        ("regex", r"abcdefgh\f", "U+000C"),
        ("regex", r"abcdefgh[\x04\f]", "U+0004"),
        ("regex", r"abcdefgh[\x{e90}-\x{eff}\x04]", "U+0E90"),
        ("regex", "abcdefgh[\U00040000-\U0004ffff]", "U+40000"),
        ("grammar", 'root ::= "abcdefgh" [\\x04\\x0c]', "U+0004"),
        ("grammar", 'start: "abcd" x\nx: "\\u0004"', "U+0004"),
        ("grammar", 'start: "abcd" x\nx: /\\x04/', "U+0004"),
        ("grammar", 'root ::= "abcd" x\nx ::= "a" | "\\x04"', "U+0004"),
        ("grammar", 'start: %json {"const": "\u00e9"}', "U+00E9"),
        ("json_schema", json.dumps({"properties": {"a": {"enum": ["\u00e9"]}}}), "U+00E9"),
        ("json_schema", json.dumps({"properties": {"\u00e9": {}}}), "U+00E9"),
        ("json_schema", json.dumps({"anyOf": [{"pattern": "^a\u00e9$"}]}), "U+00E9"),
    ],
)
def test_characters_that_no_token_has_are_refused_by_name(
    small: Small, pre: str, kind: Kind, text: str, named: str
) -> None:
    tokenizer = small(pre, lacking=b"\x04\x0c\xa9\xba\xbb\xf1")
    with pytest.raises(InvalidParameterError) as refusal:
        Grammars(tokenizer, tokenizer.vocab_size).check(StructuredOutput(kind, text))
    what = kind.replace("json_schema", "JSON schema")
    problem = f"it spells out {named}, which no text of this model's vocabulary has"
    assert str(refusal.value) == f"structured: the {what} cannot be used: {problem}"


@pytest.mark.parametrize(
    ("kind", "text", "answer"),
    [
        ("json_schema", json.dumps({"const": "a\x04"}), '"a\\u0004"'),
        ("json_schema", json.dumps({"const": "ab", "description": "\u00e9"}), '"ab"'),
        ("regex", r"ab[\x04c]", "abc"),
        ("regex", r"ab[\x04-\x05]", "ab\x05"),
        ("regex", r"ab[\x04-]", "ab-"),
        ("regex", "ab[\U0004fff0-\U00080000]", "ab\U00080000"),
        ("grammar", 'root ::= "ab" [^"\\\\\\x7F\\x04-\\x1Fd-\\u00e9 !]', "ab#"),
        ("grammar", '// \u00e9\nstart: "ab"', "ab"),
        ("grammar", 'start: %json {"const": "a\\u0004"}', '"a\\u0004"'),
    ],
)
def test_forms_with_answers_that_need_no_missing_character_work(
    small: Small, kind: Kind, text: str, answer: str
) -> None:
    tokenizer = small("smollm", lacking=b"\x04\x0c\xa9\xf1")
    assert only_answer(Grammars(tokenizer, tokenizer.vocab_size), tokenizer, StructuredOutput(kind, text)) == answer


# --- GBNF -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grammar", "answer"),
    [
        (r'root ::= "\u0041\u00e9ab"', "A\u00e9ab"),
        (r'root ::= "\U0001F600"', "\U0001f600"),
        (r'root ::= "\u0022\u005c"', '"\\'),
        (r"root ::= [\u00e9]", "\u00e9"),
        (r"root ::= [&&]", "&"),
        (r"root ::= [~~]", "~"),
        (r'root ::= "a.b" # c.d', "a.b"),
    ],
)
def test_gbnf_means_what_llama_cpp_means_by_it(small: Small, grammar: str, answer: str) -> None:
    tokenizer = small("gpt-2")
    form = StructuredOutput("grammar", grammar)
    assert only_answer(Grammars(tokenizer, tokenizer.vocab_size), tokenizer, form) == answer


def test_a_dot_of_gbnf_is_any_character(small: Small) -> None:
    tokenizer = small("gpt-2")
    mask = Grammars(tokenizer, tokenizer.vocab_size).constraint(StructuredOutput("grammar", "root ::= ."))
    allowed = np.unpackbits(mask.mask(np.empty(0, np.int32), None).view(np.uint8), bitorder="little")
    assert all(allowed[tokenizer.encode(character, special=False)[0]] for character in "a.\n\r\u00e9\U0001f600")


@pytest.mark.parametrize("text", ["[b-\uffff]", "[", '"\\', "/\\", r"\x{", "[a", '%json {"a":', "//", '"\\u00e9"', "."])
def test_reading_a_form_takes_time_in_proportion_to_its_length(text: str) -> None:
    """In proportion to its square it would take more than ten seconds."""
    longest = text * (MAX_CHARACTERS // len(text))
    begun = process_time()
    assert plain_gbnf(longest)
    for kind in ("regex", "grammar"):
        named = set(chain.from_iterable(needed_characters(StructuredOutput(kind, longest))))
        assert text[0] == "[" or named <= {*text, "\u00e9"}
    assert process_time() - begun < 5


# --- reasons ----------------------------------------------------------------------------------------------------------

LOOK_AROUND = "look-around, including look-ahead and look-behind, is not supported"


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("regex", "(?<=a)b", LOOK_AROUND),
        ("regex", r"(a)\1", "backreferences are not supported"),
        ("regex", "((", "unclosed group"),
        ("json_schema", json.dumps({"type": "string", "pattern": "(?=a)b"}), f"(?=a)b; error: {LOOK_AROUND}"),
        ("json_schema", json.dumps({"properties": {"a": {"pattern": f"(?={'a' * 5000})b"}}}), LOOK_AROUND),
        ("grammar", "start: /(?=a)b/", LOOK_AROUND),
        ("grammar", 'start: %json {"pattern": "(?!a)"}', LOOK_AROUND),
        ("grammar", 'start: "a" (\n"b"', "1(13): Expected token ')'"),
        ("grammar", 'root ::= "a" ("b"', "Expected ')' at line 1"),
        ("json_schema", '{"$ref": "#"}', "no text satisfies it"),
    ],
)
def test_the_whole_reason_is_told_in_one_line(kind: Kind, text: str, reason: str) -> None:
    form = StructuredOutput(kind, text)
    error = refused(form, problem({"kind": kind, "text": text, "limits": LIMITS}), "response_format")
    assert (error.param, str(error).startswith("response_format: the ")) == ("response_format", True)
    assert reason in str(error)
    assert "\n" not in str(error)
    assert "^" not in str(error).replace(text, "").replace("' ^ '", "")
    assert len(str(error)) < LONGEST_REASON + 80
