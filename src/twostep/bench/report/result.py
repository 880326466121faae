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

from twostep.bench.load.run_record import Closed, Open, RunRecord
from twostep.bench.load.sweep import Verdict
from twostep.bench.report.output_files import write_file
from twostep.bench.report.result_json import decode, encode, lines
from twostep.errors import ResultError
from twostep.metrics.load import Limits, LoadSummary, RequestTimes, summarise_load
from twostep.workload.definition import Workload

MARK = "twostep bench result"
"""The key that only such a file has; its value is the format."""
FORMAT = 2


@dataclass(frozen=True)
class ClientMachine:
    """Where the load came from."""

    cpu: str
    cpus: int
    """That this process may use."""
    system: str
    python: str
    twostep: str
    """Its version."""


@dataclass(frozen=True)
class WorkloadFacts:
    """What was to be asked, in tokens as the workload counts them. Its name and source are in the record."""

    requests: int
    input_tokens: int
    shared_tokens: int
    """Of the input tokens, those that an earlier prompt begins with too."""
    output_tokens: int
    texts: int = 0
    """Requests whose prompt is given as text."""


@dataclass(frozen=True)
class Step:
    """One step of our own engine; nanoseconds since the run's begin."""

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
    """Requests per second that the workload was scaled to; None in a closed loop, or where it came as it is."""
    steps: tuple[Step, ...] = ()

    def __post_init__(self) -> None:
        if not self.record.outcomes:
            raise ValueError("a run without requests has no duration")

    @property
    def level(self) -> float | None:
        """Of its load: requests per second, or clients of a closed loop."""
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
        """Whether the server did; a closed loop waits for it."""
        is_open = isinstance(self.record.mode, Open)
        return not is_open or kept_up([one.times() for one in self.record.outcomes], self.limits)

    @property
    def offered(self) -> float | None:
        """Requests per second that were really due; fewer than `rate` where some wait for others. None in a closed
        loop, and where all came at once."""
        is_open = isinstance(self.record.mode, Open)
        return offered_rate([one.times() for one in self.record.outcomes]) if is_open else None

    @property
    def not_sent(self) -> int:
        """Requests of the workload that the run's end came before."""
        return max(0, self.workload.requests - len(self.record.outcomes))


@dataclass(frozen=True)
class Result:
    """`command`: the words of the command line, without secrets. `sweep`: of runs that looked for the highest load."""

    command: tuple[str, ...]
    client: ClientMachine
    runs: tuple[Run, ...]
    sweep: Verdict | None = None


def client_machine() -> ClientMachine:
    """This one."""
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
    """Raises `ResultError` where it cannot be written."""
    write_file(path, result_text(result).encode())


def read_result(path: Path) -> Result:
    """Exactly what was written. Raises `ResultError` that names the file and the field."""
    try:
        return parse_result(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ResultError(f"{path}: cannot be read: {error.strerror}") from error
    except (ResultError, UnicodeDecodeError) as error:
        raise ResultError(f"{path}: {error}") from error


def result_text(result: Result) -> str:
    """JSON, one request a line."""
    return lines({MARK: FORMAT} | encode(result) | {"runs": [_with_figures(run) for run in result.runs]}, 5) + "\n"


def parse_result(text: str) -> Result:
    """Raises `ResultError` that names the field."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ResultError(f"not JSON: {error}") from error
    if not isinstance(found, dict) or MARK not in found:
        raise ResultError(f"not a result of twostep bench: it has no {MARK!r}")
    if found.pop(MARK) != FORMAT:
        raise ResultError(f"{MARK} has another format than {FORMAT}, which this version of twostep reads")
    result: Result = decode(Result, found | {"runs": _without_figures(found.get("runs"))}, "result")
    return result


def _with_figures(run: Run) -> dict[str, Any]:
    """For whoever reads the file without this module."""
    summary = run.summary
    rates = {name: getattr(summary, name) for name in ("request_rate", "goodput", "input_rate", "output_rate")}
    return {"figures": asdict(summary) | rates, **encode(run)}


def _without_figures(runs: object) -> object:
    """What is computed anew is not read, and so cannot contradict the requests."""
    if not isinstance(runs, list):
        return runs
    return [
        {key: value for key, value in run.items() if key != "figures"} if isinstance(run, dict) else run for run in runs
    ]


def _cpu_name() -> str:
    """Linux says it in a file; elsewhere the kind of processor has to do."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


GROWTH = 0.1
"""The queue of a server that keeps up grows by no more than this share of the requests that come meanwhile."""
CHANCE = 3
"""A queue grows by so many requests by chance alone."""


def kept_up(requests: Sequence[RequestTimes], limits: Limits) -> bool:
    """From the first third of the arrivals to the last one. Waiting is a request that is due and has no first token
    yet, or with a limit on `e2e` its answer not whole."""
    due = sorted(one.asked_ns for one in requests)
    begin = due[0] + (due[-1] - due[0]) // 3
    came = sum(at_ns > begin for at_ns in due)
    growth = _waiting(requests, limits, due[-1]) - _waiting(requests, limits, begin)
    return growth <= max(GROWTH * came, CHANCE)


def offered_rate(requests: Sequence[RequestTimes]) -> float | None:
    """Requests per second that were really due: (requests - 1) / (last due - first due). None if all at once."""
    due = sorted(one.asked_ns for one in requests)
    return (len(due) - 1) / ((due[-1] - due[0]) / 1e9) if due[-1] > due[0] else None


def _waiting(requests: Sequence[RequestTimes], limits: Limits, at_ns: int) -> int:
    return sum(one.asked_ns < at_ns < _done_ns(one, limits) for one in requests)


def _done_ns(one: RequestTimes, limits: Limits) -> int:
    return one.token_ns[0] if one.token_ns and limits.e2e_s is None else one.ended_ns
