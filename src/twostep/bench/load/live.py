"""How a run goes, for somebody who waits: one line that is written anew, or one every so often where that cannot be."""

from dataclasses import dataclass
from time import monotonic

from twostep.terminal import StatusLine, bar

QUIET_S = 10
"""Between lines that stay."""


@dataclass(frozen=True)
class Progress:
    """Of a run, up to now."""

    requests: int
    sent: int
    done: int
    """Well or not."""
    failed: int
    tokens: int
    """Chunks with text, of answers that are still coming."""
    elapsed_s: float

    def __str__(self) -> str:
        failed = f", {self.failed} failed" if self.failed else ""
        per_s = self.tokens / self.elapsed_s if self.elapsed_s else 0.0
        running = self.sent - self.done
        return (
            f"{self.done}/{self.requests} requests, {running} running{failed}, "
            f"{self.tokens} tokens ({per_s:.0f}/s), {self.elapsed_s:.0f} s"
        )


class LiveLine:
    """Give it to `run` as `progress`."""

    def __init__(self, line: StatusLine | None = None) -> None:
        self._line = line or StatusLine()
        self._said_s = monotonic()

    def __call__(self, progress: Progress) -> None:
        if self._line.live:
            self._line.show(f"{bar(progress.done, progress.requests)} {progress}")
        elif monotonic() - self._said_s >= QUIET_S:
            self._said_s = monotonic()
            self._line.say(str(progress))

    def clear(self) -> None:
        """The run is over; what is printed next has the line to itself."""
        self._line.clear()
