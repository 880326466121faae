"""Changes to a workload: window, sample, lengths, rate, repetition.

Each returns a new workload whose `source` lists the change, and reports what was left out or clipped."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import ceil
from random import Random
from reprlib import repr as short

from twostep.errors import InvalidParameterError, WorkloadError
from twostep.workload.checked_fields import Say, check_within
from twostep.workload.definition import Workload, WorkloadRequest, mean_rate


@dataclass(frozen=True)
class Changes:
    """Changes in the order in which they are applied. None: no change."""

    from_s: float | None = None
    to_s: float | None = None
    sample: float | None = None
    """Keep this share of the conversations; see `sample`."""
    requests: int | None = None
    """Keep the first requests."""
    length_scale: float | None = None
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    rate_scale: float | None = None
    rate: float | None = None
    """Scale to this mean rate in requests per second."""

    def __post_init__(self) -> None:
        """Raises `InvalidParameterError`."""
        check_within("from_s", self.from_s, 0, 1e12)
        check_within("to_s", self.to_s, self.from_s or 0, 1e12)
        check_within("sample", self.sample, 1e-6, 1)
        for name in ("requests", "max_input_tokens", "max_output_tokens"):
            check_within(name, getattr(self, name), 1, 1e9)
        for name in ("length_scale", "rate_scale", "rate"):
            check_within(name, getattr(self, name), 1e-6, 1e6)
        if self.rate_scale is not None and self.rate is not None:
            raise InvalidParameterError("rate and rate_scale both set the rate; give one of them", "rate")


def reshaped(workload: Workload, changes: Changes, say: Say) -> Workload:
    """Applies the changes. Raises `WorkloadError` if one is impossible for this workload."""
    if changes.from_s is not None or changes.to_s is not None:
        workload = window(workload, changes.from_s or 0.0, changes.to_s, say)
    if changes.sample is not None:
        workload = sampled(workload, changes.sample, say)
    if changes.requests is not None:
        workload = first(workload, changes.requests, say)
    if changes.length_scale is not None:
        workload = with_lengths_scaled(workload, changes.length_scale)
    if changes.max_input_tokens is not None or changes.max_output_tokens is not None:
        workload = clipped(workload, changes.max_input_tokens, changes.max_output_tokens, say)
    if changes.rate_scale is not None:
        workload = with_rate_scaled(workload, changes.rate_scale)
    return workload if changes.rate is None else at_rate(workload, changes.rate)


def window(workload: Workload, from_s: float, to_s: float | None, say: Say) -> Workload:
    """Keeps requests that arrive from `from_s` on and before `to_s`, and their followers. Arrivals count from `from_s`.

    Raises `WorkloadError` if none is left.
    """
    end_s = float("inf") if to_s is None else to_s
    kept = _kept(workload.requests, [from_s <= request.arrival_s < end_s for request in workload.requests])
    moved = [one if one.after is not None else replace(one, arrival_s=round(one.arrival_s - from_s, 6)) for one in kept]
    span = f"from {from_s:g} s" + ("" if to_s is None else f" to {to_s:g} s")
    _say_kept(len(moved), workload, f"those {span}", say)
    return _changed(workload, moved, span)


def sampled(workload: Workload, share: float, say: Say) -> Workload:
    """Keeps a random `share` of the conversations and single requests. Lowers the rate, but keeps burstiness and shared
    prefixes. Raises `WorkloadError` if none is left."""
    kept = list(_kept(workload.requests, sample(workload, share)))
    _say_kept(len(kept), workload, f"a sample of {share:.6g} of all conversations", say)
    return _changed(workload, kept, f"sample of {share:.6g} of conversations")


def first(workload: Workload, requests: int, say: Say) -> Workload:
    """Keeps the first requests. A request has a higher number than the one it waits for, so both are kept or
    dropped."""
    if requests < len(workload.requests):
        say(f"{requests} of {len(workload.requests)} requests kept, the first")
    return _changed(workload, workload.requests[:requests], f"first {requests} requests")


def with_rate_scaled(workload: Workload, factor: float) -> Workload:
    """Multiplies the arrival rate by `factor`. The time from an answer to the next turn stays the same."""
    moved = [
        one if one.after is not None else replace(one, arrival_s=round(one.arrival_s / factor, 6))
        for one in workload.requests
    ]
    return _changed(workload, moved, f"rate times {factor:.6g}")


def at_rate(workload: Workload, rate: float) -> Workload:
    """Scales arrivals so that `mean_rate` is `rate` requests per second. Raises `WorkloadError` if all requests arrive
    at once."""
    now = mean_rate(workload)
    if now is None:
        name = short(workload.name) if workload.name else "the workload"
        raise WorkloadError(f"{name} has no rate to change: all its requests arrive at once")
    return with_rate_scaled(workload, rate / now)


def clipped(workload: Workload, max_input_tokens: int | None, max_output_tokens: int | None, say: Say) -> Workload:
    """Cuts the end of longer prompts, which keeps shared prefixes, and shortens answers.

    Raises `WorkloadError` for a prompt that is too long and has text, which cannot be cut by tokens.
    """
    _refuse_text(workload, "clipped", lambda one: max_input_tokens is not None and one.input_tokens > max_input_tokens)
    short = list(_clipped(workload, max_input_tokens, max_output_tokens))
    inputs, outputs = ([getattr(one, name) for one in workload.requests] for name in ("input_tokens", "output_tokens"))
    _say_clipped("prompts", inputs, [one.input_tokens for one in short], max_input_tokens, say)
    _say_clipped("answers", outputs, [one.output_tokens for one in short], max_output_tokens, say)
    limits = f"prompts clipped to {max_input_tokens}, answers to {max_output_tokens} tokens"
    return _changed(workload, short, limits.replace("None", "any"))


def with_lengths_scaled(workload: Workload, factor: float) -> Workload:
    """Multiplies all lengths by `factor`, rounded, at least 1. Shared prefixes are scaled too, to within a block.
    Raises `WorkloadError` for prompts with text."""
    _refuse_text(workload, "scaled", lambda _: True)
    block_tokens, blocks = scaled_blocks(workload, factor)
    scaled = [
        replace(
            one,
            input_tokens=(input_tokens := max(1, round(one.input_tokens * factor))),
            output_tokens=max(1, round(one.output_tokens * factor)),
            blocks=numbers[: -(-input_tokens // block_tokens)],
        )
        for one, numbers in zip(workload.requests, blocks, strict=True)
    ]
    return replace(_changed(workload, scaled, f"lengths times {factor:.6g}"), block_tokens=block_tokens)


def _clipped(workload: Workload, max_input: int | None, max_output: int | None) -> Iterator[WorkloadRequest]:
    for one in workload.requests:
        input_tokens = one.input_tokens if max_input is None else min(one.input_tokens, max_input)
        output_tokens = one.output_tokens if max_output is None else min(one.output_tokens, max_output)
        blocks = one.blocks[: -(-input_tokens // workload.block_tokens)]
        yield replace(one, input_tokens=input_tokens, output_tokens=output_tokens, blocks=blocks)


def _say_kept(kept: int, workload: Workload, which: str, say: Say) -> None:
    """Raises `WorkloadError` if no request is left."""
    if workload.requests and not kept:
        raise WorkloadError(f"none of the {len(workload.requests)} requests is left: {which}")
    say(f"{kept} of {len(workload.requests)} requests kept, {which}")


def _say_clipped(what: str, before: Sequence[int], after: Sequence[int], limit: int | None, say: Say) -> None:
    count = sum(one != other for one, other in zip(before, after, strict=True))
    if count:
        share = 1 - sum(after) / sum(before)
        say(f"{count} of {len(before)} {what} clipped to {limit} tokens, {share:.1%} of their tokens removed")


def _kept(requests: Sequence[WorkloadRequest], inside: Sequence[bool]) -> Iterator[WorkloadRequest]:
    """Yields requests inside, and followers of kept requests, with `after` renumbered."""
    numbers: dict[int, int] = {}
    for old, request in enumerate(requests):
        if inside[old] if request.after is None else request.after in numbers:
            numbers[old] = len(numbers)
            yield request if request.after is None else replace(request, after=numbers[request.after])


def _changed(workload: Workload, requests: Sequence[WorkloadRequest], how: str) -> Workload:
    return replace(workload, requests=requests, source=f"{workload.source}; {how}" if workload.source else how)


def _refuse_text(workload: Workload, change: str, concerned: Callable[[WorkloadRequest], bool]) -> None:
    for number, one in enumerate(workload.requests):
        if one.text is not None and concerned(one):
            raise WorkloadError(f"request {number} has text; only requests without text can be {change}")


COMMON = 0.1
"""A prefix of a larger share of prompts is a system prompt, and does not make them one conversation."""


def sample(workload: Workload, share: float) -> list[bool]:
    """Which requests to keep: those of a random `share` of families. Deterministic."""
    rng = Random(0)
    chosen: dict[int, bool] = {}
    return [
        chosen[family] if family in chosen else chosen.setdefault(family, rng.random() < share)
        for family in families(workload)
    ]


def families(workload: Workload) -> list[int]:
    """A family number for each request. Requests of a family follow each other, or start with the same blocks, unless
    too many requests do. Any other request is its own family."""
    paths = list(_paths(workload))
    sizes = Counter(chain.from_iterable(paths))
    most = COMMON * len(paths)
    found: list[int] = []
    for number, (request, path) in enumerate(zip(workload.requests, paths, strict=True)):
        own = -1 - number
        beginning = next((node for node in path if sizes[node] <= most), own)
        found.append(beginning if request.after is None else found[request.after])
    return found


def _paths(workload: Workload) -> Iterator[list[int]]:
    """For each request, the nodes (from 1) on its path in the prefix tree of all prompts."""
    tree: dict[tuple[int, int], int] = {}
    for request in workload.requests:
        node, path = 0, []
        for block in request.blocks:
            node = tree.setdefault((node, block), len(tree) + 1)
            path.append(node)
        yield path


LEAST_BLOCK_TOKENS = 16
"""Minimum block size after scaling; smaller blocks are merged, as prefix caches use no smaller ones. The uncovered rest
of a prefix is at most this long."""


def scaled_blocks(workload: Workload, factor: float) -> tuple[int, list[tuple[int, ...]]]:
    """Block size, and the renumbered blocks of each request, for prompts scaled by `factor`.

    A new block covers `block_tokens / factor` old tokens. Its identity is the previous new block and the old blocks it
    overlaps, so two new blocks are equal exactly if all old blocks up to their end are.
    """
    old_tokens = workload.block_tokens
    block_tokens = max(min(old_tokens, LEAST_BLOCK_TOKENS), round(old_tokens * factor))
    stride = block_tokens / factor / old_tokens  # old blocks per new block
    numbers: dict[tuple[int, tuple[int, ...]], int] = {}
    return block_tokens, [tuple(_renumbered(one.blocks, stride, numbers)) for one in workload.requests]


def _renumbered(
    blocks: tuple[int, ...], stride: float, numbers: dict[tuple[int, tuple[int, ...]], int]
) -> Iterator[int]:
    """Yields the new blocks that old blocks cover completely."""
    parent, new = -1, 0
    while (end := ceil((new + 1) * stride - 1e-9)) <= len(blocks):
        key = parent, blocks[int(new * stride + 1e-9) : end]
        parent = numbers.setdefault(key, len(numbers))
        yield parent
        new += 1


def lasting(workload: Workload, requests: int) -> Workload:
    """Repeats a workload until it has at least `requests` requests. Each repetition has new content without shared
    prefixes with earlier ones. For workloads whose requests do not wait for others.

    Raises `WorkloadError` if requests have text, or all arrive at once.
    """
    if requests <= len(workload.requests) or not workload.requests:
        return workload
    times = -(-requests // len(workload.requests))
    rate = mean_rate(workload)
    if rate is None or any(one.text is not None for one in workload.requests):
        why = "its prompts have text" if rate else "they arrive all at once"
        raise WorkloadError(
            f"{workload.name or 'the workload'} has {len(workload.requests)} requests and {requests} are needed; "
            f"{why}, so the workload cannot be repeated"
        )
    return replace(workload, requests=_repeated(workload, times, len(workload.requests) / rate))


def _repeated(workload: Workload, times: int, period_s: float) -> list[WorkloadRequest]:
    blocks = 1 + max((block for one in workload.requests for block in one.blocks), default=0)
    return [
        replace(
            one,
            arrival_s=round(one.arrival_s + time * period_s, 6),
            blocks=tuple(block + time * blocks for block in one.blocks),
        )
        for time in range(times)
        for one in workload.requests
    ]
