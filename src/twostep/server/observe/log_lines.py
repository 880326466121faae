"""Lines of the log: for people, or one JSON object each."""

import json
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, TextIO


class LogLines:
    def __init__(self, stream: TextIO | None, *, as_json: bool) -> None:
        self._stream, self._as_json = stream, as_json

    def write(self, entry: dict[str, Any], words: str) -> None:
        """The same twice, of which one is written. A log that cannot be written, or is closed, stops no request."""
        if self._stream is None:
            return
        line = json.dumps(entry) if self._as_json else words
        with suppress(OSError):
            print(line, file=self._stream, flush=True)


def clock(seconds: float) -> str:
    """Wall clock as a log has it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
