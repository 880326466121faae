"""The request log: one line per reply (how long it took and why) and per refusal (where and why), never its text."""

import asyncio
import json
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from time import time
from typing import Any, TextIO

from twostep.engine.outputs import Timeline
from twostep.openai_api.api_error import ApiError
from twostep.server.observe.breakdown_text import plural
from twostep.server.observe.finished_requests import Reply
from twostep.server.observe.latency_breakdown import ChoiceBreakdown, last_breakdown
from twostep.server.observe.verdict import verdict

log = logging.getLogger(__name__)

LONG = 100
"""Lines of a breakdown that take a millisecond to compute; entries with more are written by a thread."""

MAX_REFUSALS = 20
"""Lines within `WINDOW_S`; further ones are only counted, in one more line, so that a flood does not fill the disk."""
WINDOW_S = 1.0

MAX_PATH = 100
"""Characters of an unknown path that are logged."""


class LogLines:
    """Writes log lines to `stream`; None: nowhere."""

    def __init__(self, stream: TextIO | None, *, as_json: bool) -> None:
        self._stream, self._as_json = stream, as_json

    def write(self, entry: dict[str, Any], text: str) -> None:
        """Writes `entry` as JSON, or else `text`. A log that cannot be written, or is closed, stops no request."""
        if self._stream is None:
            return
        line = json.dumps(entry) if self._as_json else text
        with suppress(OSError):
            print(line, file=self._stream, flush=True)


def clock(seconds: float) -> str:
    """Wall-clock time in ISO 8601, UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


class RequestsLog:
    """Logs replies. `write` is called by `FinishedRequests`."""

    def __init__(self, lines: LogLines) -> None:
        self._lines = lines
        self._thread = ThreadPoolExecutor(1, "requests log")

    def write(self, reply: Reply) -> None:
        """Writes at once, or soon if a choice took very many steps: a prompt of 32 000 tokens takes 2 000."""
        longest = max((_steps(choice.timeline) for output in reply.outputs for choice in output.choices), default=0)
        if longest > LONG:
            self._thread.submit(self._write_in_thread, reply)
        else:
            self._write(reply)

    def close(self) -> None:
        """Returns when everything has been written."""
        self._thread.shutdown()

    def _write_in_thread(self, reply: Reply) -> None:
        try:
            self._write(reply)
        except Exception:  # the pool would discard it
            log.exception("the log line of request %s could not be written", reply.id)

    def _write(self, reply: Reply) -> None:
        entry = log_entry(reply)
        self._lines.write(entry, _text(entry))


def _steps(line: Timeline) -> int:
    return len(line.chunks) + len(line.decodes) + len(line.preemptions)


def log_entry(reply: Reply) -> dict[str, Any]:
    """Times are those of the choice that ended last, on which the verdict is."""
    last = last_breakdown(reply)
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


def _times(reply: Reply, last: ChoiceBreakdown | None, total_ns: int) -> dict[str, Any]:
    """In ms; null for events that never happened."""

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
    """The entry as text, shorter."""
    ttft = "-" if entry["ttft_ms"] is None else f"{entry['ttft_ms']:.0f} ms"
    answer = plural(entry["completion_tokens"], "token")
    tokens = f"{entry['prompt_tokens']} ({entry['cached_tokens']} cached) + {answer}"
    limit = f", limited by {entry['limit']}" if entry["limit"] else ""  # unknown if the engine reported no times
    times = f"TTFT {ttft}, {entry['total_ms']:.0f} ms in all{limit}"
    return f"{entry['time']} {entry['status']} {entry['endpoint']} {entry['id']}: {tokens}, {times}"


Later = Callable[[float, Callable[[], None]], object]


def _later(seconds: float, what: Callable[[], None]) -> object:
    return asyncio.get_running_loop().call_later(seconds, what)


class RefusalsLog:
    """Logs refusals. For one event loop."""

    def __init__(self, lines: LogLines, later: Later = _later, now_s: Callable[[], float] = time) -> None:
        """`later` calls a function after so many seconds; `now_s` is the wall clock."""
        self._lines, self._later, self._now_s = lines, later, now_s
        self._count: int | None = None
        """Refusals within the window; None: no window is open."""

    def write(self, endpoint: str, status: int, error: ApiError, unknown_path: str | None = None) -> None:
        """Logs a refusal, without its message, which may quote the request; `error.param` is a name of ours.
        `unknown_path` is the requested path if `endpoint` is not; it is quoted, as it may contain anything."""
        if self._count is None:
            self._count = 0
            self._later(WINDOW_S, self.end)
        self._count += 1
        if self._count > MAX_REFUSALS:
            return
        entry = {"event": "refusal", "time": clock(self._now_s()), "endpoint": endpoint, "status": status,
                 "code": error.code, "param": error.param}  # fmt: skip
        if unknown_path is not None:
            entry["path"] = unknown_path[:MAX_PATH]
            endpoint = _quoted(unknown_path)
        why = "".join(f", {name} {entry[name]}" for name in ("code", "param") if entry[name])
        self._lines.write(entry, f"{entry['time']} {status} {endpoint}: refused{why}")

    def end(self) -> None:
        """Ends the window: it is over, or the server shuts down."""
        left_out, self._count = max(0, (self._count or 0) - MAX_REFUSALS), None
        if left_out:
            entry = {"event": "refusals_left_out", "time": clock(self._now_s()), "count": left_out}
            self._lines.write(entry, f"{entry['time']} {plural(left_out, 'more refusal')} within {WINDOW_S:g} s")


def _quoted(path: str) -> str:
    """ASCII without line ends or other characters that a terminal would interpret."""
    return ascii(path[:MAX_PATH]) + "..." * (len(path) > MAX_PATH)
