"""`twostep bench`: measures a server of any make, or the engine alone, under load."""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from twostep.cli import connection
from twostep.cli.options import ENGINE_NAMES, add_settings, list_within, naming_flags, whole_within, within
from twostep.cli.subcommands import Subcommands
from twostep.cli.workload import add_changes

if TYPE_CHECKING:
    from twostep.bench.report.result import Result
    from twostep.cli.bench_runs import Measuring


DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_REQUESTS = 64
DEFAULT_CLIENTS = (1.0, 4.0, 16.0)
"""Used when no load is given and the workload has no arrival times."""
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
        description="Sends a workload to any OpenAI-compatible server and reports latency, throughput and goodput. "
        "Docs: docs/benchmarking.md.",
    )  # fmt: skip
    _add_target(parser.add_argument_group("target"))
    add_workload(parser.add_argument_group("workload"))
    load = parser.add_argument_group("load")
    add_load(load)
    _add_preparation(load)
    output = parser.add_argument_group("output")
    add_output(output)
    output.add_argument(
        "--read",
        type=Path,
        metavar="FILE",
        help="show a result written by --out instead of measuring; --goodput applies other limits to it",
    )
    add_settings(parser.add_argument_group("engine options for --offline"))
    parser.set_defaults(run=lambda options: run(options, parser))


def _add_target(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--url", help=f"server URL, with or without /v1 (default: {DEFAULT_URL})")
    group.add_argument("--offline", action="store_true", help="measure the engine in this process, without HTTP")
    group.add_argument(
        "--model", metavar="NAME", help="default: the only model of the server; with --offline, the default model"
    )
    group.add_argument(
        "--endpoint", choices=("completions", "chat"), default="completions", help="default: completions"
    )
    connection.add_to(group)
    group.add_argument(
        "--header", action="append", default=[], metavar="NAME:VALUE", help="send this header with every request"
    )
    group.add_argument("--extra", metavar="JSON", help="JSON object with extra fields for the body of every request")
    group.add_argument(
        "--no-ignore-eos",
        action="store_true",
        help="do not ask the server to ignore the end-of-sequence token: answers may be shorter",
    )
    group.add_argument(
        "--token-ids", type=int, metavar="VOCABULARY", help="send prompts as token ids below VOCABULARY instead of text"
    )
    group.add_argument(
        "--tokens-per-word",
        type=within(0.1, 20),
        metavar="X",
        help="tokens per word, for servers that do not report usage",
    )
    group.add_argument("--stall-s", type=SECONDS, metavar="S", help="a request fails after S seconds without a byte")
    group.add_argument("--request-limit-s", type=SECONDS, metavar="S", help="a request fails after S seconds in total")


def add_workload(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--workload", default="chat", metavar="WHAT",
        help=f"{', '.join(MADE_UP)}, the name of an excerpt, a file, or - for standard input; see twostep workload "
        "(default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--requests",
        type=whole_within(1, 1_000_000),
        metavar="N",
        help=f"number of requests; of a file, the first N (default: {DEFAULT_REQUESTS}, or all); --sweep may use more",
    )
    group.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of a generated workload (default: %(default)s)"
    )
    group.add_argument(
        "--cv", type=within(0, 100), metavar="CV", help="burstiness of a generated workload (default: 1, Poisson)"
    )
    add_changes(group)


def add_load(group: "argparse._ArgumentGroup") -> None:
    """Options that `twostep simulate` has too."""
    loads = group.add_mutually_exclusive_group()
    loads.add_argument(
        "--rate",
        type=list_within(1e-3, 1e6),
        metavar="R,...",
        help="open loop: requests per second, one run for each",
    )
    loads.add_argument(
        "--concurrency", "--closed-loop", type=list_within(1, 100_000), metavar="N,...",
        help="closed loop: number of clients, each sending its next request after an answer; one run per number",
    )  # fmt: skip
    group.add_argument(
        "--sweep", nargs="?", const="rate", choices=("rate", "concurrency"),
        help="find the highest rate (or concurrency) that meets --goodput, starting at --rate or --concurrency",
    )  # fmt: skip
    group.add_argument(
        "--goodput", nargs="+", default=[], metavar="NAME:MS",
        help="latency limits that a request must meet: ttft, itl (each gap), tpot, e2e; for example ttft:500 tpot:50",
    )  # fmt: skip
    group.add_argument(
        "--sweep-s", type=SECONDS, metavar="S",
        help="minimum duration of the arrivals at each rate of --sweep (default: 20, and at least 5 times the limit)",
    )  # fmt: skip
    group.add_argument(
        "--share",
        type=within(1e-6, 1),
        metavar="X",
        help="share of requests that must meet the limits in --sweep (default: 0.99)",
    )
    group.add_argument(
        "--time-limit-s", type=SECONDS, metavar="S", help="end a run after S seconds and report what was measured"
    )


