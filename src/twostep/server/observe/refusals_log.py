"""One line for each request that was refused: where and why, never its text; few of them if there is a flood."""

import asyncio
from collections.abc import Callable
from time import time

from twostep.openai_api.errors import ApiError
from twostep.server.observe.log_lines import LogLines, clock
from twostep.server.words import plural

MOST = 20
"""Lines within `WINDOW_S`; the rest is counted, in one more line: whoever asks for nonsense fast fills no disk."""
WINDOW_S = 1.0

MAX_PATH = 100
"""Characters of a path that nobody serves."""

Later = Callable[[float, Callable[[], None]], object]


def _later(seconds: float, what: Callable[[], None]) -> object:
    return asyncio.get_running_loop().call_later(seconds, what)


class RefusalsLog:
    """For one event loop."""

    def __init__(self, lines: LogLines, later: Later = _later, now_s: Callable[[], float] = time) -> None:
        """`later` calls what it is given after so many seconds; `now_s` is the wall clock."""
        self._lines, self._later, self._now_s = lines, later, now_s
        self._came: int | None = None
        """Within the window; None: none is open."""

    def write(self, endpoint: str, status: int, error: ApiError, unknown_path: str | None = None) -> None:
        """`error.param` is a name of ours; its message may quote the request and is left out. `unknown_path` is what
        was asked for if `endpoint` does not say it; it is quoted, as it may hold anything."""
        if self._came is None:
            self._came = 0
            self._later(WINDOW_S, self.end)
        self._came += 1
        if self._came > MOST:
            return
        entry = {"event": "refusal", "time": clock(self._now_s()), "endpoint": endpoint, "status": status,
                 "code": error.code, "param": error.param}  # fmt: skip
        if unknown_path is not None:
            entry["path"] = unknown_path[:MAX_PATH]
            endpoint = _quoted(unknown_path)
        why = "".join(f", {name} {entry[name]}" for name in ("code", "param") if entry[name])
        self._lines.write(entry, f"{entry['time']} {status} {endpoint}: refused{why}")

    def end(self) -> None:
        """The window is over, or the server."""
        left_out, self._came = max(0, (self._came or 0) - MOST), None
        if left_out:
            entry = {"event": "refusals_left_out", "time": clock(self._now_s()), "count": left_out}
            self._lines.write(entry, f"{entry['time']} {plural(left_out, 'more refusal')} within {WINDOW_S:g} s")


def _quoted(path: str) -> str:
    """In ASCII, without line ends or anything else that a terminal would act on."""
    return ascii(path[:MAX_PATH]) + "..." * (len(path) > MAX_PATH)
