"""Errors about a user's input: unknown names and invalid values."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from twostep.errors import InvalidParameterError

MOST_SHOWN = 60
"""Characters of a value in an error."""


def check_names(names: Iterable[str], known: Sequence[str], kind: str) -> None:
    """Raises `InvalidParameterError` for an unknown name, with the known ones; `kind` says what is named."""
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, n=2)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise InvalidParameterError(f"{name!r} is no {kind}; there are {', '.join(known)}{hint}", name)


def refused(name: str, value: object, allowed: str) -> InvalidParameterError:
    """The error about a parameter or a member of one: `name` may continue with `[2]` or `.role`."""
    return InvalidParameterError(f"{name} is {shown(value)}; it has to be {allowed}", parameter(name))


def parameter(name: str) -> str:
    """The parameter that `name` is a member of."""
    return name.partition("[")[0].partition(".")[0]


def shown(value: object) -> str:
    """`value` as text, truncated."""
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."
