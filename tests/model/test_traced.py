"""Strings that know where their characters came from: the text is what Python and Jinja make, the origins are right."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from support.chat_templates import plainly_rendered

from twostep.model.template_environment import TracingEnvironment
from twostep.model.traced import Traced, concat, given_in, origins_of

GIVEN = "XYZ\t<|>"
"""Characters that only come from the request; the template's own are others."""
ORIGINS = {character: chr(3) for character in GIVEN}

pieces = st.lists(st.one_of(st.text("abc \n{}%", max_size=4), st.text(GIVEN, max_size=4)), max_size=6)
separators = st.sampled_from(["a", "X", " ", "ab", "<|", "\n", "Xa", "aX"])


def traced(text: str) -> Traced:
    return Traced(text, "".join(ORIGINS.get(character, "\0") for character in text))


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        for member in value:
            yield from strings(member)


def check(result: Any, expected: Any) -> None:
    assert result == expected
    for text in strings(result):
        assert isinstance(text, Traced)
        assert origins_of(text) == origins_of(traced(str.__str__(text)))


OPERATIONS = {
    "add": lambda s, sep: s + sep,
    "add to": lambda s, sep: "ab" + s,
    "times": lambda s, sep: s * 2,
    "times from the left": lambda s, sep: 3 * s,
    "index": lambda s, sep: [s[i] for i in range(-len(s), len(s))],
    "slice": lambda s, sep: s[1:-1],
    "reversed": lambda s, sep: s[::-1],
    "iterated": lambda s, sep: list(s),
    "strip": lambda s, sep: s.strip(),
    "strip characters": lambda s, sep: [s.strip(sep), s.lstrip(sep), s.rstrip(sep)],
    "split": lambda s, sep: [s.split(sep), s.rsplit(sep), s.split(sep, 1), s.rsplit(sep, 1)],
    "split at whitespace": lambda s, sep: [s.split(), s.rsplit(), s.split(None, 1), s.rsplit(None, 1)],
    "splitlines": lambda s, sep: [s.splitlines(), s.splitlines(True)],
    "partition": lambda s, sep: [s.partition(sep), s.rpartition(sep)],
    "replace": lambda s, sep: [s.replace(sep, "cc"), s.replace("a", s, 1)],
    "affixes": lambda s, sep: [s.removeprefix(sep), s.removesuffix(sep)],
    "join": lambda s, sep: s.join([s, sep, "a"]),
}


@pytest.mark.parametrize("name", OPERATIONS)
@given(pieces=pieces, sep=separators)
@settings(max_examples=60, deadline=None)
def test_parts_and_sums_keep_the_origin_of_each_character(name: str, pieces: list[str], sep: str) -> None:
    text = "".join(pieces)
    check(OPERATIONS[name](traced(text), traced(sep)), OPERATIONS[name](text, sep))


ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "center": (30,), "count": ("a",), "endswith": ("a",), "find": ("a",), "index": ("a",), "join": (["a", "b"],),
    "ljust": (30,), "partition": ("a",), "removeprefix": ("a",), "removesuffix": ("a",), "replace": ("a", "b"),
    "rfind": ("a",), "rindex": ("a",), "rjust": (30,), "rpartition": ("a",), "startswith": ("a",),
    "translate": ({97: "zz"},), "zfill": (30,), "format_map": ({},),
}  # fmt: skip
NO_STRING = {"encode", "maketrans"}


@pytest.mark.parametrize("name", sorted(name for name in dir(str) if name[0] != "_" and name not in NO_STRING))
def test_no_method_of_strings_forgets_that_text_was_given(name: str) -> None:
    """A new method of a later Python is found here. `format` and `format_map` are the environment's affair."""
    text = "\u0130 xaXa\tx\n\u00df"
    result = getattr(Traced(text, chr(3) * len(text)), name)(*ARGUMENTS.get(name, ()))
    assert result == getattr(text, name)(*ARGUMENTS.get(name, ()))
    if not name.startswith("format"):
        assert all(given_in(member) == [3] for member in strings(result) if member)


