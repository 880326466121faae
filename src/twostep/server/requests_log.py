"""One line for each reply on standard error or in a file: how long it took and why, never a word of its text."""

from typing import Any

from twostep.server.bill import bill
from twostep.server.ledger import Reply
from twostep.server.log_lines import LogLines, clock
from twostep.server.words import plural


class RequestsLog:
    """`write` is one of what `Ledger` tells of replies."""

    def __init__(self, lines: LogLines) -> None:
        self._lines = lines

    def write(self, reply: Reply) -> None:
        entry = log_entry(reply)
        self._lines.write(entry, _text(entry))


def log_entry(reply: Reply) -> dict[str, Any]:
    """Of several answers times are those of the one that ended last, which the verdict is about."""
    whole = bill(reply)
    choices = [choice for _, output in reply.by_prompt() for choice in output.choices]
    last, total_ns = _last(whole), reply.sent_ns - reply.received_ns
    if last:
        total_ns = last["total"]["ns"]
    return {
        "event": "reply",
        "time": clock(reply.arrived_s + total_ns / 1e9),
        "arrived": clock(reply.arrived_s),
        "id": reply.id,
        "endpoint": reply.endpoint,
        "model": reply.model,
        "stream": reply.stream,
        "status": reply.status,
        "prompt_tokens": whole["prompt_tokens"],
        "cached_tokens": whole["cached_tokens"],
        "completion_tokens": whole["completion_tokens"],
        "finish_reasons": [choice.finish_reason for choice in choices],
        **_times(last, total_ns, whole["cut_ns"]),
        "preemptions": sum(len(choice.timeline.preemptions) for choice in choices),
        "limit": whole["verdict"] and whole["verdict"]["limit"],
    }


def _times(last: dict[str, Any] | None, total_ns: int, cut_ns: int | None) -> dict[str, Any]:
    """In ms; null where they never came."""
    return {
        "ttft_ms": _ms(_ns(last, "ttft")),
        "e2e_ms": _ms(_ns(last, "e2e")),
        "total_ms": _ms(total_ns),
        "cut_ms": _ms(cut_ns),
        "parts_ms": {part: _ms(ns) for part, ns in last["total"]["parts_ns"].items()} if last else {},
    }


def _last(whole: dict[str, Any]) -> dict[str, Any] | None:
    """The choice that the verdict is about."""
    about = whole["verdict"]
    if about is None:
        return None
    choices: list[dict[str, Any]] = whole["choices"]
    return next(one for one in choices if (one["prompt"], one["index"]) == (about["prompt"], about["index"]))


def _ns(choice: dict[str, Any] | None, span: str) -> int | None:
    return choice[span]["ns"] if choice and choice[span] else None


def _ms(ns: int | None) -> float | None:
    return None if ns is None else round(ns / 1e6, 3)


def _text(entry: dict[str, Any]) -> str:
    """The same for people, shorter."""
    ttft = "-" if entry["ttft_ms"] is None else f"{entry['ttft_ms']:.0f} ms"
    answer = plural(entry["completion_tokens"], "token")
    tokens = f"{entry['prompt_tokens']} ({entry['cached_tokens']} cached) + {answer}"
    times = f"TTFT {ttft}, {entry['total_ms']:.0f} ms in all, held by {entry['limit']}"
    return f"{entry['time']} {entry['status']} {entry['endpoint']} {entry['id']}: {tokens}, {times}"
