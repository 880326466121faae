"""`twostep pull NAME`: brings a model here, or checks the hash of the one that is."""

import argparse

from twostep.cli.subcommands import Subcommands


def add_to(commands: Subcommands) -> None:
    parser = commands.add_parser("pull", help="fetch a model, or check the hash of the one that is here")
    parser.add_argument("name", metavar="NAME", help="a name that `twostep models` lists")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    from twostep.store.fetch import fetch
    from twostep.store.progress import Progress
    from twostep.store.resolve import entry_named

    print(fetch(entry_named(options.name), Progress()))
