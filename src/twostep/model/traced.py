"""Strings that record where each of their characters came from, through what chat templates do with strings.

A chat template mixes its own text with text of the request. Which is which cannot be told from the result, and decides
two things: whether `<|im_start|>` is a control token or what somebody typed, and whether each message is in the prompt.
Whatever an operation's effect on single characters is unknown, its result counts as text of the request.
"""

import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, SupportsIndex

TEMPLATE = 0
"""Origin of the template's own text. Other origins are the caller's numbers for parts of the request."""
UNKNOWN = 1
"""Origin of what may come from the request, nobody knows from which part."""


class Traced(str):
    """A string; `_origins` has one character for each of its own, whose code is the origin.

    Results of its methods are traced too. Equality, hashing, searching and length are those of the text.
    """

    __slots__ = ("_origins",)
    _origins: str

    def __new__(cls, text: str, origins: str | None = None) -> "Traced":
        """Without `origins` it is the template's text, unless `text` is traced itself."""
        made = super().__new__(cls, text)
        made._origins = origins_of(text) if origins is None else origins
        return made

    def __str__(self) -> "Traced":
        return self

    def __iter__(self) -> Iterator[str]:
        return (Traced(*pair) for pair in zip(str.__iter__(self), self._origins, strict=True))

    def __getitem__(self, key: SupportsIndex | slice) -> "Traced":
        return Traced(str.__getitem__(self, key), self._origins[key])

    def __add__(self, other: str) -> "Traced":
        return concat((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> "Traced":
        return concat((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, times: SupportsIndex) -> "Traced":
        return Traced(str.__mul__(self, times), self._origins * times)

    __rmul__ = __mul__

    def __mod__(self, values: Any) -> str:
        return filled(lambda given: str.__mod__(self, given), self, values)

    def join(self, texts: Iterable[str]) -> "Traced":
        members = list(texts)
        return Traced(str.join(self, members), self._origins.join(map(origins_of, members)))

    # --- parts of it ----------------------------------------------------------------------------------------------

    def strip(self, chars: str | None = None) -> "Traced":
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None) -> "Traced":
        return self[len(self) - len(str.lstrip(self, chars)) :]

    def rstrip(self, chars: str | None = None) -> "Traced":
        return self[: len(str.rstrip(self, chars))]

    def removeprefix(self, prefix: str) -> "Traced":
        return self[len(prefix) :] if self.startswith(prefix) else self

    def removesuffix(self, suffix: str) -> "Traced":
        return self[: len(self) - len(suffix)] if self.endswith(suffix) else self

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._located(str.split(self, sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._located(str.rsplit(self, sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[str]:
        lines = self._located(str.splitlines(self, keepends=True), "")
        return [line[: len(str.splitlines(line)[0])] for line in lines] if not keepends else lines

    def partition(self, sep: str) -> tuple[str, str, str]:
        return self._three(str.partition(self, sep))

    def rpartition(self, sep: str) -> tuple[str, str, str]:
        return self._three(str.rpartition(self, sep))

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> str:
        if not old:  # `new` between all characters: no template's idea of a prompt
            return spread(str.replace(self, old, new, count), (self, new))
        return Traced(new).join(self.split(old, count))

    def _located(self, pieces: Sequence[str], sep: str | None) -> list[str]:
        """`pieces` of the text, in order, with `sep` between two of them, or else whitespace."""
        found, start = [], 0
        for piece in pieces:
            start = self.find(piece, start) if sep is None else start
            found.append(self[start : start + len(piece)])
            start += len(piece) + len(sep or "")
        return list[str](found)

    def _three(self, parts: tuple[str, str, str]) -> tuple[str, str, str]:
        first, second, _ = parts
        middle = len(first) + len(second)
        return self[: len(first)], self[len(first) : middle], self[middle:]

    # --- changed as a whole ---------------------------------------------------------------------------------------

    def upper(self) -> str:
        return self._recased(str.upper(self))

    def lower(self) -> str:
        return self._recased(str.lower(self))

    def capitalize(self) -> str:
        return self._recased(str.capitalize(self))

    def title(self) -> str:
        return self._recased(str.title(self))

    def swapcase(self) -> str:
        return self._recased(str.swapcase(self))

    def casefold(self) -> str:
        return self._recased(str.casefold(self))

    def _recased(self, text: str) -> str:
        """No character becomes fewer than one, so texts of equal length agree in all places."""
        return Traced(text, self._origins) if len(text) == len(self) else spread(text, self)

    def center(self, width: SupportsIndex, fillchar: str = " ") -> str:
        return spread(str.center(self, width, fillchar), (self, fillchar))

    def ljust(self, width: SupportsIndex, fillchar: str = " ") -> str:
        return spread(str.ljust(self, width, fillchar), (self, fillchar))

    def rjust(self, width: SupportsIndex, fillchar: str = " ") -> str:
        return spread(str.rjust(self, width, fillchar), (self, fillchar))

    def zfill(self, width: SupportsIndex) -> str:
        return spread(str.zfill(self, width), self)

    def expandtabs(self, tabsize: SupportsIndex = 8) -> str:
        return spread(str.expandtabs(self, tabsize), self)

    def translate(self, table: Any, /) -> str:
        return spread(str.translate(self, table), (self, table))


def origins_of(text: str) -> str:
    return text._origins if isinstance(text, Traced) else chr(TEMPLATE) * len(text)


def concat(texts: Iterable[str]) -> Traced:
    members = list(texts)
    return Traced("".join(members), "".join(map(origins_of, members)))


def given_in(value: Any) -> list[int]:
    """Origins, other than the template, of text anywhere in `value`."""
    match value:
        case Traced():
            return sorted({ord(origin) for origin in set(value._origins)} - {TEMPLATE})
        case Mapping():
            return given_in([*value.keys(), *value.values()])
        case list() | tuple():
            return sorted({origin for member in value for origin in given_in(member)})
    return [UNKNOWN] if isinstance(value, Iterator | bytes) else []


def spread(text: str, sources: Any) -> str:
    """`text` that was made of `sources`, nobody knows how: all of it from the request if anything of them is."""
    origins = "".join(map(chr, given_in(sources)))
    if not origins:
        return text
    return Traced(text, origins[: len(text)].ljust(len(text), origins[-1]))


def settled(result: Any, sources: Any) -> Any:
    """The result of an operation on `sources`, with strings traced that the operation did not trace."""
    if isinstance(result, str) and not isinstance(result, Traced):
        return result if _is_member(result, sources) else spread(result, sources)
    if type(result) in (list, tuple) and any(isinstance(member, str) for member in result):
        return type(result)(settled(member, sources) for member in result)
    return result


def _is_member(text: str, sources: Any) -> bool:
    """Whether an operation only chose among its sources. Of single characters Python keeps one object each."""
    match sources:
        case str():
            return sources is text and len(text) > 1
        case Mapping():
            return any(_is_member(text, member) for member in sources.values())
        case list() | tuple():
            return any(_is_member(text, member) for member in sources)
    return False


def written(value: Any) -> str:
    """What `{{ value }}` writes. Objects other than JSON's may show anything that they hold."""
    if isinstance(value, str):
        return value
    text = str(value)
    if value is None or isinstance(value, Mapping | list | tuple | int | float):
        return spread(text, value)
    return Traced(text, chr(UNKNOWN) * len(text))


# --- texts filled into others: computed once as they are and once with marks, to see where they went ------------------

_MARK = f"<{secrets.token_hex(8)}:"
_MARKS = re.compile(f"{_MARK}([0-9]+)>")


def filled(compute: Callable[[Any], str], layout: str, values: Any) -> str:
    """`compute(values)`, which fills `values` into `layout`, as `%` and `format` do."""
    text = compute(values)
    if given_in(layout):
        return spread(text, (layout, values))
    return _filled(compute, _Marks(values), text, written)


def to_json(value: Any, *, ensure_ascii: bool, sort_keys: bool, **options: Any) -> str:
    """What `json.dumps` gives, traced."""
    text = json.dumps(value, ensure_ascii=ensure_ascii, sort_keys=sort_keys, **options)

    def escaped(leaf: str) -> str:
        return spread(json.dumps(leaf, ensure_ascii=ensure_ascii)[1:-1], leaf)

    marks = _Marks(_sorted(value) if sort_keys else value)
    return _filled(lambda marked: json.dumps(marked, ensure_ascii=ensure_ascii, **options), marks, text, escaped)


class _Marks:
    """`values` with each traced string in them replaced by a mark, in `marked`, and these strings, in `leaves`."""

    def __init__(self, values: Any) -> None:
        self.leaves: list[Traced] = []
        self.marked = self._put(values)

    def _put(self, value: Any) -> Any:
        match value:
            case Traced():
                self.leaves.append(value)
                return f"{_MARK}{len(self.leaves) - 1}>"
            case Mapping():
                return {self._put(key): self._put(member) for key, member in value.items()}
            case list():
                return [self._put(member) for member in value]
            case tuple():
                return tuple(self._put(member) for member in value)
        return value


def _filled(compute: Callable[[Any], str], marks: _Marks, text: str, show: Callable[[str], str]) -> str:
    if not given_in(marks.leaves):
        return text
    try:
        pieces = _MARKS.split(compute(marks.marked))
    except Exception:  # it looks at its values more closely than a mark allows
        return spread(text, marks.leaves)
    made = concat(show(marks.leaves[int(piece)]) if number % 2 else piece for number, piece in enumerate(pieces))
    return made if made == text else spread(text, marks.leaves)


def _sorted(value: Any) -> Any:
    match value:
        case Mapping():
            return {key: _sorted(value[key]) for key in sorted(value)}
        case list() | tuple():
            return [_sorted(member) for member in value]
    return value
