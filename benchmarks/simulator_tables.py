"""Tables and the example of docs/simulate.md."""

import io
import shlex
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.tables import Json, number, provenance, table
from twostep.bench.report.result import read_result
from twostep.bench.report.text_report import ms
from twostep.cli.main import main
from twostep.metrics.load import LoadSummary

EXAMPLE = "simulate --model llama-3.1-8b --hardware h100 --workload azure-conv --rate 12 --itl-budget 40"


def example() -> str:
    """What the command prints; the same each time."""
    printed = io.StringIO()
    with redirect_stdout(printed), redirect_stderr(io.StringIO()):
        code = main(shlex.split(EXAMPLE))
    assert code == 0, "the example failed"
    return f"```\n$ twostep {EXAMPLE}\n{printed.getvalue().rstrip()}\n```"


POLICIES = {
    "time budget of 25 ms": "--itl-budget 25",
    "fixed chunks of 512 tokens": "--chunking tokens=512",
    "continuous, prompts not cut": "--chunking none",
    "static batches of 32": "--batching static=32 --chunking none",
}
LOAD = "--model llama-3.1-8b --hardware h100 --workload azure-conv --rate 12 --max-model-len 8192"


def policies() -> str:
    """The same traffic under each policy."""
    head = ["policy", "TTFT p50, ms", "TTFT p99", "ITL p50", "ITL p99", "ITL max", "TPOT p50", "served/s"]
    rows = []
    for name, options in POLICIES.items():
        found = _simulated(f"{LOAD} {options}")
        ttft, itl, tpot = (getattr(found, latency) for latency in ("ttft", "itl", "tpot"))
        values = (ttft.p50, ttft.p99, itl.p50, itl.p99, itl.max, tpot.p50)
        rows.append([name, *(ms(value) for value in values), number(found.request_rate)])
    return f"{table(head, rows)}\n\n`twostep simulate {LOAD}` and the policy's options."


def _simulated(words: str) -> LoadSummary:
    with TemporaryDirectory() as folder, redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        out = Path(folder) / "result.json"
        code = main(["simulate", *shlex.split(words), "--out", str(out)])
        assert code == 0, f"simulate {words} failed"
        return read_result(out).runs[0].summary


def vllm(result: Json) -> str:
    """The published run and its simulations."""
    head = [
        "",
        "TTFT p50, s",
        "TTFT p99, s",
        "TPOT mean, ms",
        "TPOT p99, ms",
        "tokens out/s",
        "one TPOT",
        "one end to end",
    ]
    measured = result["measured"]
    rows = [["measured", *_figures(measured), "", ""]]
    for one in result["predictions"]:
        errors = one["errors"]
        rows.append([
            one["predicted_from"],
            *(f"{figure} ({error})" for figure, error in zip(_figures(one["figures"]), _errors(errors), strict=True)),
            f"{one['request_tpot_error']:.1%}",
            f"{one['request_e2e_error']:.1%}",
        ])  # fmt: skip
    return f"{table(head, rows)}\n\n{result['run']}. `{result['command']}`"


NAMES = (("ttft_p50", 1), ("ttft_p99", 1), ("tpot_mean", 1e3), ("tpot_p99", 1e3), ("output_rate", 1))


def _figures(figures: Json) -> list[str]:
    return [number(figures[name] * factor) for name, factor in NAMES]


def _errors(errors: Json) -> list[str]:
    return [f"{errors[name]:+.1%}" for name, _ in NAMES]


def here(result: Json) -> str:
    """Workloads on this machine: measured, simulated, and the relative difference."""
    head = ["workload", "requests/s", "", "TTFT p50, ms", "TTFT p99", "TPOT p50", "ITL p50", "ITL p99", "served/s"]
    rows = []
    for one in result["comparisons"]:
        measured, simulated = one["measured"], one["simulated"]
        load = f"{one['rate']:.3g} ({one['share']:.0%})"
        rows.append([one["workload"], load, "measured", *_latencies(measured)])
        rows.append(["", "", "simulated", *_latencies(simulated)])
        rows.append(["", "", "difference", *(f"{simulated[name] / measured[name] - 1:+.0%}" for name in LATENCIES)])
    return f"{table(head, rows)}\n\n{provenance(result)}"


LATENCIES = ("ttft_p50", "ttft_p99", "tpot_p50", "itl_p50", "itl_p99", "request_rate")


def _latencies(found: Json) -> list[str]:
    return [*(ms(found[name]) for name in LATENCIES[:-1]), number(found["request_rate"])]


def speed(result: Json) -> str:
    """How fast simulations are."""
    head = ["replicas", "requests/s each", "sequences decoding", "times real time", "steps/s", "us a step"]
    rows = [
        [
            str(one["replicas"]),
            f"{one['rate']:g}",
            number(one["mean_decoding"]),
            f"{_spread(one['replica_s_per_s'])}",
            number(one["steps_per_s"]["median"]),
            number(1e6 / one["steps_per_s"]["median"]),
        ]
        for one in result["speeds"]
    ]
    return f"{table(head, rows)}\n\n{provenance(result)}"


def _spread(value: Json) -> str:
    return f"{number(value['median'])} ({number(value['min'])} to {number(value['max'])})"
