"""The record of one run of a workload: the outcome of each request, and how punctual the client was."""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from twostep.bench.client.outcome import Outcome
from twostep.metrics.summary import Summary
from twostep.workload.schedule import Mode

LATE_S = 0.010
"""If the p99 of the client's own delays is above this, the figures are not only those of the server."""


class End(StrEnum):
    """Why a run ended."""

    WHOLE = "whole"
    INTERRUPTED = "interrupted"
    LIMIT = "time limit"


@dataclass(frozen=True)
class Server:
    """The measured server, without secrets."""

    url: str
    endpoint: str
    """`completions` or `chat`."""
    model: str
    owner: str = ""
    """`owned_by` of the model, which identifies the kind of server; empty if not reported."""


@dataclass(frozen=True)
class Fit:
    """Tokens that a server counts in a prompt of `words` words: `overhead + per_word * words`."""

    overhead: float
    """Tokens of the chat template and the beginning-of-sequence token."""
    per_word: float


@dataclass(frozen=True)
class Note:
    """A line of a report: what it is about, and words."""

    name: str
    words: str


@dataclass(frozen=True)
class Simulated:
    """Makes a run one that was simulated and not measured."""

    assumed: tuple[Note, ...]
    """What it rests on, with the origin of each number."""
    happened: tuple[Note, ...]
    """What a client does not see: steps, cache, preemptions."""


@dataclass(frozen=True)
class RunRecord:
    """One run. Nanoseconds in `outcomes` count from `started_at`."""

    server: Server
    workload: str
    """Its name."""
    source: str
    """The workload's."""
    mode: Mode
    started_at: datetime
    """UTC."""
    outcomes: tuple[Outcome, ...]
    """Outcomes of all requests that were sent, in order of their number."""
    end: End
    lateness: Summary | None
    """Seconds by which requests were sent after they were due; None if none was sent."""
    lag: Summary | None
    """Seconds by which timers of the client fired late: any of its time stamps may be late by this much."""
    salt: str
    """Seed of the prompt content; a new salt avoids hits in the prefix cache."""
    fit: Fit | None = None
    """Tokens per word used for prompts; None if prompts are token ids or text of the workload."""
    warmup: int = 0
    """Warm-up requests before the run; not in `outcomes`."""
    simulated: Simulated | None = None
    """None: it was measured."""

    @property
    def kept_pace(self) -> bool:
        """Whether the client kept its schedule; otherwise the figures are not only those of the server."""
        return all(summary is None or summary.p99 <= LATE_S for summary in (self.lateness, self.lag))