EXPRESSIONS = [
    "text ~ 'b' ~ 3 ~ none",
    "'a%sb%s' % (text, 'c')",
    "'%-9s.' % text",
    "'%(x)s' % {'x': text}",
    "'{}b{}'.format(text, 1)",
    "'{x:>9}'.format(x=text)",
    "'{0[y]}'.format({'y': text})",
    "'{x}'.format_map({'x': text})",
    "['b', text, 'c'] | join",
    "['b', text] | join(', ')",
    "['b', text] | map('upper') | join('-')",
    "'-'.join(['b', text])",
    "text | trim | upper",
    "'  b ' ~ text | trim",
    "'b-b' | replace('-', text)",
    "'b-b'.replace('-', text)",
    "text | indent(2, true)",
    "text | title",
    "text | wordwrap(3)",
    "text | truncate(4, true, '..')",
    "text | center(30)",
    "text | escape",
    "text | forceescape",
    "text | safe ~ 'b'",
    "('b' | safe) + text",
    "text | urlencode",
    "text | string",
    "text | list | join('b')",
    "text | first ~ text | last",
    "text | reverse",
    "text | default('c')",
    "none | default(text, true)",
    "absent | default(text)",
    "[text, 'b'] | tojson",
    "{'b': text, 'a': [1, none, true]} | tojson(indent=2)",
    "{text: text} | tojson(sort_keys=true)",
    "{'b': text, 'a': 'c'} | tojson(sort_keys=true, separators=(',', ':'))",
    "text | tojson(ensure_ascii=true)",
    "text | pprint",
    "{'b': text}",
    "[text]",
    "{'b': text}.get('b')",
    "{'b': text}.items() | list",
    "({'b': text} | dictsort)[0][1]",
    "[text, 'b'] | sort | join",
    "[text, text] | unique | join",
    "[[text, 'b']] | sum(start=[]) | join",
    "[{'x': text}] | map(attribute='x') | join",
    "[text, 'zz'] | max",
    "'b' if text is string and text in [text] else text",
    "text.split('a')[0] ~ text[1:] ~ text[::-1]",
    "text | batch(2) | map('join', '+') | join",
    "text | groupby(0) | list",
    "'%s' | format(text)",
    "text * 2",
    "3 * text",
    "text | striptags",
    "text | urlize",
    "dict(b=text)['b']",
    "cycler(text, 'b').next()",
    "text | xmlattr if false else text",
    "namespace(x='b' ~ text).x",
    "text.encode().decode()",
    "'%s' % ({text: 1},)",
    "'%(x)s' % {'x': {text: 1}}",
    "'{}'.format({text: 1})",
    "'{0.x}{1}'.format(namespace(x='b'), text)",
    "namespace(x=text) ~ 'b'",
    "namespace(x=text) | string",
    "absent",
    "loop.cycle('b', text) if loop is defined else text",
    "text | length ~ text | wordcount",
]


@pytest.mark.parametrize("expression", EXPRESSIONS)
@pytest.mark.parametrize("text", ["X<|>Y", "<|X|>\n \"'&Z\\", "\u00e9X\u0130"])
def test_expressions_give_what_jinja_gives_and_know_what_was_given(expression: str, text: str) -> None:
    expected = plainly_rendered("{{ " + expression + " }}", {"text": text})
    template = TracingEnvironment().from_string("a{{ " + expression + " }}a")
    result = template.render(text=Traced(text, chr(3) * len(text)))
    assert result == f"a{expected}a"
    assert origins_of(result)[0] == origins_of(result)[-1] == "\0"
    unknown = [character for character, origin in zip(result, origins_of(result), strict=True) if origin == "\0"]
    assert not {*GIVEN} & {*unknown}


