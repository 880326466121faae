"""What one run of a workload against a server leaves: outcomes, and how well the client itself did."""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from twostep.bench.client.outcome import Outcome
from twostep.metrics.summary import Summary

LATE_S = 0.010
"""A client whose own delays have a p99 above this measured itself as well as the server."""


@dataclass(frozen=True)
class Open:
    """Each request is sent when it is due, whatever became of the others; one that comes after another is due so long
    after that one's end."""


@dataclass(frozen=True)
class Closed:
    """So many clients; each asks the next when its reply is whole. Arrival times have no meaning."""

    clients: int


Mode = Open | Closed


class End(StrEnum):
    """Why a run was over."""

    WHOLE = "whole"
    INTERRUPTED = "interrupted"
    LIMIT = "time limit"


@dataclass(frozen=True)
class Server:
    """What was asked, without secrets."""

    url: str
    endpoint: str
    """`completions` or `chat`."""
    model: str
    owner: str = ""
    """`owned_by` of the model, which tells kinds of servers apart; empty if it did not say."""


@dataclass(frozen=True)
class Fit:
    """Tokens that a server counts in a prompt of `words` words: `overhead + per_word * words`."""

    overhead: float
    """Of the chat template and the begin-of-sequence token."""
    per_word: float


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
    """Of the requests that were sent, in order of their number."""
    end: End
    lateness: Summary | None
    """Seconds from when requests were due until they were sent; None if nothing was sent."""
    lag: Summary | None
    """Seconds by which the client's own timers came late during the run: so late may any of its time stamps be."""
    salt: str
    """Prompts are made from it: another salt makes others, so that they are not found in a prefix cache."""
    fit: Fit | None = None
    """How lengths in tokens became words; None where prompts are token ids or given as text."""
    warmup: int = 0
    """Requests asked before, which are not among the outcomes."""

    @property
    def kept_pace(self) -> bool:
        """Whether the client kept its own schedule: else its figures are not only the server's."""
        return all(summary is None or summary.p99 <= LATE_S for summary in (self.lateness, self.lag))
