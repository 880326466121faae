"""What a client measured of one request, and why a request failed."""

from dataclasses import dataclass
from enum import StrEnum

from twostep.metrics.load import RequestTimes


class FailureKind(StrEnum):
    """Why a request was not served whole."""

    REFUSED = "connection refused"
    TLS = "no TLS connection"
    """A certificate that is not trusted, or a server without TLS."""
    DROPPED = "connection dropped"
    """In the midst of a reply, or before one."""
    STALLED = "stalled"
    """Nothing came for too long."""
    TOO_LONG = "took too long"
    """Something came, but no end."""
    STATUS = "HTTP status"
    """Other than 200; `Failure.detail` begins with it."""
    OVERLOADED = "turned away (429, 503)"
    ERROR = "error in the stream"
    """The server said so after it had begun."""
    GARBAGE = "not understood"
    """What came is not HTTP, not server-sent events, or not OpenAI's."""
    SHORT = "answer too short"
    """Fewer tokens than were asked for, where the server was told to ignore the end-of-sequence token."""
    EMPTY = "no token"
    CANCELLED = "cancelled"
    """The run was ended while it was under way: it was cut, and is no failure of the server."""


@dataclass(frozen=True, slots=True)
class Failure:
    kind: FailureKind
    detail: str
    """One line, of at most 300 characters."""


class Counting(StrEnum):
    """How it is known which of a reply's tokens came in which chunk."""

    STATED = "stated"
    """The server said how many each chunk has, or as many as there are chunks."""
    SPREAD = "spread"
    """Its total was spread over the chunks by their text."""
    ASSUMED = "assumed"
    """It gave no total: each chunk with text was taken for one token."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request; integer nanoseconds since the run's begin."""

    number: int
    """In the workload."""
    due_ns: int
    """When it was to be sent; in a closed loop, when its client was free."""
    sent_ns: int
    """When connecting began."""
    token_ns: tuple[int, ...]
    """When each token came; those of one chunk have the same time."""
    ended_ns: int
    asked_input_tokens: int
    asked_output_tokens: int
    input_tokens: int | None = None
    """As the server counts them; None where it did not say."""
    cached_tokens: int | None = None
    """Of them, found in the prefix cache; None where the server did not say."""
    counted: Counting = Counting.STATED
    """Of `token_ns`."""
    failure: Failure | None = None
    request_id: str = ""
    """The server's, so that its logs can be searched."""

    @property
    def cut(self) -> bool:
        return self.failure is not None and self.failure.kind is FailureKind.CANCELLED

    def times(self) -> RequestTimes:
        """For the arithmetic. Tokens are the server's count if it gave one."""
        tokens = self.asked_input_tokens if self.input_tokens is None else self.input_tokens
        kind = None if self.failure is None or self.cut else str(self.failure.kind)
        return RequestTimes(self.due_ns, self.token_ns, self.ended_ns, tokens, kind, self.cut)


MAX_DETAIL = 300


class FailureError(Exception):
    """Carries the kind and one line of detail."""

    def __init__(self, kind: FailureKind, detail: str) -> None:
        super().__init__(detail)
        self.failure = Failure(kind, one_line(detail))


def told(failure: Failure) -> str:
    """For a person: what happened, and what helps if that is known."""
    if failure.kind in (FailureKind.REFUSED, FailureKind.TLS):
        return failure.detail
    if failure.kind not in (FailureKind.STATUS, FailureKind.OVERLOADED):
        return f"{failure.kind}: {failure.detail}"
    wants_key = failure.detail.startswith(("401", "403"))
    return f"status {failure.detail}" + "; the key is set by --api-key or TWOSTEP_API_KEY" * wants_key


def garbage(detail: str) -> FailureError:
    """What came is not what was asked for."""
    return FailureError(FailureKind.GARBAGE, detail)


def one_line(text: str) -> str:
    """Of at most `MAX_DETAIL` printable characters."""
    line = " ".join("".join(c if c.isprintable() or c.isspace() else "\ufffd" for c in text[: 4 * MAX_DETAIL]).split())
    return line if len(line) <= MAX_DETAIL else f"{line[: MAX_DETAIL - 1]}…"
