"""A streamed answer: the time of each token, the server's token counts, and why the answer is not complete."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from time import monotonic_ns

from twostep.bench.client.event_stream import ERROR, SseParser, StreamChunk, Usage, error_in, read_chunk
from twostep.bench.client.outcome import Counting, Failure, FailureError, FailureKind, garbage, one_line

MAX_REFUSAL_BYTES = 4096
_OVERLOADED = (429, 503)
_TELLING = {"retry-after": "Retry-After", "location": "Location"}
"""Headers of an error reply that are worth showing."""


def check_plain(headers: Mapping[str, str]) -> None:
    """Raises `FailureError` for a compressed reply: compression buffers chunks and would distort their times."""
    if encoding := _encoding(headers):
        raise garbage(f"content encoding {encoding}, although identity was requested")


def status_kind(status: int) -> FailureKind:
    """The kind of failure for a status other than 200."""
    return FailureKind.OVERLOADED if status in _OVERLOADED else FailureKind.STATUS


def status_words(status: int, headers: Mapping[str, str]) -> str:
    """Such as `503, Retry-After 7`."""
    details = [f"{shown} {headers[name]}" for name, shown in _TELLING.items() if headers.get(name)]
    return ", ".join([str(status), *details])


def _encoding(headers: Mapping[str, str]) -> str | None:
    encoding = headers.get("content-encoding", "").strip().lower()
    return encoding if encoding not in ("", "identity") else None


class StreamReply:
    """A `Reader` for one streamed answer.

    The answer is complete with `[DONE]`, or with a `finish_reason` and the end of the HTTP message, as some servers
    omit `[DONE]`. Keeps only a few numbers per chunk, for at most about four times the requested tokens.
    """

    def __init__(self, asked_tokens: int, must_be_full: bool) -> None:
        """`must_be_full`: the server was told to ignore the end-of-sequence token."""
        self._asked, self._must_be_full = asked_tokens, must_be_full
        self._most = 4 * asked_tokens + 1024
        self._sse = SseParser()
        self._refusal: Refusal | None = None
        self._arrivals: list[ChunkArrival] = []
        self._so_far = 0
        self._is_consistent = True
        """The reported token totals never decreased."""
        self._finish_reason: str | None = None
        self.usage: Usage | None = None
        self.request_id = ""
        self.ended_ns: int | None = None
        """Arrival time of the last event of a complete answer."""

    # --- as a Reader ------------------------------------------------------------------------------------------------

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        if status != 200:
            self._refusal = Refusal(status, headers)
            return
        check_plain(headers)
        kind = headers.get("content-type", "none")
        if kind.partition(";")[0].strip().lower() != "text/event-stream":
            raise garbage(f"content type {kind} instead of text/event-stream")

    def body(self, data: bytes, at_ns: int) -> bool:
        if self._refusal is not None:
            return self._refusal.body(data)
        for event in self._sse.feed(data):
            if event.kind == ERROR:
                raise FailureError(FailureKind.ERROR, error_in(event.data))
            if event.data == b"[DONE]":
                self.ended_ns = at_ns
                return True
            self._take(read_chunk(event.data), at_ns)
        return False

    def end(self) -> None:
        if self._refusal is None and self._finish_reason is None:
            raise FailureError(FailureKind.DROPPED, "the stream ended without finish_reason or [DONE]")
        self.ended_ns = monotonic_ns()

    # ----------------------------------------------------------------------------------------------------------------

    @property
    def pieces(self) -> int:
        """Chunks with text or tokens so far."""
        return len(self._arrivals)

    def tokens(self) -> tuple[tuple[int, ...], Counting]:
        """Arrival time of each token, and how it was counted; as `token_times`."""
        total = self.usage.output_tokens if self.usage else None
        arrivals = self._arrivals if self._is_consistent else [replace(one, stated=None) for one in self._arrivals]
        return token_times(arrivals, total)

    def failure(self, tokens: int) -> Failure | None:
        """Why a reply that ended with so many tokens is a failure, or None."""
        if self._refusal is not None:
            return self._refusal.failure()
        if not tokens:
            return Failure(FailureKind.EMPTY, f"finish_reason {self._finish_reason}")
        if self._must_be_full and tokens < self._asked and (self._is_counted or self._finish_reason != "length"):
            detail = f"{tokens} tokens of {self._asked}, finish_reason {self._finish_reason}"
            return Failure(FailureKind.SHORT, one_line(detail))
        return None

    def refusal(self) -> Failure | None:
        """The error reply of the server, even if it is incomplete; None for status 200."""
        return self._refusal.failure() if self._refusal else None

    @property
    def _is_counted(self) -> bool:
        """Whether the server reported token counts."""
        return bool(self.usage and self.usage.output_tokens) or any(arrival.stated for arrival in self._arrivals)

    def _take(self, chunk: StreamChunk, at_ns: int) -> None:
        stated = self._stated(chunk)
        if max(len(self._arrivals) + 1, self._so_far) > self._most:
            raise FailureError(FailureKind.TOO_LONG, f"more than {self._most} tokens; requested were {self._asked}")
        if chunk.characters or chunk.is_mute or (stated and chunk.has_choice):
            self._arrivals.append(ChunkArrival(at_ns, chunk.characters, chunk.is_mute, stated))
        self.request_id = self.request_id or chunk.id
        self.usage = chunk.usage or self.usage
        self._finish_reason = self._finish_reason or chunk.finish_reason

    def _stated(self, chunk: StreamChunk) -> int | None:
        """Tokens that the chunk reports, directly or as the increase of a running total."""
        if chunk.tokens is not None:
            self._so_far += chunk.tokens
            return chunk.tokens
        if chunk.tokens_so_far is None:
            return None
        added = chunk.tokens_so_far - self._so_far
        self._is_consistent &= added >= 0
        self._so_far += max(0, added)
        return max(0, added)


class Refusal:
    """A reply with a status other than 200."""

    def __init__(self, status: int, headers: Mapping[str, str]) -> None:
        self._status, self._words, self._encoding = status, status_words(status, headers), _encoding(headers)
        self._body = b""

    def body(self, data: bytes) -> bool:
        self._body += data[: MAX_REFUSAL_BYTES - len(self._body)]
        return len(self._body) >= MAX_REFUSAL_BYTES

    def failure(self) -> Failure:
        said = f"(encoded as {self._encoding})" if self._encoding else error_in(self._body)
        return Failure(status_kind(self._status), one_line(f"{self._words}: {said}" if said else self._words))


@dataclass(frozen=True, slots=True)
class ChunkArrival:
    """The arrival of a chunk with text, or that may contain a token."""

    at_ns: int
    characters: int
    is_mute: bool = False
    """As `StreamChunk.is_mute`."""
    stated: int | None = None
    """Its tokens, if the server reported them."""


def token_times(arrivals: Sequence[ChunkArrival], total: int | None) -> tuple[tuple[int, ...], Counting]:
    """Arrival time of each token, and how tokens per chunk are known. `total`: reported by the server, or None.

    Stated: all chunks with text report their tokens and these add up to the total, or there is one chunk per token.
    Otherwise the total is spread over the chunks with text; without a total, each of them counts as one token.
    """
    spoken = [arrival for arrival in arrivals if arrival.characters]
    stated = [arrival.stated or 0 for arrival in arrivals]
    if sum(stated) and total in (None, sum(stated)) and all(arrival.stated is not None for arrival in spoken):
        return _times(arrivals, stated), Counting.STATED
    if not total:
        return _times(spoken, [1] * len(spoken)), Counting.ASSUMED
    for single in (spoken, [arrival for arrival in arrivals if arrival.characters or arrival.is_mute]):
        if len(single) == total:
            return _times(single, [1] * total), Counting.STATED
    return _times(spoken, spread(total, [arrival.characters for arrival in spoken])), Counting.SPREAD


def spread(total: int, weights: Sequence[int]) -> list[int]:
    """Splits `total` into integers, one per weight: first 1 each while `total` lasts, the rest in proportion to the
    weights by the largest-remainder method."""
    ones = [int(i < total) for i in range(len(weights))]
    left, whole = total - sum(ones), sum(weights)
    if not left or not weights:
        return ones
    shares = [divmod(left * weight, whole) for weight in weights]
    parts = [one + part for one, (part, _) in zip(ones, shares, strict=True)]
    by_remainder = sorted(range(len(weights)), key=lambda i: -shares[i][1])
    for i in by_remainder[: total - sum(parts)]:
        parts[i] += 1
    return parts


def _times(arrivals: Sequence[ChunkArrival], counts: Sequence[int]) -> tuple[int, ...]:
    return tuple(arrival.at_ns for arrival, count in zip(arrivals, counts, strict=True) for _ in range(count))
