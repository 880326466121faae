"""Whether a server kept up with an open loop, or only took long to fall behind."""

from collections.abc import Sequence

from twostep.metrics.load import Limits, RequestTimes

GROWTH = 0.1
"""The queue of a server that keeps up grows by no more than this share of the requests that come meanwhile."""
CHANCE = 3
"""A queue grows by so many requests by chance alone."""


def kept_up(requests: Sequence[RequestTimes], limits: Limits) -> bool:
    """From the first third of the arrivals to the last one. Waiting is a request that is due and has no first token
    yet, or with a limit on `e2e` its answer not whole."""
    due = sorted(one.asked_ns for one in requests)
    begin = due[0] + (due[-1] - due[0]) // 3
    came = sum(at_ns > begin for at_ns in due)
    growth = _waiting(requests, limits, due[-1]) - _waiting(requests, limits, begin)
    return growth <= max(GROWTH * came, CHANCE)


def offered_rate(requests: Sequence[RequestTimes]) -> float | None:
    """Requests per second that were really due: (requests - 1) / (last due - first due). None if all at once."""
    due = sorted(one.asked_ns for one in requests)
    return (len(due) - 1) / ((due[-1] - due[0]) / 1e9) if due[-1] > due[0] else None


def _waiting(requests: Sequence[RequestTimes], limits: Limits, at_ns: int) -> int:
    return sum(one.asked_ns < at_ns < _done_ns(one, limits) for one in requests)


def _done_ns(one: RequestTimes, limits: Limits) -> int:
    return one.token_ns[0] if one.token_ns and limits.e2e_s is None else one.ended_ns