EXACTLY = [
    ("'<a>%s<b>' % text", "<a>", "<b>"),
    ("'<a>{}<b>'.format(text)", "<a>", "<b>"),
    ("['<a>', text] | join", "<a>", ""),
    ("'<a>' ~ text ~ '<b>'", "<a>", "<b>"),
    ("{'<a>': text} | tojson", '{"<a>": "', '"}'),
    ("(' <a>' ~ text) | trim", "<a>", ""),
    ("'\\n'.join(['<a>', text])", "<a>\n", ""),
    ("('<a>' + text + '-').replace('-', '<b>')", "<a>", "<b>"),
    ("('<a>' + text) | lower", "<a>", ""),
    ("'<a>%s' | format(text)", "<a>", ""),
    ("'<a>{x}'.format_map({'x': text})", "<a>", ""),
]


@pytest.mark.parametrize(("expression", "before", "after"), EXACTLY)
def test_the_templates_own_text_stays_its_own(expression: str, before: str, after: str) -> None:
    template = TracingEnvironment().from_string("{{ " + expression + " }}")
    result = template.render(text=Traced("hello", chr(3) * 5))
    assert result == f"{before}hello{after}"
    assert origins_of(result) == "\0" * len(before) + chr(3) * 5 + "\0" * len(after)


BLOCKS = [
    "{% macro m(x) %}a{{ x }}{% endmacro %}{{ m(text) }}",
    "{% macro m() %}a{{ caller() }}{% endmacro %}{% call m() %}{{ text }}{% endcall %}",
    "{% set x %}a{{ text }}{% endset %}{{ x }}",
    "{% filter trim %} a{{ text }}{% endfilter %}",
    "{% for c in text %}{% if loop.first %}a{% endif %}{{ c }}{% endfor %}",
    "{% set n = namespace(x='a') %}{% for c in text %}{% set n.x = n.x + c %}{% endfor %}{{ n.x }}",
    "{% block b %}a{{ text }}{% endblock %}",
    "{% generation %}a{{ text }}{% endgeneration %}",
    "{% for x in [text] recursive %}a{{ x }}{% endfor %}",
    "{% with x = 'a' ~ text %}{{ x }}{% endwith %}",
]


@pytest.mark.parametrize("source", BLOCKS)
def test_blocks_keep_origins(source: str) -> None:
    result = TracingEnvironment().from_string(source).render(text=Traced("XY", chr(3) * 2))
    assert (result, origins_of(result)) == ("aXY", "\0\3\3")


def test_what_a_filter_of_unknown_work_makes_counts_as_given() -> None:
    result = TracingEnvironment().from_string("{{ ('a' ~ text) | title }}").render(text=Traced("b", "\3"))
    assert (result, origins_of(result)) == ("Ab", "\3\3")


def test_what_was_only_chosen_stays_whose_it_was() -> None:
    source = (
        "{% for x in [1, 2] %}{{ loop.cycle('<a>', text) }}{% endfor %}"
        "{% set c = cycler('<b>', text) %}{{ c.next() }}{{ {'x': '<c>'}.get(text) }}"
    )
    result = TracingEnvironment().from_string(source).render(text=Traced("x", "\3"))
    assert (result, origins_of(result)) == ("<a>x<b><c>", "\0\0\0\3\0\0\0\0\0\0")


def test_a_sum_of_nothing_is_the_templates() -> None:
    assert given_in(concat([])) == given_in(concat(["a", Traced("")])) == []


def test_the_sandbox_is_still_there() -> None:
    assert issubclass(TracingEnvironment, ImmutableSandboxedEnvironment)
    template = TracingEnvironment().from_string("{{ text[name].x }}")
    for name in ("_origins", "__class__", "__init__"):
        with pytest.raises(SecurityError, match=f"access to attribute '{name}' of 'Traced' object is unsafe"):
            template.render(text=Traced("b", "\3"), name=name)
