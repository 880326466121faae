"""Options for connecting to a server, shared by all commands that send requests to one."""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twostep.bench.client.address import Trust

OPTIONS = ("api_key", "insecure", "cacert")


def add_to(group: "argparse._ActionsContainer") -> None:
    group.add_argument("--api-key", metavar="KEY", help="API key of the server (default: $TWOSTEP_API_KEY)")
    group.add_argument("--insecure", action="store_true", help="accept any certificate of an https:// server")
    group.add_argument("--cacert", type=Path, metavar="FILE", help="trust the certificates in FILE (PEM) as well")


def api_key(options: argparse.Namespace) -> str | None:
    """From the flag, otherwise from the environment."""
    return options.api_key or os.environ.get("TWOSTEP_API_KEY")


def trust(options: argparse.Namespace) -> "Trust":
    """Raises `InvalidParameterError` if both options are set."""
    from twostep.bench.client.address import Trust
    from twostep.errors import InvalidParameterError

    if options.insecure and options.cacert is not None:
        raise InvalidParameterError("--insecure and --cacert exclude each other: give one of them")
    return Trust(options.insecure, options.cacert)
