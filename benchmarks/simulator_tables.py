"""Tables and the example of docs/simulate.md."""

import io
import shlex
from contextlib import redirect_stderr, redirect_stdout

from benchmarks.tables import Json, number, provenance, table
from twostep.cli.main import main

EXAMPLE = "simulate --model llama-3.1-8b --hardware h100 --workload azure-conv --rate 12 --itl-budget 40"


def example() -> str:
    """What the command prints; the same each time."""
    printed = io.StringIO()
    with redirect_stdout(printed), redirect_stderr(io.StringIO()):
        code = main(shlex.split(EXAMPLE))
    assert code == 0, "the example failed"
    return f"```\n$ twostep {EXAMPLE}\n{printed.getvalue().rstrip()}\n```"


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
