"""`twostep generate PROMPT`: streams one answer to standard output. For `--file` see `batch`."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from twostep.cli import batch
from twostep.cli.options import ENGINE_NAMES, ENGINE_SETTINGS, add_settings, engine_keywords
from twostep.cli.prompt_input import DEFAULT_MAX_TOKENS, check_options, read_prompt
from twostep.cli.subcommands import Subcommands
from twostep.config.settings import BY_NAME
from twostep.store.catalogue import DEFAULT_MODEL

if TYPE_CHECKING:
    from twostep.engine.params import SamplingParams

SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
)  # fmt: skip
"""Options that are passed to `SamplingParams` unchanged; it checks their ranges."""


def add_to(commands: Subcommands) -> None:
    parser = commands.add_parser("generate", help="stream an answer to a prompt, or answer a file of requests")
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", help="the prompt; - reads it from standard input")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="model name or .gguf file (default: %(default)s)")
    parser.add_argument("--system", metavar="TEXT", help="system message before the prompt")
    parser.add_argument("--raw", action="store_true", help="continue the prompt without the chat template")
    parser.add_argument(
        "--parse-special", action=argparse.BooleanOptionalAction,
        help="treat text such as <|im_start|> in the prompt as control tokens (default: only with --raw)",
    )  # fmt: skip
    parser.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help=f"maximum answer length (default: {DEFAULT_MAX_TOKENS}, or what fits)",
    )
    _add_sampling(parser.add_argument_group("sampling"))
    _add_file(parser.add_argument_group("a file of requests instead of a prompt"))
    add_settings(parser, [BY_NAME["threads"]])
    parser.add_argument("--executor", choices=("native", "reference"), default="native", help="reference: numpy, slow")
    parser.add_argument("--stats", action="store_true", help="print timings to standard error")
    parser.set_defaults(run=lambda options: run(options, parser))


def _add_sampling(group: "argparse._ArgumentGroup") -> None:
    """Names as in `SamplingParams`."""
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 (default): the most likely token")
    group.add_argument("--top-k", type=int, default=0, metavar="K", help="only the K most likely tokens (0 or -1: off)")
    group.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="only the most likely tokens whose probabilities add up to P",
    )
    group.add_argument(
        "--min-p",
        type=float,
        default=0.0,
        metavar="P",
        help="only tokens at least P times as likely as the most likely one",
    )
    group.add_argument("--repetition-penalty", type=float, default=1.0, metavar="X", help="above 1: less repetition")
    group.add_argument(
        "--presence-penalty", type=float, default=0.0, metavar="X", help="-2 to 2; for each token that was used"
    )
    group.add_argument(
        "--frequency-penalty", type=float, default=0.0, metavar="X", help="-2 to 2; for each use of a token"
    )
    group.add_argument(
        "--seed", type=int, metavar="N", help="seed; the same seed gives the same answer (default: random)"
    )


def _add_file(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--file", type=Path, metavar="REQUESTS", help="JSON lines in OpenAI's batch format; - reads standard input"
    )
    group.add_argument(
        "--out", type=Path, metavar="ANSWERS", help="file for the answers; existing answers in it are kept"
    )
    group.add_argument(
        "--retry-errors", action="store_true", help="repeat requests whose answer in ANSWERS is an error"
    )
    group.add_argument("--served-model-name", metavar="NAME", help="model name in the requests (default: --model)")
    add_settings(group, (setting for setting in ENGINE_SETTINGS if setting.name != "threads"))


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    if options.file is not None and options.out is not None:
        batch.run(options, parser.get_default)
        return
    if options.file is not None or options.out is not None:
        parser.error("--file and --out must be given together")
    for name in ("served_model_name", "retry_errors", *ENGINE_NAMES):
        if name != "threads" and getattr(options, name) != parser.get_default(name):
            parser.error(f"--{name.replace('_', '-')} needs --file")
    if options.prompt is None:
        parser.error("the following arguments are required: PROMPT, or --file and --out")
    _stream(options)


def _stream(options: argparse.Namespace) -> None:
    """Checks everything it can before it loads the model."""
    check_options(options)
    options.threads = engine_keywords(options)["threads"]
    prompt = read_prompt(options)
    params = _sampling_params(options)
    from twostep.cli.local_engine import answer

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