def _add_preparation(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--warmup",
        type=whole_within(0, 10_000),
        default=2,
        metavar="N",
        help="warm-up requests before each run (default: 2)",
    )
    group.add_argument(
        "--salt", metavar="TEXT", help="seed of the prompt text; the same TEXT gives the same prompts (default: random)"
    )


def add_output(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--out", type=Path, metavar="FILE", help="write JSON with the times of every request; replaces FILE"
    )
    group.add_argument(
        "--html", type=Path, metavar="FILE", help="write a report with plots as one HTML file; replaces FILE"
    )


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    from twostep.bench.report.output_files import check_outputs

    check_options(options, parser)
    check_outputs(options.out, options.html)
    with naming_flags(parser):
        if options.read:
            _show(_read(options), options)
        else:
            _measure(options)


def _read(options: argparse.Namespace) -> "Result":
    """The result in --read. --goodput replaces its limits, and drops the verdict of a sweep, which depends on them."""
    from twostep.bench.load.goodput_limits import parse_limits
    from twostep.bench.report.result import read_result

    limits = parse_limits(options.goodput)
    result = read_result(options.read)
    if not options.goodput:
        return result
    return replace(result, runs=tuple(replace(run, limits=limits) for run in result.runs), sweep=None)


def _measure(options: argparse.Namespace) -> None:
    from twostep.background import background_output
    from twostep.cli.bench_runs import Measuring

    with background_output(names=["stderr"]):  # a terminal that is paused must not stop the requests
        run_and_show(Measuring(options), options)


def run_and_show(measuring: "Measuring", options: argparse.Namespace) -> None:
    """Also shows and writes a partial result when an error or a signal ends the runs; exits if nothing was served."""
    import asyncio

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
    """Writes files before it prints, as standard output may be closed; prints even if a file cannot be written."""
    from twostep.bench.report.html_page import write_report
    from twostep.bench.report.result import write_result
    from twostep.bench.report.text_report import result_lines

    try:
        if options.out:
            write_result(result, options.out)
        if options.html:
            write_report(result, options.html)
    finally:
        print("\n".join(result_lines(result)))


FOR_SERVERS = (
    "url", *connection.OPTIONS, "header", "extra", "no_ignore_eos", "tokens_per_word", "token_ids", "stall_s",
    "request_limit_s",
)  # fmt: skip
FOR_READING = ("read", "goodput", "out", "html", "run")


def check_options(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Exits with the first error."""
    errors = _reading_errors(options, parser) if options.read else _measuring_errors(options)
    if error := next(errors, None):
        parser.error(error)


def check_load(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Exits with the first error of the options that `add_load` adds."""
    if error := next(chain(_load_errors(options), _sweep_errors(options)), None):
        parser.error(error)


def _reading_errors(options: argparse.Namespace, parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        given = getattr(options, action.dest, action.default)
        if action.dest not in FOR_READING and given != action.default:
            yield f"{action.option_strings[0]} cannot be used with --read; allowed are --goodput, --out and --html"


def _measuring_errors(options: argparse.Namespace) -> Iterator[str]:
    if options.offline:
        misplaced, problem = [name for name in FOR_SERVERS if getattr(options, name)], "cannot be used with --offline"
    else:
        misplaced = [name for name in ENGINE_NAMES if getattr(options, name) is not None]
        problem = "needs --offline"
    for name in misplaced:
        yield f"--{name.replace('_', '-')} {problem}"
    if options.offline and options.endpoint != "completions":
        yield f"--endpoint {options.endpoint} cannot be used with --offline"
    yield from _load_errors(options)
    yield from _sweep_errors(options)


def _load_errors(options: argparse.Namespace) -> Iterator[str]:
    if any(level % 1 for level in options.concurrency or ()):
        yield "--concurrency must be a whole number of clients"
    if options.cv is not None and options.workload not in MADE_UP:
        yield "--cv is for generated workloads; a file has its own arrival times"
    if options.cv is not None and not options.rate and options.sweep != "rate":
        yield "--cv needs --rate or --sweep rate: a closed loop has no arrival times"


def _sweep_errors(options: argparse.Namespace) -> Iterator[str]:
    levels = options.rate or options.concurrency or ()
    if options.share is not None and not options.sweep:
        yield "--share needs --sweep"
    if options.sweep_s is not None and options.sweep != "rate":
        yield "--sweep-s needs --sweep rate"
    if options.sweep and len(levels) > 1:
        yield "--sweep takes a single starting --rate or --concurrency"
    if options.sweep and levels and bool(options.rate) != (options.sweep == "rate"):
        yield f"--sweep {options.sweep} starts at --{options.sweep}; the other load option cannot be used"
