"""Shows the progress of a batch of requests: a bar on a terminal, otherwise a line every ten seconds."""

from collections.abc import Callable
from time import monotonic
from typing import TextIO

from twostep.terminal import StatusLine, bar

LIVE_EVERY_S, LINE_EVERY_S = 0.1, 10.0


class RequestProgress(StatusLine):
    """Counts finished requests and their tokens, and prints them from time to time."""

    def __init__(
        self, total: int, *, before: int = 0, stream: TextIO | None = None, clock: Callable[[], float] = monotonic
    ) -> None:
        """`before` of the `total` requests were done by an earlier run and do not count for the speed of this one."""
        super().__init__(stream)
        self._total, self._before = total, before
        self._done = self._tokens = 0
        self._clock = clock
        self._started_s = self._said_s = clock()

    def finished(self, tokens: int, requests: int = 1) -> None:
        self._done += requests
        self._tokens += tokens
        now_s = self._clock()
        if now_s - self._said_s < (LIVE_EVERY_S if self.live else LINE_EVERY_S):
            return
        self._said_s = now_s
        if self.live:
            self.show(f"  {bar(self._before + self._done, self._total, cells=16)} {self.summary()}{self._left()}")
        else:
            self.say(f"{self.summary()}{self._left()}")

    def summary(self) -> str:
        """Requests, tokens per second and time so far."""
        elapsed_s = self._clock() - self._started_s
        rate = f"{self._tokens / elapsed_s:.0f}" if elapsed_s > 0 else "-"
        done = self._before + self._done
        return f"{done}/{self._total} requests, {rate} output tokens/s, {_clock_time(elapsed_s)}"

    def _left(self) -> str:
        """Estimated from the mean time of the requests done."""
        left = self._total - self._before - self._done
        if not self._done or not left:
            return ""
        return f", {_clock_time((self._clock() - self._started_s) / self._done * left)} left"


def _clock_time(seconds: float) -> str:
    minutes, whole_s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{whole_s:02}" if hours else f"{minutes}:{whole_s:02}"
