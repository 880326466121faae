"""`twostep explain ID`: where the time of a finished request went, itemised, from the server that served it."""

import argparse

from twostep.cli.subcommands import Subcommands

DEFAULT_URL = "http://127.0.0.1:8000"


def add_to(commands: Subcommands) -> None:
    parser = commands.add_parser("explain", help="itemise where the time of a finished request went")
    parser.add_argument("id", metavar="ID", help="the id in the reply, such as chatcmpl-...")
    parser.add_argument("--url", default=DEFAULT_URL, help=f"the server (default: {DEFAULT_URL})")
    parser.add_argument("--api-key", metavar="KEY", help="the server's (default: $TWOSTEP_API_KEY)")
    parser.add_argument("--json", action="store_true", help="print the bill as the server gives it, times in ns")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    import json
    from urllib.parse import quote

    from twostep.cli.remote import Remote
    from twostep.server.bill_text import bill_lines

    bill = Remote(options.url, options.api_key).get(f"/requests/{quote(options.id, safe='')}")
    print(json.dumps(bill, indent=2) if options.json else "\n".join(bill_lines(bill)))
