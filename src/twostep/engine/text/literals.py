"""The characters that a form of structured output spells out: in its strings, regular expressions and grammar rules."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from twostep.engine.text.structured_output import StructuredOutput

_CHARACTER = re.compile(
    r"\\[xu]\{(?P<braced>[0-9A-Fa-f]{1,6})\}|\\(?:x(?P<two>[0-9A-Fa-f]{2})|u(?P<four>[0-9A-Fa-f]{4})"
    r"|U(?P<eight>[0-9A-Fa-f]{8}))|\\(?P<letter>.)|(?P<plain>.)",
    re.DOTALL,
)
_LETTERS = {"a": "\a", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
"""Escapes of single characters; others stand for themselves or for classes."""
_CLASS = r"\[\^?\]?(?:\\.|[^\]\\])*\]"
_LEXEMES = re.compile(
    rf'(?P<json>%json\s*(?=\{{))|(?P<comment>//[^\n]*|\#[^\n]*)|(?P<string>"(?:\\.|[^"\\])*")'
    rf'|(?P<regex>/(?:\\.|[^/\\])+/)|(?P<group>{_CLASS})|(?P<unclosed>["/\[].*)|(?P<other>.)',
    re.DOTALL,
)
_REGEX_LEXEMES = re.compile(
    rf"(?P<group>{_CLASS})|(?P<unclosed>\[.*)|(?P<other>\\[xu]\{{[0-9A-Fa-f]{{1,6}}\}}|\\.[0-9A-Fa-f]*|.)", re.DOTALL
)
"""What is not closed goes to the end, and is nobody's: searched for again at each character it would take minutes."""


def needed_characters(form: StructuredOutput) -> Iterator[Sequence[str]]:
    """Characters that some answer cannot do without, as the form's text spells them out: one of each sequence.

    Most sequences have one character; those of a class have its members, of a wide range some. None has a character
    that JSON escapes in an answer. This is a reading of the text, not of the language: what is optional counts too.
    """
    if form.kind == "choice":
        return chain.from_iterable(json.loads(form.text))
    if form.kind == "json_schema":
        return _of_schema(json.loads(form.text))
    return _of_regex(form.text) if form.kind == "regex" else _of_grammar(form.text)


def plain_gbnf(text: str) -> str:
    r"""The same GBNF, as llguidance's converter to Lark takes it: it drops zeros of `\u` escapes, reads `&&`, `~~` and
    `--` in a class as operators, and has `.` stand for no line break."""
    return "".join(map(_plain_lexeme, _LEXEMES.finditer(text)))


def _plain_lexeme(match: re.Match[str]) -> str:
    if match.lastgroup == "string":
        return _CHARACTER.sub(_plain_character, match[0])
    if match.lastgroup == "group":
        inner = _CHARACTER.sub(_plain_character, match[0])
        return re.sub(r"&|~|(?<=-)-", lambda sign: f"\\x{ord(sign[0]):02x}", inner)
    return r'([^\n] | "\n")' if match[0] == "." else match[0]


def _plain_character(match: re.Match[str]) -> str:
    digits = match["four"] or match["eight"]
    character = _code_point(digits) if digits else None
    if character is None:
        return match[0]
    return character if ord(character) > 0x7F else f"\\x{ord(character):02x}"


def _of_schema(schema: Any) -> Iterator[Sequence[str]]:
    open_ = [schema]
    while open_:
        part = open_.pop()
        if isinstance(part, list):
            open_ += part
        if not isinstance(part, Mapping):
            continue
        for key, value in part.items():
            if key in ("const", "enum"):
                yield from filter(_is_raw_in_json, json.dumps(value, ensure_ascii=False))
            elif key == "pattern" and isinstance(value, str):
                yield from filter(_is_raw_in_json, _of_regex(value))
            elif key == "properties" and isinstance(value, Mapping):
                yield from filter(_is_raw_in_json, chain.from_iterable(value))
                open_ += value.values()
            else:
                open_.append(value)


def _is_raw_in_json(characters: Sequence[str]) -> bool:
    return min(characters) >= " "


def _of_regex(regex: str) -> Iterator[Sequence[str]]:
    for match in _REGEX_LEXEMES.finditer(regex):
        yield from _of_class(match[0]) if match.lastgroup == "group" else _characters(match[0])


def _of_grammar(grammar: str) -> Iterator[Sequence[str]]:
    at = 0
    while match := _LEXEMES.match(grammar, at):
        at = match.end()
        if match.lastgroup == "json":
            schema, at = _json_at(grammar, at)
            yield from _of_schema(schema)
        elif match.lastgroup == "string":
            yield from _characters(match[0][1:-1])
        elif match.lastgroup == "regex":
            yield from _of_regex(match[0][1:-1])
        elif match.lastgroup == "group":
            yield from _of_class(match[0])


_MOST_OF_RANGE, _MOST_MEMBERS = 16, 256


def _of_class(group: str) -> Iterator[Sequence[str]]:
    """Nothing where the class is negated, has classes in it or is long: then it has many characters."""
    if group.startswith("[^"):
        return
    members = [_character(match) for match in _CHARACTER.finditer(group[1:-1])]
    spelt = [member for member in members if member is not None]
    if len(spelt) < len(members) or len(spelt) > _MOST_MEMBERS or "[" in group[1:]:
        return
    for at, sign in enumerate(spelt[1:-1], 1):
        if sign == "-":
            first, last = ord(spelt[at - 1]), ord(spelt[at + 1])
            codes = range(first, last, max(1, (last - first) // _MOST_OF_RANGE))
            spelt += [chr(code) for code in codes if not 0xD800 <= code <= 0xDFFF]
    if spelt:
        yield [character for at, character in enumerate(spelt) if character != "-" or at in (0, len(members) - 1)]


def _characters(text: str) -> Iterator[str]:
    return (spelt for match in _CHARACTER.finditer(text) if (spelt := _character(match)))


def _character(match: re.Match[str]) -> str | None:
    """None for an escape that stands for itself, for several characters or for none."""
    digits = match["braced"] or match["two"] or match["four"] or match["eight"]
    return _code_point(digits) if digits else match["plain"] or _LETTERS.get(match["letter"])


def _code_point(digits: str) -> str | None:
    """None for what is no character of a text."""
    code = int(digits, 16)
    return chr(code) if code <= 0x10FFFF and not 0xD800 <= code <= 0xDFFF else None


def _json_at(text: str, at: int) -> tuple[Any, int]:
    """What is not JSON is passed over: llguidance says what is wrong with it."""
    try:
        return json.JSONDecoder().raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, at
