"""`twostep workload`: generates workloads, imports traces, and shows what is in a file."""

import argparse
import re
from collections.abc import Callable, Iterator
from dataclasses import Field, asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twostep.cli.options import naming_flags
from twostep.cli.subcommands import Subcommands

if TYPE_CHECKING:
    from twostep.workload.arrivals import Arrivals
    from twostep.workload.definition import Workload

DEFAULT_REQUESTS = 200


def add_to(commands: Subcommands) -> None:
    parser = commands.add_parser("workload", help="generate, import or show workloads for bench")
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")
    _add_make(actions)
    _add_import(actions)
    show = actions.add_parser("show", help="rates, lengths and shared prefixes of a workload")
    show.add_argument(
        "workload", metavar="WORKLOAD",
        help="a file of any known format, - for standard input, or the name of an excerpt",
    )  # fmt: skip
    show.add_argument("--json", action="store_true", help="print the figures as JSON")
    show.set_defaults(run=_show)


# --- make ---------------------------------------------------------------------------------------------------------


def _add_make(actions: Subcommands) -> None:
    from twostep.workload.kinds import KINDS

    make = actions.add_parser("make", help="generate a workload; the same seed gives the same workload")
    kinds = make.add_subparsers(title="kinds", required=True, metavar="KIND")
    for name, kind in KINDS.items():
        parser = kinds.add_parser(name, help=" ".join((kind.__doc__ or "").partition(".")[0].split()))
        _add_arrivals(parser)
        for parameter in fields(kind):
            _add_parameter(parser, parameter)
        parser.add_argument(
            "--out", type=Path, required=True, metavar="FILE", help="file to write; replaces an existing one"
        )
        parser.set_defaults(run=lambda options, kind=kind, parser=parser: _make(options, kind, parser))


