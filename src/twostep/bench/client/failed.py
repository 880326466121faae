"""A request that was not served whole, as an exception within the client. It never leaves it."""

from twostep.bench.client.outcome import Failure, FailureKind

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
