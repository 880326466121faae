"""The latency breakdown of a reply: every nanosecond from its arrival to its last byte is in exactly one line.

All time stamps are of one clock. A line's `parts` say what its time was spent on and add up to it. Where sequences
share a step, each one's share of the work is not measured: such figures are estimated by the cost model, and named so.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from twostep.core.reasons import Why
from twostep.engine.outputs import ChoiceOutput, ChunkTime, DecodeTime, PreemptionTime, Timeline, WaitTime
from twostep.server.observe.finished_requests import Reply
from twostep.server.observe.verdict import verdict

_Item = ChunkTime | DecodeTime | PreemptionTime

Parts = dict[str, int]
"""Nanoseconds by what they were spent on:

front: reading and tokenizing; form: checking the schema or grammar of structured output; queue: waiting for a slot or
for a step's token budget; blocks: waiting for KV blocks; prefill and decode: kernels, in steps with tokens of the
sequence; others: kernels, in steps without, while it had a slot; host: planning steps and processing their results;
preempted: waiting after a preemption, and recomputing what was lost; lost: on an engine that died, whose records are
lost; restart: until another engine had the request; answers: waiting, at its end, for the reply's
other choices; send: detokenizing and sending.
"""


@dataclass(frozen=True)
class Line:
    """One line. `details` are numbers and strings for JSON."""

    what: str
    start_ns: int
    end_ns: int
    parts: Parts
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def ns(self) -> int:
        return self.end_ns - self.start_ns


@dataclass(frozen=True)
class ChoiceBreakdown:
    """The lines of one choice in order; each begins where the previous one ends."""

    prompt: int
    index: int
    finish_reason: str
    lines: tuple[Line, ...]
    first_token_ns: int | None
    last_token_ns: int | None
    end_ns: int

    def parts(self, until_ns: int | None = None) -> Parts:
        """Sums over the lines, or over those that end by `until_ns`."""
        sums: Parts = {}
        for line in self.lines:
            if until_ns is None or line.end_ns <= until_ns:
                for part, ns in line.parts.items():
                    sums[part] = sums.get(part, 0) + ns
        return sums


def choice_breakdowns(reply: Reply) -> list[ChoiceBreakdown]:
    """Breakdowns of all prompts, in order. Raises `ValueError` if the reply's time stamps are not in order."""
    choices = [(prompt, choice) for prompt, output in reply.by_prompt() for choice in output.choices]
    ends = [_End(_finish_ns(reply, choice.timeline), prompt, choice.index) for prompt, choice in choices]
    last = max(ends, default=_End(0, 0, 0))
    return [_choice_breakdown(reply, prompt, choice, last) for prompt, choice in choices]


class _End(NamedTuple):
    """When the engine finished a choice, and which."""

    ns: int
    prompt: int
    choice: int


def last_breakdown(reply: Reply) -> ChoiceBreakdown | None:
    """The breakdown of the choice that ended last, with which the reply ended; others are not computed. None without a
    choice. Raises `ValueError` as `choice_breakdowns`."""
    choices = [(prompt, choice) for prompt, output in reply.by_prompt() for choice in output.choices]
    if not choices:
        return None
    last = max(_End(_finish_ns(reply, choice.timeline), prompt, choice.index) for prompt, choice in choices)
    return _choice_breakdown(reply, *max(choices, key=lambda one: _ended(reply, one[1].timeline)), last)


def _ended(reply: Reply, line: Timeline) -> tuple[int, int]:
    """Sorts choices by their last token, then by their end."""
    return (line.token_ns[-1] if line.token_ns else 0, max(reply.sent_ns, _finish_ns(reply, line)))


