"""The parser of the command line, which imports no more commands than it has to know."""

import argparse
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Any, NoReturn

MODULES = {
    "serve": "serve",
    "calibrate": "calibrate",
    "chat": "chat",
    "explain": "explain",
    "bench": "bench",
    "workload": "workload",
    "generate": "generate",
    "roofline": "roofline",
    "simulate": "simulate",
    "models": "models",
    "pull": "models",
    "inspect": "models",
    "replay": "replay",
}
"""The module of each command, in the order of the help."""
EXIT_USAGE = 2


class _Parser(argparse.ArgumentParser):
    def __init__(self, **settings: Any) -> None:
        """No abbreviated options: adding an option could change what they mean."""
        super().__init__(allow_abbrev=False, **settings)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:  # type: ignore[override]
        """Reports unknown options here, also for subcommands, whose parser knows similar options to suggest."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._hint(unknown[0].partition('=')[0])}")
        return parsed, unknown

    def _hint(self, unknown: str) -> str:
        options = self._option_string_actions
        begun = [option for option in options if unknown.startswith("--") and option.startswith(unknown)]
        near = begun[:3] or get_close_matches(unknown, options, n=2, cutoff=0.75)
        return f"; did you mean {' or '.join(near)}?" if near else ""

    def _print_message(self, message: str, file: Any = None) -> None:
        """Raises `OSError` if the message cannot be written, which argparse would ignore."""
        if message and file is not None:
            file.write(message)

    def error(self, message: str) -> NoReturn:
        """Prints one line, without the usage text of argparse."""
        self.exit(EXIT_USAGE, f"twostep: {message} (see {self.prog} --help)\n")


class _Version(argparse.Action):
    """Reads the version only when asked for: package metadata is slow to load."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from importlib.metadata import version

        print(f"twostep {version('twostep')}")
        parser.exit()


def parser(begun: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The parser of the command named by the first word of `begun`; of all commands, if it names none."""
    made = _Parser(prog="twostep", description="Serve, explain and measure large language models on this machine.")
    made.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = made.add_subparsers(title="commands", required=True, metavar="COMMAND")
    known = [MODULES[word] for word in begun[:1] if word in MODULES]
    for name in known or dict.fromkeys(MODULES.values()):
        import_module(f"twostep.cli.{name}").add_to(commands)
    return made
