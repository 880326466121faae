"""Goodput limits on the command line: `ttft:200 itl:100`, in milliseconds."""

from collections.abc import Iterable, Iterator
from math import isfinite

from twostep.errors import InvalidParameterError
from twostep.metrics.load import Limits

NAMES = ("ttft", "itl", "tpot", "e2e")
ALLOWED = f"NAME:MILLISECONDS with a name of {', '.join(NAMES)}, such as ttft:200"


def parse_limits(words: Iterable[str]) -> Limits:
    """Raises `InvalidParameterError` for an invalid or repeated limit."""
    found = dict[str, float]()
    for word in words:
        name, seconds = _parse(word)
        if name in found:
            raise InvalidParameterError(f"goodput: {name} is given more than once", "goodput")
        found[name] = seconds
    return Limits(**{f"{name}_s": seconds for name, seconds in found.items()})


def _parse(word: str) -> tuple[str, float]:
    name, _, number = word.partition(":")
    try:
        ms = float(number)
    except ValueError:
        ms = 0
    if name not in NAMES or not isfinite(ms) or ms <= 0:
        raise InvalidParameterError(f"goodput: {word!r} is not {ALLOWED}", "goodput")
    return name, ms / 1000


def limit_words(limits: Limits) -> str:
    """`TTFT <= 200 ms, ITL <= 100 ms`; empty without limits."""
    return ", ".join(f"{name.upper()} <= {1000 * seconds:.10g} ms" for name, seconds in asked(limits))


def asked(limits: Limits) -> Iterator[tuple[str, float]]:
    """Name and seconds of each limit that is set."""
    for name in NAMES:
        seconds = getattr(limits, f"{name}_s")
        if seconds is not None:
            yield name, seconds