def _choice_breakdown(reply: Reply, prompt: int, choice: ChoiceOutput, last: _End) -> ChoiceBreakdown:
    line = choice.timeline
    tokens = line.token_ns
    return ChoiceBreakdown(
        prompt=prompt,
        index=choice.index,
        finish_reason=choice.finish_reason,
        lines=tuple(_checked(reply.received_ns, _lines(reply, choice, last))),
        first_token_ns=tokens[0] if tokens else None,
        last_token_ns=tokens[-1] if tokens else None,
        end_ns=max(reply.sent_ns, _finish_ns(reply, line)),
    )


def _finish_ns(reply: Reply, line: Timeline) -> int:
    return reply.sent_ns if line.finish_ns is None else line.finish_ns


def latency_breakdown(reply: Reply) -> dict[str, Any]:
    """The breakdown as JSON; times in ns from the reply's arrival."""
    choices = choice_breakdowns(reply)
    return {
        "id": reply.id,
        "object": "request.bill",
        "endpoint": reply.endpoint,
        "model": reply.model,
        "created": int(reply.arrived_s),
        "stream": reply.stream,
        "status": reply.status,
        "cut_ns": None if reply.status == 200 else reply.sent_ns - reply.received_ns,
        "prompt_tokens": sum(len(output.prompt_token_ids) for output in reply.outputs),
        "cached_tokens": sum(output.cached_tokens for output in reply.outputs),
        "completion_tokens": sum(output.output_tokens for output in reply.outputs),
        "verdict": _verdict(choices),
        "choices": [_choice_json(reply, choice) for choice in choices],
    }


def _verdict(choices: Sequence[ChoiceBreakdown]) -> dict[str, Any] | None:
    """The verdict on the choice that ended last, with which the reply ended; names it if there are several."""
    if not choices:
        return None
    last = max(choices, key=lambda choice: (choice.last_token_ns or 0, choice.end_ns))
    found = verdict(last.lines) | {"prompt": last.prompt, "index": last.index}
    if len(choices) > 1:
        found["words"] = f"prompt {last.prompt}, choice {last.index}, which ended last: {found['words']}"
    return found


def _choice_json(reply: Reply, choice: ChoiceBreakdown) -> dict[str, Any]:
    start_ns = reply.received_ns

    def span(until_ns: int | None) -> dict[str, Any] | None:
        return None if until_ns is None else {"ns": until_ns - start_ns, "parts_ns": choice.parts(until_ns)}

    return {
        "prompt": choice.prompt,
        "index": choice.index,
        "finish_reason": choice.finish_reason,
        "verdict": verdict(choice.lines),
        "ttft": span(choice.first_token_ns),
        "e2e": span(choice.last_token_ns),
        "total": span(choice.end_ns),
        "lines": [
            {"what": line.what, "start_ns": line.start_ns - start_ns, "ns": line.ns, "parts_ns": line.parts}
            | line.details
            for line in choice.lines
        ],
    }


def _checked(start_ns: int, lines: Iterable[Line]) -> Iterator[Line]:
    """Drops empty lines. Raises `ValueError` if lines leave a gap, overlap, or do not add up."""
    for line in lines:
        if line.start_ns != start_ns or line.ns != sum(line.parts.values()) or min(line.parts.values()) < 0:
            raise ValueError(f"time stamps out of order: {line} where the line before ended at {start_ns}")
        start_ns = line.end_ns
        if line.ns:
            yield line


# --- lines --------------------------------------------------------------------------------------------------------


def _lines(reply: Reply, choice: ChoiceOutput, last: _End) -> Iterator[Line]:
    """Lines from arrival to the last byte."""
    line = choice.timeline
    finish_ns = _finish_ns(reply, line)
    read_ns = reply.submitted_ns if reply.form_ns is None else reply.form_ns
    yield _plain("received and tokenized", reply.received_ns, read_ns, "front")
    yield _plain("structured output checked", read_ns, reply.submitted_ns, "form")
    yield _plain("passed to the engine, between two steps", reply.submitted_ns, line.arrival_ns, "queue")
    yield from _lost(line)
    arrival_ns, scheduled_ns = line.arrival_ns, line.first_scheduled_ns
    if line.lost:
        arrival_ns, scheduled_ns = line.lost[-1].resumed_ns, line.chunks[0].start_ns if line.chunks else None
    if scheduled_ns is None:
        yield _queued(arrival_ns, finish_ns, line.waits, choice.index)
    else:
        yield _queued(arrival_ns, scheduled_ns, line.waits, choice.index)
        yield from _served(line, scheduled_ns, finish_ns)
    if reply.sent_ns > finish_ns:
        yield from _answered(finish_ns, reply.sent_ns, last)


