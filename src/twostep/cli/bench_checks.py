"""What on the command line of `twostep bench` contradicts itself is refused before anything is asked."""

import argparse
from collections.abc import Iterator

from twostep.cli import connection
from twostep.cli.bench import MADE_UP
from twostep.cli.options import ENGINE_NAMES

FOR_SERVERS = (
    "url", *connection.OPTIONS, "header", "extra", "no_ignore_eos", "tokens_per_word", "token_ids", "stall_s",
    "request_limit_s",
)  # fmt: skip
FOR_READING = ("read", "goodput", "out", "html", "run")


def check_options(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Ends the program with the first complaint."""
    complaints = _of_reading(options, parser) if options.read else _of_measuring(options)
    if complaint := next(complaints, None):
        parser.error(complaint)


def _of_reading(options: argparse.Namespace, parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        given = getattr(options, action.dest, action.default)
        if action.dest not in FOR_READING and given != action.default:
            yield f"{action.option_strings[0]} is for measuring; with --read there are --goodput, --out and --html"


def _of_measuring(options: argparse.Namespace) -> Iterator[str]:
    if options.offline:
        misplaced, whose = [name for name in FOR_SERVERS if getattr(options, name)], "a server; --offline has none"
    else:
        misplaced, whose = [name for name in ENGINE_NAMES if getattr(options, name) is not None], "--offline"
    for name in misplaced:
        yield f"--{name.replace('_', '-')} is for {whose}"
    if options.offline and options.endpoint != "completions":
        yield f"--endpoint {options.endpoint} is for a server; --offline has none"
    yield from _of_loads(options)
    yield from _of_sweeps(options)


def _of_loads(options: argparse.Namespace) -> Iterator[str]:
    if any(level % 1 for level in options.concurrency or ()):
        yield "--concurrency is a number of clients"
    if options.cv is not None and options.workload not in MADE_UP:
        yield "--cv is for what is made up; a file has its own arrivals"
    if options.cv is not None and not options.rate and options.sweep != "rate":
        yield "--cv needs --rate or --sweep rate: clients of a closed loop have no arrivals"


def _of_sweeps(options: argparse.Namespace) -> Iterator[str]:
    levels = options.rate or options.concurrency or ()
    if options.share is not None and not options.sweep:
        yield "--share is for --sweep"
    if options.sweep_s is not None and options.sweep != "rate":
        yield "--sweep-s is for --sweep rate"
    if options.sweep and len(levels) > 1:
        yield "--sweep begins with one --rate or --concurrency, not several"
    if options.sweep and levels and bool(options.rate) != (options.sweep == "rate"):
        yield f"--sweep looks for the highest {options.sweep}; give --{options.sweep} to begin with"
