"""Names that a user gave, against those that there are."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from twostep.errors import InvalidParameterError


def check_names(names: Iterable[str], known: Sequence[str], kind: str) -> None:
    """Raises `InvalidParameterError` for a name that is none, with those that are; `kind` says what is named."""
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, n=2)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise InvalidParameterError(f"{name!r} is no {kind}; there are {', '.join(known)}{hint}", name)
