"""Numbers on the command line that have bounds, and say them."""

import argparse
from collections.abc import Callable


def within(low: float, high: float) -> Callable[[str], float]:
    """For argparse: a number from `low` to `high`."""
    return lambda text: _bounded(text, float, low, high, f"a number from {low:.12g} to {high:.12g}")


def whole_within(low: int, high: int) -> Callable[[str], int]:
    """For argparse: a whole number from `low` to `high`."""
    return lambda text: int(_bounded(text, int, low, high, f"a whole number from {low} to {high}"))


def list_within(low: float, high: float) -> Callable[[str], tuple[float, ...]]:
    """For argparse: such numbers with commas between them, as `2,4,8`."""
    allowed = f"a list of numbers from {low:.12g} to {high:.12g}, such as 1,2,4"
    return lambda text: tuple(_bounded(word, float, low, high, allowed) for word in text.split(","))


def _bounded(text: str, kind: Callable[[str], float], low: float, high: float, allowed: str) -> float:
    try:
        value = kind(text)
    except ValueError:
        value = float("nan")
    if not low <= value <= high:  # nan is within nothing
        raise argparse.ArgumentTypeError(f"{text!r} is not {allowed}")
    return value
