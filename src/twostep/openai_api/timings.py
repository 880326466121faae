"""llama.cpp's `timings` object of a reply, extended by waiting, chunks, preemptions and cached tokens."""

from collections.abc import Sequence
from typing import Any

from twostep.engine.outputs import RequestOutput, Timeline


def timings(outputs: Sequence[RequestOutput], received_ns: int | None = None) -> dict[str, Any]:
    """Of a reply with one answer its own times. Where there are several answers they are one interval: from the first
    arrival over the first step and the first token of any to the last token of any.

    `received_ns`: when a server received the request, before its prompts arrived at the engine.

    `predicted_*` rates leave out the first token, which prefill gives; null where nothing came after it.
    """
    lines = [choice.timeline for output in outputs for choice in output.choices]
    whole = _whole(lines, received_ns)
    prompt_n = sum(len(output.prompt_token_ids) for output in outputs)
    cached_n = sum(output.cached_tokens for output in outputs)
    return {
        "cache_n": cached_n,
        "cached_n": cached_n,
        **_prefill(whole, prompt_n - cached_n),
        **_decode(whole, sum(len(line.token_ns) for line in lines), sum(output.output_tokens for output in outputs)),
        "prefill_chunks": len({chunk.step for line in lines for chunk in line.chunks}),
        "preemptions": sum(len(line.preemptions) for line in lines),
    }


def _whole(lines: Sequence[Timeline], received_ns: int | None) -> Timeline:
    """One interval over all; of their tokens it has the first and the last. It does not sort them: 100 answers of 2 500
    tokens each would hold up the event loop."""
    scheduled = [line.first_scheduled_ns for line in lines if line.first_scheduled_ns is not None]
    begun = [line.token_ns for line in lines if line.token_ns]
    ends = (min(token_ns[0] for token_ns in begun), max(token_ns[-1] for token_ns in begun)) if begun else ()
    return Timeline(
        arrival_ns=min(line.arrival_ns for line in lines) if received_ns is None else received_ns,
        first_scheduled_ns=min(scheduled, default=None),
        token_ns=ends,
    )


def _prefill(line: Timeline, prompt_n: int) -> dict[str, Any]:
    return {
        "prompt_n": prompt_n,
        "prompt_ms": _ms(line.prefill_s),
        "prompt_per_token_ms": None if line.prefill_s is None or not prompt_n else 1000 * line.prefill_s / prompt_n,
        "prompt_per_second": prompt_n / line.prefill_s if line.prefill_s else None,
        "queue_ms": _ms(line.queue_s),
        "ttft_ms": _ms(line.ttft_s),
    }


def _decode(line: Timeline, token_n: int, predicted_n: int) -> dict[str, Any]:
    """`token_n`: tokens that have a time stamp; the first of them is prefill's."""
    span_s = (line.token_ns[-1] - line.token_ns[0]) / 1e9 if line.token_ns else None
    tpot_s = None if span_s is None or token_n < 2 else span_s / (token_n - 1)
    return {
        "predicted_n": predicted_n,
        "predicted_ms": _ms(span_s),
        "predicted_per_token_ms": _ms(tpot_s),
        "predicted_per_second": 1 / tpot_s if tpot_s else None,
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds
