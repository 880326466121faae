"""The entry point: runs a command, and turns every expected error into an exit code and at most one line on stderr."""

import argparse
import io
import os
import signal
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from twostep.cli import bench, calibrate, chat, explain, generate, models, replay, roofline, serve, simulate, workload
from twostep.errors import TwostepError

COMMANDS = (serve, calibrate, chat, explain, bench, workload, generate, roofline, simulate, models, replay)

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 1, 2, 130, 141
"""A shell reports 130 and 141 for a program ended by SIGINT or SIGPIPE."""


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

    def error(self, message: str) -> NoReturn:
        """Prints one line, without the usage text of argparse."""
        self.exit(EXIT_USAGE, f"twostep: {message} (see {self.prog} --help)\n")


class _Version(argparse.Action):
    """Reads the version only when asked for: package metadata is slow to load."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from importlib.metadata import version

        print(f"twostep {version('twostep')}")
        parser.exit()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code. `arguments` excludes the program name; None means `sys.argv`."""
    given = sys.argv[1:] if arguments is None else arguments
    if not _prepare_streams(needs_stdout=given[:1] != ["serve"]):
        return EXIT_FAILED
    signal.signal(signal.SIGTERM, _exit_on_sigterm)
    try:
        options = _parser().parse_args(arguments)
        options.run(options)
        sys.stdout.flush()
    except TwostepError as error:
        print(f"twostep: {error}", file=sys.stderr)
        return EXIT_FAILED
    except MemoryError:
        print("twostep: out of memory", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _forget_stdout()
        return EXIT_BROKEN_PIPE
    except OSError as error:
        named = f": {error.filename}" if error.filename else ""
        _forget_stdout()
        print(f"twostep: {error.strerror or error}{named}", file=sys.stderr)
        return EXIT_FAILED
    return 0


def _prepare_streams(*, needs_stdout: bool) -> bool:
    """Replaces closed streams, which are None, and escapes characters that a stream cannot encode.

    Returns False if standard output is needed but closed.
    """
    _open_closed_descriptors()
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is None and needs_stdout:
        print("twostep: standard output is closed", file=sys.stderr)
        return False
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    return True


def _open_closed_descriptors() -> None:
    """Otherwise the next file or socket would get the descriptor of a closed stream, and child processes would write
    their output into it."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number, so this one


def _exit_on_sigterm(number: int, _: object) -> NoReturn:
    """Turns SIGTERM into an exception, so that children are stopped and unfinished files removed."""
    raise SystemExit(128 + number)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="twostep", description="Serve, explain and measure large language models on this machine.")
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_to(commands)
    return parser


def _forget_stdout() -> None:
    """After a broken pipe: prevents an error when the interpreter flushes standard output at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
