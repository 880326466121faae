"""`twostep bench`: what a server of any make, or the engine alone, does under load."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from twostep.cli import connection
from twostep.cli.options import add_settings, list_within, naming_flags, whole_within, within
from twostep.cli.subcommands import Subcommands
from twostep.cli.workload import add_changes

if TYPE_CHECKING:
    from twostep.bench.report.result import Result

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_REQUESTS = 64
DEFAULT_CLIENTS = (1.0, 4.0, 16.0)
"""Where no load is named, and the workload has none of its own."""
SECONDS = within(0.001, 1_000_000)
MADE_UP = ("chat", "rag", "batch")

EXAMPLES = """\
examples:
  twostep bench --url http://127.0.0.1:8000 --workload chat --rate 0.5,1,2 --goodput ttft:500 tpot:50 --html report.html
  twostep bench --workload azure-conv --max-input 2000 --max-output 200 --requests 200 --rate 1
  twostep bench --workload rag --sweep --goodput ttft:2000 tpot:60
  twostep bench --offline --workload batch --concurrency 16
"""


def add_to(commands: Subcommands) -> None:
    parser = commands.add_parser(
        "bench", help="measure a server, or the engine alone, under load", epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Asks any OpenAI-compatible server and says how long its answers took. Docs: docs/benchmarking.md.",
    )  # fmt: skip
    _add_target(parser.add_argument_group("what is measured"))
    _add_workload(parser.add_argument_group("workload"))
    _add_load(parser.add_argument_group("load"))
    _add_output(parser.add_argument_group("output"))
    add_settings(parser.add_argument_group("engine, for --offline"))
    parser.set_defaults(run=lambda options: run(options, parser))


def _add_target(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--url", help=f"the server, with or without /v1 (default: {DEFAULT_URL})")
    group.add_argument("--offline", action="store_true", help="the engine in this process, without HTTP")
    group.add_argument("--model", metavar="NAME", help="default: the server's only one; offline: the default model")
    group.add_argument(
        "--endpoint", choices=("completions", "chat"), default="completions", help="default: completions"
    )
    connection.add_to(group)
    group.add_argument("--header", action="append", default=[], metavar="NAME:VALUE", help="of every request")
    group.add_argument("--extra", metavar="JSON", help="an object of further fields of every request's body")
    group.add_argument(
        "--no-ignore-eos", action="store_true", help="let answers end early: lengths are then those of the model"
    )
    group.add_argument("--token-ids", type=int, metavar="VOCABULARY", help="prompts of token ids below this, not text")
    group.add_argument(
        "--tokens-per-word", type=within(0.1, 20), metavar="X", help="for servers that do not report usage"
    )
    group.add_argument("--stall-s", type=SECONDS, metavar="S", help="a request has failed without a byte for so long")
    group.add_argument("--request-limit-s", type=SECONDS, metavar="S", help="a request has failed after so long")


def _add_workload(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--workload", default="chat", metavar="WHAT",
        help=f"{', '.join(MADE_UP)}, the name of an excerpt, a file, or - for standard input; see twostep workload "
        "(default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--requests",
        type=whole_within(1, 1_000_000),
        metavar="N",
        help=f"so many; of a file the first (default: {DEFAULT_REQUESTS}, or all); more in --sweep if needed",
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of what is made up (default: %(default)s)")
    group.add_argument(
        "--cv", type=within(0, 100), metavar="CV", help="burstiness of what is made up (default: 1, Poisson)"
    )
    add_changes(group)


def _add_load(group: "argparse._ArgumentGroup") -> None:
    loads = group.add_mutually_exclusive_group()
    loads.add_argument(
        "--rate",
        type=list_within(1e-3, 1e6),
        metavar="R,...",
        help="open loop: requests per second, one run for each",
    )
    loads.add_argument(
        "--concurrency", "--closed-loop", type=list_within(1, 100_000), metavar="N,...",
        help="closed loop: clients that each ask the next when they have their answer, one run for each number",
    )  # fmt: skip
    group.add_argument(
        "--sweep", nargs="?", const="rate", choices=("rate", "concurrency"),
        help="look for the highest rate (or concurrency) that keeps --goodput; begins with --rate or --concurrency",
    )  # fmt: skip
    group.add_argument(
        "--goodput", nargs="+", default=[], metavar="NAME:MS",
        help="limits that a request has to keep, of ttft, itl (each gap), tpot, e2e, such as ttft:500 tpot:50",
    )  # fmt: skip
    group.add_argument(
        "--sweep-s", type=SECONDS, metavar="S",
        help="so long arrivals last at each rate of --sweep, at least (default: 20, and 5 times the limit)",
    )  # fmt: skip
    group.add_argument(
        "--share", type=within(1e-6, 1), metavar="X", help="of requests that have to, in --sweep; default: 0.99"
    )
    group.add_argument(
        "--warmup", type=whole_within(0, 10_000), default=2, metavar="N", help="requests before each run (default: 2)"
    )
    group.add_argument("--time-limit-s", type=SECONDS, metavar="S", help="a run ends after so long with what there is")
    group.add_argument("--salt", metavar="TEXT", help="the same gives the same prompts again (default: new ones)")


def _add_output(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--out", type=Path, metavar="FILE", help="JSON with every request's times; replaces the file")
    group.add_argument("--html", type=Path, metavar="FILE", help="a report with plots, one file; replaces it")
    group.add_argument(
        "--read",
        type=Path,
        metavar="FILE",
        help="measure nothing; show what --out wrote, by other limits if --goodput has some",
    )


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    from twostep.bench.report.output import check_outputs
    from twostep.cli.bench_checks import check_options

    check_options(options, parser)
    check_outputs(options.out, options.html)
    with naming_flags(parser):
        if options.read:
            _show(_read(options), options)
        else:
            _measure(options)


def _read(options: argparse.Namespace) -> "Result":
    """With other limits, where --goodput has some: then what a sweep found with its own says nothing."""
    from twostep.bench.load.goodput_limits import parse_limits
    from twostep.bench.report.result import read_result

    limits = parse_limits(options.goodput)
    result = read_result(options.read)
    if not options.goodput:
        return result
    return replace(result, runs=tuple(replace(run, limits=limits) for run in result.runs), sweep=None)


def _measure(options: argparse.Namespace) -> None:
    """What there is is shown and kept also where it ends with an error or a signal."""
    import asyncio

    from twostep.background import background_output
    from twostep.cli.bench_runs import Measuring

    with background_output(names=["stderr"]):  # a terminal that is paused must not stop the requests
        measuring = Measuring(options)
        try:
            asyncio.run(measuring.run())
        finally:
            if (result := measuring.result()).runs:
                _show(result, options)
    if measuring.ended_by is not None:
        sys.exit(128 + measuring.ended_by)
    if not any(run.summary.served for run in result.runs):
        sys.exit(1)


def _show(result: "Result", options: argparse.Namespace) -> None:
    """Files first: whoever reads the lines may be gone. Lines also where a file cannot be written."""
    from twostep.bench.report.page import write_report
    from twostep.bench.report.result import write_result
    from twostep.bench.report.table import result_lines

    try:
        if options.out:
            write_result(result, options.out)
        if options.html:
            write_report(result, options.html)
    finally:
        print("\n".join(result_lines(result)))
