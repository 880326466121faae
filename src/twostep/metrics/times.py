"""TTFT, ITL, TPOT and E2E of one request; used by engine, simulator and client.

All functions take integer nanoseconds of one clock and return seconds, or None if the event did not happen. Tokens that
arrive together have the same time.
"""

from collections.abc import Sequence
from itertools import pairwise


def ttft_s(asked_ns: int, token_ns: Sequence[int]) -> float | None:
    """Time to first token, from the arrival of the request."""
    return seconds(asked_ns, token_ns[0] if token_ns else None)


def itl_s(token_ns: Sequence[int]) -> tuple[float, ...]:
    """Inter-token latencies: the gaps between successive tokens. The first token is not a gap."""
    return tuple((after - before) / 1e9 for before, after in pairwise(token_ns))


def tpot_s(token_ns: Sequence[int]) -> float | None:
    """Time per output token after the first: (last - first) / (tokens - 1), undefined for one token."""
    if len(token_ns) < 2:
        return None
    return (token_ns[-1] - token_ns[0]) / 1e9 / (len(token_ns) - 1)


def e2e_s(asked_ns: int, token_ns: Sequence[int]) -> float | None:
    """End-to-end latency: from the arrival of the request to the last token."""
    return seconds(asked_ns, token_ns[-1] if token_ns else None)


def seconds(start_ns: int | None, end_ns: int | None) -> float | None:
    """Seconds between two times; None if either is None."""
    return None if start_ns is None or end_ns is None else (end_ns - start_ns) / 1e9
