"""TTFT, ITL, TPOT and E2E of one request, for whoever measures: engine, simulator, client.

All take integer nanoseconds of one clock and give seconds, or None where the event never came. Tokens that came
together have the same time.
"""

from collections.abc import Sequence
from itertools import pairwise


def ttft_s(asked_ns: int, token_ns: Sequence[int]) -> float | None:
    """Time to first token: from being asked to it."""
    return seconds(asked_ns, token_ns[0] if token_ns else None)


def itl_s(token_ns: Sequence[int]) -> tuple[float, ...]:
    """Inter-token latencies: gaps between successive tokens, one fewer than tokens. The first token's time is none."""
    return tuple((after - before) / 1e9 for before, after in pairwise(token_ns))


def tpot_s(token_ns: Sequence[int]) -> float | None:
    """Time per output token after the first: (last - first) / (tokens - 1), undefined for one token."""
    if len(token_ns) < 2:
        return None
    return (token_ns[-1] - token_ns[0]) / 1e9 / (len(token_ns) - 1)


def e2e_s(asked_ns: int, token_ns: Sequence[int]) -> float | None:
    """From being asked to the last token."""
    return seconds(asked_ns, token_ns[-1] if token_ns else None)


def seconds(start_ns: int | None, end_ns: int | None) -> float | None:
    """Between two moments, if both were."""
    return None if start_ns is None or end_ns is None else (end_ns - start_ns) / 1e9