def _lost(line: Timeline) -> Iterator[Line]:
    """Two lines for each engine that died: the time on it, cut at the first and the last token so that times until
    these can be summed up, and the time until another engine had the sequence."""
    ends = {line.token_ns[0], line.token_ns[-1]} if line.token_ns else set()
    for one in line.lost:
        start_ns = one.start_ns
        for end_ns in sorted({at_ns for at_ns in ends if start_ns < at_ns < one.end_ns} | {one.end_ns}):
            tokens = sum(start_ns < at_ns <= end_ns for at_ns in line.token_ns)
            details = {"tokens": tokens}
            yield Line("on an engine that died", start_ns, end_ns, {"lost": end_ns - start_ns}, details)
            start_ns = end_ns
        waited_ns = one.resumed_ns - one.end_ns
        details = {"lost_tokens": one.tokens_lost}
        yield Line("engine restarted", one.end_ns, one.resumed_ns, {"restart": waited_ns}, details)


def _answered(finish_ns: int, sent_ns: int, last: _End) -> Iterator[Line]:
    """Lines from the choice's end to the reply's, which comes after its last choice."""
    all_ended_ns = max(finish_ns, min(last.ns, sent_ns))
    details = {"last_prompt": last.prompt, "last_index": last.choice}
    waited_ns = all_ended_ns - finish_ns
    yield Line("waited for the reply's other choices", finish_ns, all_ended_ns, {"answers": waited_ns}, details)
    yield _plain("detokenized and sent", all_ended_ns, sent_ns, "send")


def _served(line: Timeline, now: int, finish_ns: int) -> Iterator[Line]:
    """Lines from the first step with a token of the choice to its end."""
    waiting: PreemptionTime | None = None
    reached = max((one.tokens_lost for one in line.lost), default=0)
    items: list[_Item] = [*line.chunks, *line.decodes, *line.preemptions]
    for item in sorted(items, key=_starts):
        if isinstance(item, PreemptionTime):
            yield _before(item, now)
            waiting, now, reached = item, item.at_ns, max(reached, item.tokens_lost)
            continue
        if waiting:
            yield _preempted(waiting, item.start_ns)
        else:
            yield _between(now, item)
        yield _decode(item) if isinstance(item, DecodeTime) else _chunk(item, reached)
        waiting, now = None, item.end_ns
    yield _preempted(waiting, finish_ns) if waiting else _plain("after its last step", now, finish_ns, "host")


def _starts(item: _Item) -> tuple[int, int]:
    return (item.at_ns, 0) if isinstance(item, PreemptionTime) else (item.start_ns, 1)


def _plain(what: str, start_ns: int, end_ns: int, part: str) -> Line:
    return Line(what, start_ns, end_ns, {part: end_ns - start_ns})


def _queued(start_ns: int, end_ns: int, waits: tuple[WaitTime, ...], index: int) -> Line:
    blocks_ns = sum(one.ns for one in waits if one.reason.why is Why.NO_BLOCKS)
    parts = {"queue": end_ns - start_ns - blocks_ns} | ({"blocks": blocks_ns} if blocks_ns else {})
    return Line("queued", start_ns, end_ns, parts, {"held": _wait_reasons(waits, end_ns - start_ns, index)})


