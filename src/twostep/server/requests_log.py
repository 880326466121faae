"""One line for each reply on standard error or in a file: how long it took and why, never a word of its text."""

import json
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, TextIO

from twostep.server.bill import bill
from twostep.server.ledger import Reply


class RequestsLog:
    """`write` is one of what `Ledger` tells of replies."""

    def __init__(self, stream: TextIO, *, as_json: bool) -> None:
        self._stream, self._as_json = stream, as_json

    def write(self, reply: Reply) -> None:
        """A log that cannot be written stops no request."""
        entry = log_entry(reply)
        line = json.dumps(entry) if self._as_json else _text(entry)
        with suppress(OSError):
            print(line, file=self._stream, flush=True)


def log_entry(reply: Reply) -> dict[str, Any]:
    """Times of the answer that ended last, in ms; null where they never came."""
    whole = bill(reply)
    choices = [choice for output in reply.outputs for choice in output.choices]
    ended = [one for one in whole["choices"] if one["e2e"]]
    last = max(ended, key=lambda one: int(one["e2e"]["ns"]), default=None)
    parts = last["total"]["parts_ns"] if last else {}
    return {
        "time": datetime.fromtimestamp(reply.created_s, UTC).isoformat(),
        "id": reply.id,
        "endpoint": reply.endpoint,
        "model": reply.model,
        "stream": reply.stream,
        "status": reply.status,
        "prompt_tokens": whole["prompt_tokens"],
        "cached_tokens": whole["cached_tokens"],
        "completion_tokens": whole["completion_tokens"],
        "finish_reasons": [choice.finish_reason for choice in choices],
        "ttft_ms": _ms(last and last["ttft"]["ns"]),
        "e2e_ms": _ms(last and last["e2e"]["ns"]),
        "total_ms": _ms(reply.sent_ns - reply.received_ns),
        "parts_ms": {part: _ms(ns) for part, ns in parts.items()},
        "preemptions": sum(len(choice.timeline.preemptions) for choice in choices),
        "limit": whole["verdict"] and whole["verdict"]["limit"],
    }


def _ms(ns: int | None) -> float | None:
    return None if ns is None else round(ns / 1e6, 3)


def _text(entry: dict[str, Any]) -> str:
    """The same for people, shorter."""
    ttft = "-" if entry["ttft_ms"] is None else f"{entry['ttft_ms']:.0f} ms"
    tokens = f"{entry['prompt_tokens']} ({entry['cached_tokens']} cached) + {entry['completion_tokens']} tokens"
    times = f"TTFT {ttft}, {entry['total_ms']:.0f} ms in all, held by {entry['limit']}"
    return f"{entry['time']} {entry['status']} {entry['endpoint']} {entry['id']}: {tokens}, {times}"
