"""`python -m benchmarks.simulated_here --profile FILE`: workloads served over HTTP here, against their simulation.

`twostep calibrate MODEL --out FILE` makes the profile. The load generator runs on the same cores as the server, which
the simulation does not know.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import command, machine
from benchmarks.measurement import say
from benchmarks.server_process import Server
from twostep.bench.report.result import Run, read_result
from twostep.cli.main import main as twostep
from twostep.metrics.load import LoadSummary
from twostep.store.catalogue import DEFAULT_MODEL
from twostep.store.resolve import resolve
from twostep.store.wheel_download import FetchProgress

SETTINGS = ("--preset", "chat", "--kv-memory", "4000 blocks")
WORKLOADS = {
    "batch": ("--workload", "batch"),
    "rag": ("--workload", "rag"),
    "azure-conv": ("--workload", "azure-conv", "--max-input", "1000", "--max-output", "100"),
}
SHARES = (0.5, 0.8)
"""Of the rate that a closed loop of `CLIENTS` reaches in the simulation."""
CLIENTS = 32
SECONDS = 15


@dataclass(frozen=True)
class Latencies:
    """Seconds; served requests per second."""

    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    itl_p50: float
    itl_p99: float
    request_rate: float


@dataclass(frozen=True)
class Comparison:
    """One workload at one rate."""

    workload: str
    share: float
    rate: float
    requests: int
    measured: Latencies
    simulated: Latencies


@dataclass(frozen=True)
class Result:
    command: str
    machine: machine.Machine
    model: str
    settings: tuple[str, ...]
    comparisons: list[Comparison]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser("simulated_here", "Serves workloads here, and simulates them.")
    parser.add_argument("--profile", type=Path, required=True, metavar="FILE", help="from twostep calibrate")
    options = parser.parse_args(arguments)
    return command.run("simulated-here", options, lambda: measure(options))


def measure(options: argparse.Namespace) -> Result:
    surroundings = machine.watched()
    path = resolve(DEFAULT_MODEL, FetchProgress())
    comparisons = []
    with (
        tempfile.TemporaryDirectory() as folder,
        Server(path, [*SETTINGS, "--profile", str(options.profile.resolve()), "--log", "off"]) as server,
    ):
        for name, words in WORKLOADS.items():
            for share in SHARES:
                comparisons.append(_compared(name, words, share, options, server.port, Path(folder) / "result.json"))
    called = f"python -m benchmarks.simulated_here --profile {options.profile.name}"
    return Result(called, surroundings, DEFAULT_MODEL, SETTINGS, comparisons)


def _compared(
    name: str, words: Sequence[str], share: float, options: argparse.Namespace, port: int, out: Path
) -> Comparison:
    """The highest rate comes from the simulation, so that both get the same one."""
    seconds = 4 if options.quick else SECONDS
    target = ("simulate", "--model", DEFAULT_MODEL, "--profile", str(options.profile), *SETTINGS)
    highest = _run([*target, *words, "--concurrency", str(CLIENTS), "--requests", "150"], out).summary.request_rate
    rate = round(share * highest, 3)
    requests = max(8, round(rate * seconds))
    load = (*words, "--rate", f"{rate:g}", "--requests", str(requests))
    simulated = _run([*target, *load], out)
    served = ("bench", "--url", f"http://127.0.0.1:{port}", "--token-ids", "40000", "--warmup", "2", *load)
    measured = _run(served, out)
    say(f"{name} at {share:.0%}: {rate:g} requests/s")
    return Comparison(name, share, rate, requests, _latencies(measured.summary), _latencies(simulated.summary))


def _run(words: Sequence[str], out: Path) -> Run:
    """The only run of a command of ours, which prints to standard error."""
    printing, sys.stdout = sys.stdout, sys.stderr
    try:
        code = twostep([*words, "--out", str(out)])
    finally:
        sys.stdout = printing
    assert code == 0, f"{words} failed"
    return read_result(out).runs[0]


def _latencies(found: LoadSummary) -> Latencies:
    assert found.ttft is not None
    assert found.tpot is not None
    assert found.itl is not None
    ttft, tpot, itl = found.ttft, found.tpot, found.itl
    return Latencies(ttft.p50, ttft.p99, tpot.p50, itl.p50, itl.p99, found.request_rate)


if __name__ == "__main__":
    sys.exit(main())
