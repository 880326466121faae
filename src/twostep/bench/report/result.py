"""The result of one benchmark command: its runs with the times of every request, and what is needed to repeat it.

The file format is JSON; see `result_json`. Figures are always recomputed from the requests."""

import json
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from twostep.bench.load.run_record import RunRecord
from twostep.bench.load.sweep import Verdict
from twostep.bench.report.output_files import write_file
from twostep.bench.report.result_json import decode, encode, lines
from twostep.errors import ResultError
from twostep.metrics.load import Limits, LoadSummary, RequestTimes, summarise_load
from twostep.workload.definition import Workload
from twostep.workload.schedule import Closed, Open

MARK = "twostep bench result"
"""The key that identifies the file; its value is the format version."""
FORMAT = 2


@dataclass(frozen=True)
class ClientMachine:
    """The machine that ran the client."""

    cpu: str
    cpus: int
    """CPUs available to the process."""
    system: str
    python: str
    twostep: str
    """Its version."""


@dataclass(frozen=True)
class WorkloadFacts:
    """Size of the workload, in tokens as the workload counts them. The record has its name and source."""

    requests: int
    input_tokens: int
    shared_tokens: int
    """Input tokens that are a prefix of an earlier prompt."""
    output_tokens: int
    texts: int = 0
    """Requests with the text of their prompt."""


@dataclass(frozen=True)
class EngineStep:
    """One step of our own engine; nanoseconds since the start of the run."""

    start_ns: int
    end_ns: int
    prefill_tokens: int
    decode_tokens: int


@dataclass(frozen=True)
class Run:
    """One workload at one load. Raises `ValueError` for no requests."""

    record: RunRecord
    workload: WorkloadFacts
    limits: Limits
    rate: float | None = None
    """Requests per second that the workload was scaled to; None in a closed loop and for unscaled workloads."""
    steps: tuple[EngineStep, ...] = ()

    def __post_init__(self) -> None:
        if not self.record.outcomes:
            raise ValueError("a run without requests has no duration")

    @property
    def level(self) -> float | None:
        """The load: requests per second, or clients of a closed loop."""
        mode = self.record.mode
        return mode.clients if isinstance(mode, Closed) else self.rate

    @cached_property
    def summary(self) -> LoadSummary:
        return summarise_load((outcome.times() for outcome in self.record.outcomes), self.limits)

    @property
    def kept_pace(self) -> bool:
        return self.record.kept_pace

    @property
    def kept_up(self) -> bool:
        """Whether the server kept up with the load; always true for a closed loop."""
        is_open = isinstance(self.record.mode, Open)
        return not is_open or kept_up([one.times() for one in self.record.outcomes], self.limits)

    @property
    def offered(self) -> float | None:
        """Requests per second that were due; less than `rate` if some wait for others. None in a closed loop, and if
        all were due at once."""
        is_open = isinstance(self.record.mode, Open)
        return offered_rate([one.times() for one in self.record.outcomes]) if is_open else None

    @property
    def not_sent(self) -> int:
        """Requests of the workload that were not sent before the end of the run."""
        return max(0, self.workload.requests - len(self.record.outcomes))


@dataclass(frozen=True)
class Result:
    """`command`: the command line without secrets. `sweep`: the verdict if the runs are a sweep."""

    command: tuple[str, ...]
    client: ClientMachine
    runs: tuple[Run, ...]
    sweep: Verdict | None = None


def client_machine() -> ClientMachine:
    """Describes this machine."""
    from importlib.metadata import PackageNotFoundError, version  # slow to load

    try:
        installed = version("twostep")
    except PackageNotFoundError:
        installed = "not installed"
    system = f"{platform.system()} {platform.release()}"
    return ClientMachine(_cpu_name(), len(os.sched_getaffinity(0)), system, platform.python_version(), installed)


def workload_facts(workload: Workload) -> WorkloadFacts:
    return WorkloadFacts(
        requests=len(workload.requests),
        input_tokens=sum(request.input_tokens for request in workload.requests),
        shared_tokens=sum(workload.shared_tokens()),
        output_tokens=sum(request.output_tokens for request in workload.requests),
        texts=sum(request.text is not None for request in workload.requests),
    )


def write_result(result: Result, path: Path) -> None:
    """Raises `ResultError` if the file cannot be written."""
    write_file(path, result_text(result).encode())


def read_result(path: Path) -> Result:
    """Reads a result without loss. Raises `ResultError` naming the file and the field."""
    try:
        return parse_result(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ResultError(f"{path}: cannot be read: {error.strerror}") from error
    except (ResultError, UnicodeDecodeError) as error:
        raise ResultError(f"{path}: {error}") from error


def result_text(result: Result) -> str:
    """JSON with one request per line."""
    return lines({MARK: FORMAT} | encode(result) | {"runs": [_with_figures(run) for run in result.runs]}, 5) + "\n"


def parse_result(text: str) -> Result:
    """Raises `ResultError` that names the field."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ResultError(f"not JSON: {error}") from error
    if not isinstance(found, dict) or MARK not in found:
        raise ResultError(f"not a result of twostep bench: {MARK!r} is missing")
    if found.pop(MARK) != FORMAT:
        raise ResultError(f"{MARK} has an unknown format; this version of twostep reads format {FORMAT}")
    result: Result = decode(Result, found | {"runs": _without_figures(found.get("runs"))}, "result")
    return result


def _with_figures(run: Run) -> dict[str, Any]:
    """Adds computed figures, for programs that read the file."""
    summary = run.summary
    rates = {name: getattr(summary, name) for name in ("request_rate", "goodput", "input_rate", "output_rate")}
    return {"figures": asdict(summary) | rates, **encode(run)}


def _without_figures(runs: object) -> object:
    """Drops the computed figures, which are recomputed from the requests."""
    if not isinstance(runs, list):
        return runs
    return [
        {key: value for key, value in run.items() if key != "figures"} if isinstance(run, dict) else run for run in runs
    ]


def _cpu_name() -> str:
    """From /proc/cpuinfo on Linux, otherwise the processor type."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


GROWTH = 0.1
"""If the server keeps up, its queue grows by at most this share of the requests that arrive."""
CHANCE = 3
"""The queue may grow by this many requests by chance."""


def kept_up(requests: Sequence[RequestTimes], limits: Limits) -> bool:
    """Whether the queue of an open loop did not keep growing between the first third of the arrivals and the last one.

    A request is in the queue from its due time to its first token, or to its end if there is a limit on `e2e`.
    """
    due = sorted(one.asked_ns for one in requests)
    start = due[0] + (due[-1] - due[0]) // 3
    arrived = sum(at_ns > start for at_ns in due)
    growth = _waiting(requests, limits, due[-1]) - _waiting(requests, limits, start)
    return growth <= max(GROWTH * arrived, CHANCE)


def offered_rate(requests: Sequence[RequestTimes]) -> float | None:
    """Requests per second that were due: (requests - 1) / (last due - first due). None if all were due at once."""
    due = sorted(one.asked_ns for one in requests)
    return (len(due) - 1) / ((due[-1] - due[0]) / 1e9) if due[-1] > due[0] else None


def _waiting(requests: Sequence[RequestTimes], limits: Limits, at_ns: int) -> int:
    return sum(one.asked_ns < at_ns < _done_ns(one, limits) for one in requests)


def _done_ns(one: RequestTimes, limits: Limits) -> int:
    return one.token_ns[0] if one.token_ns and limits.e2e_s is None else one.ended_ns