def _add_arrivals(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--requests", type=int, default=DEFAULT_REQUESTS, metavar="N", help="how many (default: %(default)s)"
    )
    parser.add_argument("--rate", type=float, metavar="R", help="requests per second (default: all arrive at once)")
    parser.add_argument("--to-rate", type=float, metavar="R", help="rate at the end; it changes evenly from --rate")
    parser.add_argument(
        "--cv", type=float, metavar="CV",
        help="coefficient of variation of the gaps: 1 (default) Poisson, 0 evenly spaced, above 1 bursts",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: %(default)s")


def _add_parameter(parser: argparse.ArgumentParser, parameter: "Field[Any]") -> None:
    default = parameter.default
    read: Callable[[str], Any] = _span if isinstance(default, tuple) else type(default)
    shown = default[0] if isinstance(default, tuple) else default
    help_ = f"{parameter.metadata['help']} (default: {shown})"
    flag = "--" + parameter.name.replace("_", "-")
    parser.add_argument(flag, type=read, default=default, metavar="N", help=help_)


def _span(text: str) -> tuple[int, int]:
    """`100` or `100-900`."""
    found = re.fullmatch(r"([0-9]{1,12})(?:-([0-9]{1,12}))?", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a length, such as 100, or a range, such as 100-900")
    return int(found[1]), int(found[2] or found[1])


def _make(options: argparse.Namespace, kind: Any, parser: argparse.ArgumentParser) -> None:
    from twostep.workload.format import write_workload
    from twostep.workload.kinds import make_workload

    with naming_flags(parser, {"first_rate": "--rate", "last_rate": "--to-rate"}):
        made = kind(**{parameter.name: getattr(options, parameter.name) for parameter in fields(kind)})
        workload = make_workload(made, _arrivals(options, parser), options.requests, options.seed)
    write_workload(options.out, workload)
    print(*_lines(workload), sep="\n")


def _arrivals(options: argparse.Namespace, parser: argparse.ArgumentParser) -> "Arrivals":
    from twostep.workload.arrivals import AtOnce, Ramp, Renewal

    if options.rate is None:
        if options.cv is not None or options.to_rate is not None:
            parser.error("--cv and --to-rate need --rate")
        return AtOnce()
    if options.to_rate is None:
        return Renewal(options.rate, 1.0 if options.cv is None else options.cv)
    if options.cv is not None:
        parser.error("--cv and --to-rate exclude each other: with --to-rate, arrivals are a Poisson process")
    return Ramp(options.rate, options.to_rate, options.requests)


# --- import -------------------------------------------------------------------------------------------------------


def _add_import(actions: Subcommands) -> None:
    parser = actions.add_parser(
        "import", help="read a workload or trace of any known format, change it, and write it",
        description="Known formats: Twostep's own, and the Azure LLM inference, Mooncake and BurstGPT traces. "
        "Changes are made in this order: time window, sample, number of requests, lengths, rate.",
    )  # fmt: skip
    parser.add_argument("workload", metavar="WORKLOAD", help="a file, - for standard input, or the name of an excerpt")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="file to write; replaces an existing one"
    )
    parser.add_argument("--name", help="name of the workload (default: its old name, or the file name)")
    group = parser.add_argument_group("changes")
    group.add_argument("--sample", type=float, metavar="X", help="keep this share of the conversations")
    group.add_argument("--first", type=int, metavar="N", dest="requests", help="keep the first N requests")
    add_changes(group)
    group.add_argument("--rate-scale", type=float, metavar="X", help="multiply the rate")
    group.add_argument("--rate", type=float, metavar="R", help="scale to this mean rate in requests per second")
    parser.set_defaults(run=lambda options: _import(options, parser))


def add_changes(group: "argparse._ArgumentGroup") -> None:
    """Options that `twostep bench` has too."""
    group.add_argument("--from-s", type=float, metavar="S", help="drop requests that arrive earlier")
    group.add_argument("--to-s", type=float, metavar="S", help="drop requests that arrive at S or later")
    group.add_argument(
        "--length-scale", type=float, metavar="X", help="multiply all lengths, including shared prefixes"
    )
    group.add_argument("--max-input", type=int, metavar="N", dest="max_input_tokens", help="clip longer prompts")
    group.add_argument("--max-output", type=int, metavar="N", dest="max_output_tokens", help="clip longer answers")


def _import(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    from twostep.terminal import StatusLine
    from twostep.workload.format import write_workload
    from twostep.workload.reshape import Changes, reshaped
    from twostep.workload.trace_formats import find_workload

    say = StatusLine().say
    with naming_flags(parser):
        changes = Changes(**{change.name: getattr(options, change.name) for change in fields(Changes)})
    workload = reshaped(find_workload(options.workload, say), changes, say)
    workload = workload if options.name is None else replace(workload, name=options.name)
    write_workload(options.out, workload)
    print(*_lines(workload), sep="\n")


# --- show ---------------------------------------------------------------------------------------------------------


def _show(options: argparse.Namespace) -> None:
    import json

    from twostep.terminal import StatusLine
    from twostep.workload.trace_formats import find_workload

    workload = find_workload(options.workload, StatusLine().say)
    print(json.dumps(_figures(workload), indent=2) if options.json else "\n".join(_lines(workload)))


def _figures(workload: "Workload") -> dict[str, Any]:
    """Values for JSON; None where a value is undefined."""
    from twostep.metrics.summary import summarise
    from twostep.workload.definition import arrival_cv, mean_rate, starts_s

    inputs = [request.input_tokens for request in workload.requests]
    lengths = {"input_tokens": inputs, "output_tokens": [request.output_tokens for request in workload.requests]}
    starts = starts_s(workload)
    return {
        "name": workload.name,
        "source": workload.source,
        "requests": len(inputs),
        "starts": len(starts),
        "duration_s": starts[-1] - starts[0] if starts else None,
        "rate": mean_rate(workload),
        "cv": arrival_cv(workload),
        **{name: summary and asdict(summary) for name, values in lengths.items() for summary in [summarise(values)]},
        "block_tokens": workload.block_tokens,
        "shared_share": sum(workload.shared_tokens()) / sum(inputs) if inputs else None,
    }


def _lines(workload: "Workload") -> Iterator[str]:
    from twostep.terminal import printable

    figures = _figures(workload)
    followers = figures["requests"] - figures["starts"]
    yield f"name      {printable(figures['name']) or '-'}"
    yield f"source    {printable(figures['source']) or '-'}"
    yield f"requests  {figures['requests']}" + (
        f", {followers} of them sent after another has ended" if followers else ""
    )
    if figures["rate"] is None:
        yield "arrivals  all at once" if figures["requests"] else "arrivals  none"
    else:
        cv = "" if figures["cv"] is None else f", cv of the gaps {figures['cv']:.2f}"
        yield f"arrivals  {figures['rate']:.4g} requests/s over {figures['duration_s']:.1f} s{cv}"
    for label, name in (("prompts ", "input_tokens"), ("answers ", "output_tokens")):
        if lengths := figures[name]:
            values = ", ".join(f"{key} {lengths[key]:.0f}" for key in ("mean", "p50", "p90", "p99", "max"))
            yield f"{label}  {values} tokens"
    if figures["shared_share"] is not None:
        found = f"up to {figures['shared_share']:.1%} of the prompt tokens can be found in a prefix cache"
        yield f"shared    {found} (blocks of {figures['block_tokens']})"
