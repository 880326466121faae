"""How many tokens each chunk of an answer brought, as exactly as the server lets one know."""

from collections.abc import Sequence
from dataclasses import dataclass

from twostep.bench.client.outcome import Counting


@dataclass(frozen=True, slots=True)
class Arrival:
    """A chunk that brought text, or may have brought a token."""

    at_ns: int
    characters: int
    is_mute: bool = False
    """As `Chunk.is_mute`."""
    stated: int | None = None
    """Its tokens, if the server said so."""


def token_times(arrivals: Sequence[Arrival], total: int | None) -> tuple[tuple[int, ...], Counting]:
    """When each token came, and how the number of each chunk is known. `total` as the server counts, if it does.

    Stated: where all chunks with text say it and it adds up to the total, or where there is one chunk for each token.
    Else the total is spread over the chunks with text, or, if there is none, each of these counts as one token.
    """
    spoken = [arrival for arrival in arrivals if arrival.characters]
    stated = [arrival.stated or 0 for arrival in arrivals]
    if sum(stated) and total in (None, sum(stated)) and all(arrival.stated is not None for arrival in spoken):
        return _times(arrivals, stated), Counting.STATED
    if not total:
        return _times(spoken, [1] * len(spoken)), Counting.ASSUMED
    for single in (spoken, [arrival for arrival in arrivals if arrival.characters or arrival.is_mute]):
        if len(single) == total:
            return _times(single, [1] * total), Counting.STATED
    return _times(spoken, spread(total, [arrival.characters for arrival in spoken])), Counting.SPREAD


def spread(total: int, weights: Sequence[int]) -> list[int]:
    """`total` in whole parts: first one each, from the first on, as far as it reaches, the rest in proportion to the
    weights, by the method of the largest remainder. Nothing for no weights."""
    ones = [int(i < total) for i in range(len(weights))]
    left, whole = total - sum(ones), sum(weights)
    if not left or not weights:
        return ones
    shares = [divmod(left * weight, whole) for weight in weights]
    parts = [one + part for one, (part, _) in zip(ones, shares, strict=True)]
    by_remainder = sorted(range(len(weights)), key=lambda i: -shares[i][1])
    for i in by_remainder[: total - sum(parts)]:
        parts[i] += 1
    return parts


def _times(arrivals: Sequence[Arrival], counts: Sequence[int]) -> tuple[int, ...]:
    return tuple(arrival.at_ns for arrival, count in zip(arrivals, counts, strict=True) for _ in range(count))
