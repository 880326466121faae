"""The options that say how a server is reached; the same for every command that asks one."""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twostep.bench.client.address import Trust

OPTIONS = ("api_key", "insecure", "cacert")


def add_to(group: "argparse._ActionsContainer") -> None:
    group.add_argument("--api-key", metavar="KEY", help="the server's (default: $TWOSTEP_API_KEY)")
    group.add_argument("--insecure", action="store_true", help="accept any certificate of an https:// server")
    group.add_argument("--cacert", type=Path, metavar="FILE", help="trust the certificates in FILE (PEM) as well")


def api_key(options: argparse.Namespace) -> str | None:
    """The flag's, else the environment's."""
    return options.api_key or os.environ.get("TWOSTEP_API_KEY")


def trust(options: argparse.Namespace) -> "Trust":
    """Raises `InvalidParameterError` if the two contradict each other."""
    from twostep.bench.client.address import Trust
    from twostep.errors import InvalidParameterError

    if options.insecure and options.cacert is not None:
        raise InvalidParameterError("--insecure accepts any certificate, --cacert only some: give one of the two")
    return Trust(options.insecure, options.cacert)
