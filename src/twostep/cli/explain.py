"""`twostep explain [ID]`: the latency breakdown of a finished request, from the server that served it."""

import argparse
from typing import TYPE_CHECKING

from twostep.cli import connection
from twostep.cli.subcommands import Subcommands

if TYPE_CHECKING:
    from twostep.cli.remote import Remote

DEFAULT_URL = "http://127.0.0.1:8000"


def add_to(commands: Subcommands) -> None:
    parser = commands.add_parser("explain", help="show the latency breakdown of a finished request")
    help_ = "id in the reply, such as chatcmpl-... (default: the request that finished last)"
    parser.add_argument("id", metavar="ID", nargs="?", help=help_)
    parser.add_argument("--url", default=DEFAULT_URL, help=f"server URL (default: {DEFAULT_URL})")
    connection.add_to(parser)
    parser.add_argument("--json", action="store_true", help="print the JSON of the server, times in ns")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    import json
    from urllib.parse import quote

    from twostep.cli.remote import Remote
    from twostep.server.observe.breakdown_text import breakdown_lines

    server = Remote(options.url, connection.api_key(options), connection.trust(options))
    id_ = _last(server) if options.id is None else options.id
    breakdown = server.get(f"/requests/{quote(id_, safe='')}")
    print(json.dumps(breakdown, indent=2) if options.json else "\n".join(breakdown_lines(breakdown)))


def _last(server: "Remote") -> str:
    """The id of the request that finished last. Raises `ServerError` if the server remembers none."""
    from twostep.cli.remote import ServerError

    id_ = server.get("/requests?limit=1").get("first_id")
    if id_ is None:
        raise ServerError(f"{server.url}: the server has no finished request to explain")
    return str(id_)