def _wait_reasons(waits: tuple[WaitTime, ...], whole_ns: int, index: int = 0) -> list[dict[str, Any]]:
    """Reasons for waiting, with their times. The rest passed before the first step that could have admitted it; further
    choices wait until the first one's prompt is computed, to share its blocks."""
    rest_ns = whole_ns - sum(one.ns for one in waits)
    reasons = [
        {"why": one.reason.why.name.lower(), "words": one.reason.words(), "ns": one.ns, "steps": one.steps}
        for one in waits
    ]
    words = "waited for the first choice to compute the prompt" if index else "waited for the next step to begin"
    rest = {"why": "first_choice" if index else "next_step", "words": words, "ns": rest_ns, "steps": None}
    return [*reasons, rest] if rest_ns else reasons


def _preempted(preemption: PreemptionTime, end_ns: int) -> Line:
    whole_ns = end_ns - preemption.at_ns
    details = {
        "lost_tokens": preemption.tokens_lost,
        "why": None if preemption.reason is None else preemption.reason.words(),
        "held": _wait_reasons(preemption.waits, whole_ns),
    }
    return Line("preempted", preemption.at_ns, end_ns, {"preempted": whole_ns}, details)


def _before(preemption: PreemptionTime, now: int) -> Line:
    """Time since the last step with a token of the sequence; the step itself, if it failed."""
    if preemption.reason is not None and preemption.reason.why is Why.STEP_FAILED:
        return _plain("failed step", now, preemption.at_ns, "preempted")
    return _plain("between steps", now, preemption.at_ns, "host")


def _between(now: int, item: ChunkTime | DecodeTime) -> Line:
    others_ns = item.without_ns if isinstance(item, ChunkTime) else 0
    parts = {"host": item.start_ns - now - others_ns} | ({"others": others_ns} if others_ns else {})
    return Line("steps of other requests" if others_ns else "between steps", now, item.start_ns, parts)


def _chunk(chunk: ChunkTime, reached: int) -> Line:
    """`reached`: number of tokens that had been computed before."""
    again = min(chunk.tokens, max(0, reached - chunk.position))
    details = {
        "step": chunk.step,
        "tokens": chunk.tokens,
        "computed_again_tokens": again,
        "others_tokens": chunk.others,
        "reason": chunk.reason.words(),
        "own_ns_estimated": chunk.alone_ns,
        "others_ns_estimated": chunk.kernel_ns - chunk.alone_ns,
        "starved_ns_estimated": chunk.starved_ns,
        "attention_ns_estimated": chunk.attention_ns,
        **_least(chunk),
    }
    part, host_ns = "preempted" if 2 * again > chunk.tokens else "prefill", chunk.end_ns - chunk.start_ns
    parts = {part: chunk.kernel_ns, "host": host_ns - chunk.kernel_ns}
    return Line("prefill again" if part == "preempted" else "prefill", chunk.start_ns, chunk.end_ns, parts, details)


def _decode(run: DecodeTime) -> Line:
    details = {
        "tokens": run.steps,
        "steps": run.steps,
        "steps_with_prompts_of_others": run.mixed_steps,
        "others_tokens": run.tokens - run.steps,
        "own_ns_estimated": run.alone_ns,
        "others_decode_ns_estimated": run.kernel_ns - run.alone_ns - run.prefill_ns,
        "others_prefill_ns_estimated": run.prefill_ns,
        "starved_ns_estimated": run.starved_ns,
        "attention_ns_estimated": run.attention_ns,
        **_least(run),
    }
    parts = {"decode": run.kernel_ns, "host": run.end_ns - run.start_ns - run.kernel_ns}
    return Line("decode", run.start_ns, run.end_ns, parts, details)


def _least(of: ChunkTime | DecodeTime) -> dict[str, int]:
    """What the whole steps took in the kernels, and what they could take at least, by limit of the machine."""
    arithmetic, bandwidth = of.least
    return {"kernel_ns": of.kernel_ns, "least_arithmetic_ns": arithmetic, "least_bandwidth_ns": bandwidth}
