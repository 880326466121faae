"""What a load of requests says of a server: latencies of those that were served, rates, goodput, failures by kind."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from twostep.metrics import times
from twostep.metrics.summary import Summary, summarise


@dataclass(frozen=True)
class RequestTimes:
    """One request as whoever asked saw it; integer nanoseconds of one clock."""

    asked_ns: int
    """When it was due: a client that sends late does not make a server look better."""
    token_ns: Sequence[int]
    """When each output token came. A chunk with several gives each of them its time; one with only a role none."""
    ended_ns: int
    """When it was over, well or not."""
    input_tokens: int = 0
    failure: str | None = None
    """Its kind, if it was not served whole. Then it counts under `failures` and nowhere else."""
    cut: bool = False
    """Whoever asked ended it while it was under way: neither served nor failed, and counted apart."""

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
    """What a request has to keep to count for goodput, in seconds; None asks nothing. `itl_s` holds for each gap."""

    ttft_s: float | None = None
    itl_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def met(self, request: RequestTimes) -> bool:
        """By a request that was served whole. What is undefined, as TPOT of one token, breaks no limit."""
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
    """Times in seconds, rates per second of `duration_s`; latencies, tokens and rates are of requests served whole."""

    duration_s: float
    """From the moment that the first request was due to the end of the last one."""
    requests: int
    """That came to their own end, well or not."""
    cut: int
    """Ended by whoever asked; of them nothing else counts."""
    served: int
    failures: dict[str, int]
    """By kind, the most frequent first."""
    ttft: Summary | None
    """Of requests."""
    itl: Summary | None
    """Of all gaps between tokens, those of long answers counting more often."""
    tpot: Summary | None
    """Of requests with two tokens and more."""
    e2e: Summary | None
    """Of requests."""
    input_tokens: int
    output_tokens: int
    met: int
    """Requests that met the limits."""

    @property
    def request_rate(self) -> float:
        return self.served / self.duration_s

    @property
    def goodput(self) -> float:
        """Requests per second that met every limit asked of them."""
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
    """Raises `ValueError` for no requests: they have no duration."""
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
