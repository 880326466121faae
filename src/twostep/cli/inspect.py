"""`twostep inspect MODEL`: shapes, tensor types, tokenizer, template and KV bytes per token of a weight file."""

import argparse

from twostep.cli.subcommands import Subcommands


def add_to(commands: Subcommands) -> None:
    parser = commands.add_parser("inspect", help="show what is in a weight file")
    parser.add_argument("model", metavar="MODEL", help="a .gguf file, or a name that `twostep models` lists")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    from twostep.model.describe import describe
    from twostep.store.progress import Progress
    from twostep.store.resolve import resolve

    print(describe(resolve(options.model, Progress())))
