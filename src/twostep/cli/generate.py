"""`twostep generate PROMPT`: one answer, streamed to standard output. With `--file` see `batch`."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from twostep.cli import batch
from twostep.cli.options import ENGINE_NAMES, ENGINE_SETTINGS, add_settings, engine_keywords
from twostep.cli.request import DEFAULT_MAX_TOKENS, check_options, read_prompt
from twostep.cli.subcommands import Subcommands
from twostep.config.settings import BY_NAME
from twostep.store.catalogue import DEFAULT_MODEL

if TYPE_CHECKING:
    from twostep.engine.params import SamplingParams

SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
)  # fmt: skip
"""Options that go to `SamplingParams` as they are, which checks their ranges."""


def add_to(commands: Subcommands) -> None:
    parser = commands.add_parser("generate", help="stream an answer to a prompt, or answer a file of requests")
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", help="what to answer; - reads it from standard input")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a name or a .gguf file (default: %(default)s)")
    parser.add_argument("--system", metavar="TEXT", help="system message, before the prompt")
    parser.add_argument("--raw", action="store_true", help="continue the prompt as it is, without the chat template")
    parser.add_argument(
        "--parse-special", action=argparse.BooleanOptionalAction,
        help="whether <|im_start|> and the like in the prompt are control tokens (default: only with --raw)",
    )  # fmt: skip
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help=f"longest answer (default: {DEFAULT_MAX_TOKENS}, or what fits)"
    )
    _add_sampling(parser.add_argument_group("choice of tokens"))
    _add_file(parser.add_argument_group("a file of requests instead of a prompt"))
    add_settings(parser, [BY_NAME["threads"]])
    parser.add_argument("--executor", choices=("native", "reference"), default="native", help="reference: numpy, slow")
    parser.add_argument("--stats", action="store_true", help="say on standard error where the time went")
    parser.set_defaults(run=lambda options: run(options, parser))


def _add_sampling(group: "argparse._ArgumentGroup") -> None:
    """Names as in `SamplingParams`."""
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 (default): the likeliest token")
    group.add_argument("--top-k", type=int, default=0, metavar="K", help="only the K likeliest tokens (0 or -1: off)")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P", help="only tokens that reach P together")
    group.add_argument("--min-p", type=float, default=0.0, metavar="P", help="only P times as likely as the likeliest")
    group.add_argument("--repetition-penalty", type=float, default=1.0, metavar="X", help="above 1 repeats less")
    group.add_argument("--presence-penalty", type=float, default=0.0, metavar="X", help="-2 to 2, for tokens used once")
    group.add_argument("--frequency-penalty", type=float, default=0.0, metavar="X", help="-2 to 2, for each use")
    group.add_argument("--seed", type=int, metavar="N", help="same seed, same answer (default: random)")


def _add_file(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--file", type=Path, metavar="REQUESTS", help="JSON lines in OpenAI's batch format; - reads standard input"
    )
    group.add_argument("--out", type=Path, metavar="ANSWERS", help="where answers go; those that it has are kept")
    group.add_argument("--retry-errors", action="store_true", help="ask again where an answer in ANSWERS is an error")
    group.add_argument("--served-model-name", metavar="NAME", help="what requests call the model (default: --model)")
    add_settings(group, (setting for setting in ENGINE_SETTINGS if setting.name != "threads"))


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    if options.file is not None and options.out is not None:
        batch.run(options, parser.get_default)
        return
    if options.file is not None or options.out is not None:
        parser.error("--file and --out need each other")
    for name in ("served_model_name", "retry_errors", *ENGINE_NAMES):
        if name != "threads" and getattr(options, name) != parser.get_default(name):
            parser.error(f"--{name.replace('_', '-')} is for --file")
    if options.prompt is None:
        parser.error("the following arguments are required: PROMPT, or --file and --out")
    _stream(options)


def _stream(options: argparse.Namespace) -> None:
    """Checks all that can be checked before it loads anything."""
    check_options(options)
    options.threads = engine_keywords(options)["threads"]
    prompt = read_prompt(options)
    params = _sampling_params(options)
    from twostep.cli.answer import answer

    statistics = answer(options, prompt, params, _show)
    print()
    if options.stats:
        print(*statistics, sep="\n", file=sys.stderr)


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _sampling_params(options: argparse.Namespace) -> "SamplingParams":
    from twostep.engine.params import SamplingParams

    return SamplingParams(**{name: getattr(options, name) for name in SAMPLING})
