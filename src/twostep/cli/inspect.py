"""`twostep inspect MODEL`: shapes, tensor types, tokenizer, template and KV bytes per token of a weight file.

The exit code says whether the file can be run."""

import argparse

from twostep.cli.subcommands import Subcommands


def add_to(commands: Subcommands) -> None:
    parser = commands.add_parser("inspect", help="show what is in a weight file; exit code 1 if it cannot be run")
    parser.add_argument("model", metavar="MODEL", help="a .gguf file, or a name that `twostep models` lists")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Prints what is known of the file. Raises `ModelFileError` afterwards if it cannot be run."""
    from twostep.model.describe import describe
    from twostep.model.loaded import open_model
    from twostep.store.progress import Progress
    from twostep.store.resolve import resolve

    path = resolve(options.model, Progress())
    print(describe(path), flush=True)
    _ = open_model(path).tokenizer
