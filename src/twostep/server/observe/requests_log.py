"""One line for each reply on standard error or in a file: how long it took and why, never a word of its text."""

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from twostep.engine.outputs import Timeline
from twostep.server.observe.breakdown import ChoiceBill, last_bill
from twostep.server.observe.finished import Reply
from twostep.server.observe.log_lines import LogLines, clock
from twostep.server.observe.verdict import verdict
from twostep.server.words import plural

log = logging.getLogger(__name__)

LONG = 100
"""Lines of a breakdown that take a millisecond: an entry with more is made in a thread."""


class RequestsLog:
    """`write` is one of what `Ledger` tells of replies."""

    def __init__(self, lines: LogLines) -> None:
        self._lines = lines
        self._beside = ThreadPoolExecutor(1, "requests log")

    def write(self, reply: Reply) -> None:
        """At once, or soon where a choice was computed in very many steps: a prompt of 32 000 tokens in 2 000."""
        longest = max((_steps(choice.timeline) for output in reply.outputs for choice in output.choices), default=0)
        if longest > LONG:
            self._beside.submit(self._write_beside, reply)
        else:
            self._write(reply)

    def close(self) -> None:
        """All that was written is in the log then."""
        self._beside.shutdown()

    def _write_beside(self, reply: Reply) -> None:
        try:
            self._write(reply)
        except Exception:  # the pool would keep it to itself
            log.exception("the line of request %s could not be made", reply.id)

    def _write(self, reply: Reply) -> None:
        entry = log_entry(reply)
        self._lines.write(entry, _text(entry))


def _steps(line: Timeline) -> int:
    return len(line.chunks) + len(line.decodes) + len(line.preemptions)


def log_entry(reply: Reply) -> dict[str, Any]:
    """Of several answers times are those of the one that ended last, which the verdict is about."""
    last = last_bill(reply)
    choices = [choice for _, output in reply.by_prompt() for choice in output.choices]
    total_ns = (last.end_ns if last else reply.sent_ns) - reply.received_ns
    return {
        "event": "reply",
        "time": clock(reply.arrived_s + total_ns / 1e9),
        "arrived": clock(reply.arrived_s),
        "id": reply.id,
        "endpoint": reply.endpoint,
        "model": reply.model,
        "stream": reply.stream,
        "status": reply.status,
        "prompt_tokens": sum(len(output.prompt_token_ids) for output in reply.outputs),
        "cached_tokens": sum(output.cached_tokens for output in reply.outputs),
        "completion_tokens": sum(output.output_tokens for output in reply.outputs),
        "finish_reasons": [choice.finish_reason for choice in choices],
        **_times(reply, last, total_ns),
        "preemptions": sum(len(choice.timeline.preemptions) for choice in choices),
        "limit": verdict(last.lines)["limit"] if last else None,
    }


def _times(reply: Reply, last: ChoiceBill | None, total_ns: int) -> dict[str, Any]:
    """In ms; null where they never came."""

    def since_ms(at_ns: int | None) -> float | None:
        return None if at_ns is None else _ms(at_ns - reply.received_ns)

    return {
        "ttft_ms": since_ms(last.first_token_ns) if last else None,
        "e2e_ms": since_ms(last.last_token_ns) if last else None,
        "total_ms": _ms(total_ns),
        "cut_ms": None if reply.status == 200 else since_ms(reply.sent_ns),
        "parts_ms": {part: _ms(ns) for part, ns in last.parts().items()} if last else {},
    }


def _ms(ns: int) -> float:
    return round(ns / 1e6, 3)


def _text(entry: dict[str, Any]) -> str:
    """The same for people, shorter."""
    ttft = "-" if entry["ttft_ms"] is None else f"{entry['ttft_ms']:.0f} ms"
    answer = plural(entry["completion_tokens"], "token")
    tokens = f"{entry['prompt_tokens']} ({entry['cached_tokens']} cached) + {answer}"
    held = f", held by {entry['limit']}" if entry["limit"] else ""  # nothing is known of what never came to its end
    times = f"TTFT {ttft}, {entry['total_ms']:.0f} ms in all{held}"
    return f"{entry['time']} {entry['status']} {entry['endpoint']} {entry['id']}: {tokens}, {times}"
