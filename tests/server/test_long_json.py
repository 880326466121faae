"""The reader of long bodies agrees with the standard library on every text, and pauses."""

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from twostep.server.http import long_json
from twostep.server.http.request_body import SHORT_BYTES, parse

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=5),
    max_leaves=30,
)


def outcome(loads: Any, body: bytes) -> str:
    """What it makes of a body; of what is no JSON versions of Python say different things."""
    try:
        return repr(loads(body))
    except RecursionError:
        return "too deep"
    except ValueError:
        return "no JSON"


@given(JSON, st.sampled_from([None, 1]), st.booleans(), st.sampled_from(["utf-8", "utf-16", "utf-8-sig"]))
def test_what_is_json(value: Any, indent: int | None, escaped: bool, encoding: str) -> None:
    body = json.dumps(value, indent=indent, ensure_ascii=escaped).encode(encoding, "surrogatepass")
    assert outcome(long_json.loads, body) == outcome(json.loads, body)


PIECES = [
    "[", "]", "{", "}", ",", ":", '"', '"a"', "1", "-", "e5", ".5", " ", "\n", "null", "tru", "NaN", "\\u12", "0" * 70,
    "1," * 40,
]  # fmt: skip


@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
@example("[" + "1," * 100 + "]")
@example("[" + "1," * 50 + ",1]")
@example("[" + "1," * 50 + "x]")
@example("[1" + " ,1" * 50 + "}")
@example('{"a":1,}')
@example("[" * 100_000)
@example("[" + "9" * 5000 + "]")
@example("")
def test_what_is_none(text: str) -> None:
    body = text.encode()
    assert outcome(long_json.loads, body) == outcome(json.loads, body)


@pytest.mark.parametrize("size", [100, long_json.RUN // 3, 100_000])
def test_long_lists_of_numbers(size: int) -> None:
    values = [*range(size), -1.5, 1e300, [*range(size)], "x", *range(size)]
    assert long_json.loads(json.dumps({"prompt": values}).encode()) == {"prompt": values}


@pytest.mark.parametrize("member", ["[]", "1", '{"a":1}', '"x"', "[" + "1,2," * 20 + "3]"])
def test_no_step_reads_much(monkeypatch: pytest.MonkeyPatch, member: str) -> None:
    """What the standard library does at once nobody can interrupt."""
    steps = []
    scan, loads = long_json._scan, json.loads

    def scanned(text: str, at: int) -> tuple[Any, int]:
        value, end = scan(text, at)
        steps.append(end - at)
        return value, end

    def loaded(text: str) -> Any:
        steps.append(len(text))
        return loads(text)

    body = ("[" + f"{member}," * (300_000 // len(member)) + "1]").encode()
    value = loads(body)
    monkeypatch.setattr(long_json, "_scan", scanned)
    monkeypatch.setattr(json, "loads", loaded)
    assert long_json.loads(body) == value
    assert max(steps) <= long_json.RUN + 2


def test_a_long_body_is_read_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a short one by the standard library, which is faster."""
    long = b'"' + b"x" * SHORT_BYTES + b'"'
    monkeypatch.setattr(long_json, "loads", lambda body: "in steps")
    assert (parse(long), parse(b"[1]")) == ("in steps", [1])
