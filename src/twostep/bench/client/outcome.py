"""What a client measured of one request, and why a request failed."""

from dataclasses import dataclass
from enum import StrEnum

from twostep.metrics.load import RequestTimes


class FailureKind(StrEnum):
    """Why a request was not served completely."""

    REFUSED = "connection refused"
    TLS = "no TLS connection"
    """A certificate that is not trusted, or a server without TLS."""
    DROPPED = "connection dropped"
    """During or before a reply."""
    STALLED = "stalled"
    """No byte for too long."""
    TOO_LONG = "took too long"
    """The reply did not end in time."""
    STATUS = "HTTP status"
    """Other than 200; `Failure.detail` begins with it."""
    OVERLOADED = "turned away (429, 503)"
    ERROR = "error in the stream"
    """The server reported an error after the stream had started."""
    GARBAGE = "not understood"
    """The reply is not HTTP, not server-sent events, or not in OpenAI's format."""
    SHORT = "answer too short"
    """Fewer tokens than requested, although the server was told to ignore the end-of-sequence token."""
    EMPTY = "no token"
    CANCELLED = "cancelled"
    """The run was stopped while the request was running; not a failure of the server."""


@dataclass(frozen=True, slots=True)
class Failure:
    kind: FailureKind
    detail: str
    """One line, of at most 300 characters."""


class Counting(StrEnum):
    """How the number of tokens in each chunk is known."""

    STATED = "stated"
    """Reported by the server for each chunk, or its total equals the number of chunks."""
    SPREAD = "spread"
    """The total reported by the server is spread over the chunks by their text length."""
    ASSUMED = "assumed"
    """The server gave no total: each chunk with text counts as one token."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request. Times are integer nanoseconds since the start of the run."""

    number: int
    """Index of the request in the workload."""
    due_ns: int
    """Scheduled send time; in a closed loop, when its client became free."""
    sent_ns: int
    """When the connection attempt started."""
    token_ns: tuple[int, ...]
    """Arrival time of each token; all tokens of a chunk have the same time."""
    ended_ns: int
    asked_input_tokens: int
    asked_output_tokens: int
    input_tokens: int | None = None
    """As counted by the server; None if it did not report them."""
    cached_tokens: int | None = None
    """Input tokens found in the prefix cache; None if the server did not report them."""
    counted: Counting = Counting.STATED
    """How the tokens of `token_ns` were counted."""
    failure: Failure | None = None
    request_id: str = ""
    """The id given by the server, to search its logs."""

    @property
    def cut(self) -> bool:
        return self.failure is not None and self.failure.kind is FailureKind.CANCELLED

    def times(self) -> RequestTimes:
        """The times as `metrics` takes them. Input tokens are as counted by the server if it reported them."""
        tokens = self.asked_input_tokens if self.input_tokens is None else self.input_tokens
        kind = None if self.failure is None or self.cut else str(self.failure.kind)
        return RequestTimes(self.due_ns, self.token_ns, self.ended_ns, tokens, kind, self.cut)


MAX_DETAIL = 300


class FailureError(Exception):
    """Why a request failed, as an exception inside the client: a kind and one line of detail."""

    def __init__(self, kind: FailureKind, detail: str) -> None:
        super().__init__(detail)
        self.failure = Failure(kind, one_line(detail))


def failure_message(failure: Failure) -> str:
    """A message for the user: what happened, with a hint if there is one."""
    if failure.kind in (FailureKind.REFUSED, FailureKind.TLS):
        return failure.detail
    if failure.kind not in (FailureKind.STATUS, FailureKind.OVERLOADED):
        return f"{failure.kind}: {failure.detail}"
    wants_key = failure.detail.startswith(("401", "403"))
    return f"status {failure.detail}" + "; the key is set by --api-key or TWOSTEP_API_KEY" * wants_key


def garbage(detail: str) -> FailureError:
    """The error for a reply in another format than requested."""
    return FailureError(FailureKind.GARBAGE, detail)


def one_line(text: str) -> str:
    """The text as one line of at most `MAX_DETAIL` printable characters."""
    line = " ".join("".join(c if c.isprintable() or c.isspace() else "\ufffd" for c in text[: 4 * MAX_DETAIL]).split())
    return line if len(line) <= MAX_DETAIL else f"{line[: MAX_DETAIL - 1]}…"
