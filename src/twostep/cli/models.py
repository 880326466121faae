"""`twostep models`: what can be had by name, and what lies in the cache."""

import argparse

from twostep.cli.subcommands import Subcommands


def add_to(commands: Subcommands) -> None:
    parser = commands.add_parser("models", help="list the models that can be had and those that are here")
    parser.set_defaults(run=run)


def run(_: argparse.Namespace) -> None:
    from twostep.store.cache import cache_folder

    rows = [("NAME", "SIZE", "HERE", "LICENCE", "WHAT"), *_catalogue_rows(), *_other_rows()]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print(f"\ncache: {cache_folder()}")


def _catalogue_rows() -> list[tuple[str, ...]]:
    from twostep.store.cache import cache_folder, has_right_size
    from twostep.store.catalogue import CATALOGUE
    from twostep.store.progress import megabytes

    return [
        (
            entry.name,
            megabytes(entry.file_bytes),
            "yes" if has_right_size(cache_folder() / entry.file, entry) else "no",
            entry.licence,
            entry.about,
        )
        for entry in CATALOGUE.values()
    ]


def _other_rows() -> list[tuple[str, ...]]:
    """Files that the catalogue does not know, under the name that `--model` takes."""
    from twostep.store.cache import cached_files
    from twostep.store.catalogue import CATALOGUE
    from twostep.store.progress import megabytes

    ours = {entry.file for entry in CATALOGUE.values()}
    others = [path for path in cached_files() if path.name not in ours]
    return [(path.stem, megabytes(path.stat().st_size), "yes", "", "file in the cache") for path in others]
