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
    prompt_n = sum(len(output.prompt_token_ids) for output in outputs)
    cached_n = sum(output.cached_tokens for output in outputs)
    return {
        "cache_n": cached_n,
        "cached_n": cached_n,
        **_prefill(_whole(lines, received_ns), prompt_n - cached_n),
        **_decode(_whole(lines, received_ns), sum(output.output_tokens for output in outputs)),
        "prefill_chunks": len({chunk.step for line in lines for chunk in line.chunks}),
        "preemptions": sum(len(line.preemptions) for line in lines),
    }


def _whole(lines: Sequence[Timeline], received_ns: int | None) -> Timeline:
    scheduled = [line.first_scheduled_ns for line in lines if line.first_scheduled_ns is not None]
    return Timeline(
        arrival_ns=min(line.arrival_ns for line in lines) if received_ns is None else received_ns,
        first_scheduled_ns=min(scheduled, default=None),
        token_ns=tuple(sorted(at_ns for line in lines for at_ns in line.token_ns)),
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


def _decode(line: Timeline, predicted_n: int) -> dict[str, Any]:
    span_s = (line.token_ns[-1] - line.token_ns[0]) / 1e9 if line.token_ns else None
    return {
        "predicted_n": predicted_n,
        "predicted_ms": _ms(span_s),
        "predicted_per_token_ms": _ms(line.tpot_s),
        "predicted_per_second": 1 / line.tpot_s if line.tpot_s else None,
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds
