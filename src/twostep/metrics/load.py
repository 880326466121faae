"""Summary of a load: latencies of served requests, rates, goodput, and failures by kind."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from twostep.metrics import times
from twostep.metrics.summary import Summary, summarise


@dataclass(frozen=True)
class RequestTimes:
    """Times of one request as its client saw them; integer nanoseconds of one clock."""

    asked_ns: int
    """When the request was due; a client that sends late does not improve the figures of the server."""
    token_ns: Sequence[int]
    """Arrival time of each output token. All tokens of a chunk have its time; a chunk with only a role has none."""
    ended_ns: int
    """When the request ended, successfully or not."""
    input_tokens: int = 0
    failure: str | None = None
    """The kind of failure if it was not served completely. It then counts only in `failures`."""
    cut: bool = False
    """Cancelled by the client while running: neither served nor failed, and counted separately."""

    @property
    def ttft_s(self) -> float | None:
        return times.ttft_s(self.asked_ns, self.token_ns)

    @property
    def itl_s(self) -> tuple[float, ...]:
        return times.itl_s(self.token_ns)

    @property
    def tpot_s(self) -> float | None:
        return times.tpot_s(self.token_ns)

    @property
    def e2e_s(self) -> float | None:
        return times.e2e_s(self.asked_ns, self.token_ns)


@dataclass(frozen=True)
class Limits:
    """Limits that a request must meet to count for goodput, in seconds; None: no limit. `itl_s` applies to each gap."""

    ttft_s: float | None = None
    itl_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def met(self, request: RequestTimes) -> bool:
        """Whether a request was served completely and within the limits. Undefined values, such as TPOT of one token,
        meet every limit."""
        longest = max(request.itl_s, default=None)
        values = (request.ttft_s, longest, request.tpot_s, request.e2e_s)
        limits = (self.ttft_s, self.itl_s, self.tpot_s, self.e2e_s)
        return (
            request.failure is None
            and not request.cut
            and all(
                value is None or limit is None or value <= limit for value, limit in zip(values, limits, strict=True)
            )
        )


@dataclass(frozen=True)
class LoadSummary:
    """Times in seconds, rates per second of `duration_s`. Latencies, tokens and rates count completely served
    requests."""

    duration_s: float
    """From the due time of the first request to the end of the last one."""
    requests: int
    """Requests that were served or failed."""
    cut: int
    """Requests cancelled by the client; not counted anywhere else."""
    served: int
    failures: dict[str, int]
    """Number of failures by kind, most frequent first."""
    ttft: Summary | None
    """Over requests."""
    itl: Summary | None
    """Over all gaps between tokens; long answers contribute more."""
    tpot: Summary | None
    """Over requests with at least two tokens."""
    e2e: Summary | None
    """Over requests."""
    input_tokens: int
    output_tokens: int
    met: int
    """Requests that met the limits."""

    @property
    def request_rate(self) -> float:
        return self.served / self.duration_s

    @property
    def goodput(self) -> float:
        """Requests per second that met every limit."""
        return self.met / self.duration_s

    @property
    def input_rate(self) -> float:
        """Tokens per second."""
        return self.input_tokens / self.duration_s

    @property
    def output_rate(self) -> float:
        """Tokens per second."""
        return self.output_tokens / self.duration_s


def summarise_load(requests: Iterable[RequestTimes], limits: Limits | None = None) -> LoadSummary:
    """Raises `ValueError` without requests, as there is no duration."""
    asked = list(requests)
    ended = [request for request in asked if not request.cut]
    served = [request for request in ended if request.failure is None]
    failures = Counter(request.failure for request in ended if request.failure is not None)
    duration_ns = max(request.ended_ns for request in asked) - min(request.asked_ns for request in asked)
    return LoadSummary(
        duration_s=max(duration_ns, 1) / 1e9,
        requests=len(ended),
        cut=len(asked) - len(ended),
        served=len(served),
        failures=dict(failures.most_common()),
        ttft=summarise(_known(request.ttft_s for request in served)),
        itl=summarise(gap for request in served for gap in request.itl_s),
        tpot=summarise(_known(request.tpot_s for request in served)),
        e2e=summarise(_known(request.e2e_s for request in served)),
        input_tokens=sum(request.input_tokens for request in served),
        output_tokens=sum(len(request.token_ns) for request in served),
        met=sum((limits or Limits()).met(request) for request in served),
    )


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]
