"""`twostep bench`: what a server of any make, or the engine alone, does under load."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from twostep.cli import engine_options
from twostep.cli.subcommands import Subcommands
from twostep.cli.workload import add_changes

if TYPE_CHECKING:
    from twostep.bench.result import Result

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_REQUESTS = 64
DEFAULT_CLIENTS = (1.0, 4.0, 16.0)
"""Where no load is named, and the workload has none of its own."""
MADE_UP = ("chat", "rag", "batch")

EXAMPLES = """\
examples:
  twostep bench --url http://127.0.0.1:8000 --workload chat --rate 0.5,1,2 --goodput ttft:500 tpot:50 --html report.html
  twostep bench --workload azure-conv --max-input 2000 --max-output 200 --first 200 --rate 1
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
    engine_options.add_to(parser.add_argument_group("engine, for --offline"))
    parser.set_defaults(run=lambda options: run(options, parser))


def _add_target(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--url", help=f"the server, with or without /v1 (default: {DEFAULT_URL})")
    group.add_argument("--offline", action="store_true", help="the engine in this process, without HTTP")
    group.add_argument("--model", metavar="NAME", help="default: the server's only one; offline: the default model")
    group.add_argument(
        "--endpoint", choices=("completions", "chat"), default="completions", help="default: completions"
    )
    group.add_argument("--api-key", metavar="KEY", help="the server's (default: $TWOSTEP_API_KEY)")
    group.add_argument("--header", action="append", default=[], metavar="NAME:VALUE", help="of every request")
    group.add_argument("--extra", metavar="JSON", help="an object of further fields of every request's body")
    group.add_argument(
        "--no-ignore-eos", action="store_true", help="let answers end early: lengths are then those of the model"
    )
    group.add_argument("--token-ids", type=int, metavar="VOCABULARY", help="prompts of token ids below this, not text")
    group.add_argument("--tokens-per-word", type=float, metavar="X", help="for servers that do not report usage")
    group.add_argument("--stall-s", type=float, metavar="S", help="a request has failed without a byte for so long")
    group.add_argument("--request-limit-s", type=float, metavar="S", help="a request has failed after so long")


def _add_workload(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--workload", default="chat", metavar="WHAT",
        help=f"{', '.join(MADE_UP)}, the name of an excerpt, or a file; see twostep workload (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--requests", type=int, metavar="N", help=f"so many; of a file the first (default: {DEFAULT_REQUESTS}, or all)"
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of what is made up (default: %(default)s)")
    group.add_argument("--cv", type=float, metavar="CV", help="burstiness of what is made up (default: 1, Poisson)")
    add_changes(group)


def _add_load(group: "argparse._ArgumentGroup") -> None:
    loads = group.add_mutually_exclusive_group()
    loads.add_argument("--rate", type=_levels, metavar="R,...", help="open loop: requests per second, one run for each")
    loads.add_argument(
        "--concurrency", "--closed-loop", type=_levels, metavar="N,...",
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
    group.add_argument("--share", type=float, metavar="X", help="of requests that have to, in --sweep (default: 0.99)")
    group.add_argument("--warmup", type=int, default=2, metavar="N", help="requests before each run (default: 2)")
    group.add_argument("--time-limit-s", type=float, metavar="S", help="a run ends after so long with what there is")
    group.add_argument("--salt", metavar="TEXT", help="the same gives the same prompts again (default: new ones)")


def _add_output(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--out", type=Path, metavar="FILE", help="JSON with every request's times")
    group.add_argument("--html", type=Path, metavar="FILE", help="a report with plots, one file")
    group.add_argument("--read", type=Path, metavar="FILE", help="measure nothing; show what --out wrote")


def _levels(text: str) -> tuple[float, ...]:
    """`2,4,8`."""
    levels = tuple(float(word) for word in text.split(","))
    if not all(0 < level < float("inf") for level in levels):
        raise ValueError
    return levels


_levels.__name__ = "list of numbers above 0"  # argparse shows it


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    from twostep.bench.report import write_report
    from twostep.bench.result import read_result, write_result
    from twostep.bench.table import result_lines
    from twostep.cli.bench_runs import check_options, measure

    check_options(options, parser)
    result = read_result(options.read) if options.read else measure(options)
    print("\n".join(result_lines(result)))
    if options.out:
        write_result(result, options.out)
    if options.html:
        write_report(result, options.html)
    if _nothing_served(result):
        sys.exit(1)


def _nothing_served(result: "Result") -> bool:
    return not any(run.summary.served for run in result.runs)
