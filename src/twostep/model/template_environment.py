"""The Jinja environment of chat templates: what Hugging Face's `apply_chat_template` offers, with strings traced.

Their environment is the immutable sandbox with `trim_blocks` and `lstrip_blocks`, loop controls, the block
`generation`, which marks what an assistant said, a `tojson` that does not escape for HTML, and the functions
`raise_exception` and `strftime_now`.
"""

from collections.abc import Callable, Iterable
from datetime import datetime
from functools import partial, wraps
from operator import attrgetter
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes, pass_eval_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from twostep.model.traced import Traced, concat, filled, settled, to_json, written

_EXACT = frozenset({
    "attr", "capitalize", "d", "default", "dictsort", "first", "format", "items", "join", "last", "list", "lower",
    "map", "max", "min", "random", "reject", "rejectattr", "replace", "reverse", "select", "selectattr", "sort",
    "trim", "unique", "upper",
})  # fmt: skip
"""Filters that only use methods of the strings which they are given, so that these trace what they do."""


class RefusalError(TemplateError):
    """What a template raises by `raise_exception`."""


class _Code(CodeGenerator):
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 - Jinja's name
        """`a ~ b`, in strings that stay traced."""
        self.write("environment.joined((")
        for member in node.nodes:
            self.visit(member, frame)
            self.write(", ")
        self.write("))")


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}`: what is inside, in a scope of its own."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_inside"), [], [], body).set_lineno(line)

    @pass_eval_context
    def _inside(self, _: nodes.EvalContext, caller: Macro) -> str:
        return caller()


class TracingEnvironment(ImmutableSandboxedEnvironment):
    """Where templates get strings of type `Traced`, their results are `Traced`."""

    code_generator_class = _Code
    intercepted_binops = frozenset("%+*")
    concat = staticmethod(concat)

    def __init__(self) -> None:
        extensions = [_Generation, "jinja2.ext.loopcontrols"]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=written)
        self.filters.update({name: _traced(name, function) for name, function in self.filters.items()})
        self.filters |= {"string": written, "tojson": tojson}
        self.globals["raise_exception"] = raise_exception
        self.globals["strftime_now"] = strftime_now

    @staticmethod
    def joined(values: Iterable[Any]) -> str:
        return concat(map(written, values))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        layout = Traced(left) if operator == "%" and type(left) is str else left
        return settled(super().call_binop(context, operator, layout, right), (left, right))

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(function, "__self__", None)
        if type(owner) is str:
            function = attrgetter(function.__name__)(Traced(owner))
        return settled(super().call(context, function, *args, **kwargs), (owner, args, kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        return None if wrapped is None else partial(_formatted, wrapped, value.__self__)


def _formatted(function: Callable[..., str], layout: str, /, *args: Any, **kwargs: Any) -> str:
    return filled(lambda given: str.__str__(function(*given[0], **given[1])), layout, (args, kwargs))


def _traced(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose strings are traced, as far as they can be."""

    @wraps(function)
    def filter_(*args: Any, **kwargs: Any) -> Any:
        if name not in _EXACT:
            return settled(_untraced(function(*args, **kwargs)), (args, kwargs))
        own = [Traced(arg) if type(arg) is str else arg for arg in args]
        named = {key: Traced(arg) if type(arg) is str else arg for key, arg in kwargs.items()}
        if name == "join" and len(own) < 3:  # context, value, separator
            named.setdefault("d", Traced(""))
        return settled(function(*own, **named), (args, kwargs))

    return filter_


def _untraced(result: Any) -> Any:
    """A string without origins, which may be wrong."""
    return str.__str__(result) if isinstance(result, Traced) else result


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja2's own filter escapes for HTML, which no model was trained on."""
    return to_json(value, ensure_ascii=ensure_ascii, sort_keys=sort_keys, indent=indent, separators=separators)


def raise_exception(message: str) -> NoReturn:
    raise RefusalError(message)


def strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
