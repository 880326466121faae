"""The entry point: runs a command, and turns every expected error into an exit code and at most one line on stderr."""

import io
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from twostep.errors import TwostepError

EXIT_FAILED, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 1, 130, 141
"""A shell reports 130 and 141 for a program ended by SIGINT or SIGPIPE."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code. `arguments` excludes the program name; None means `sys.argv`."""
    given = sys.argv[1:] if arguments is None else arguments
    try:
        if not _prepare_streams(needs_stdout=given[:1] != ["serve"]):
            return EXIT_FAILED
        signal.signal(signal.SIGTERM, _exit_on_sigterm)
        _run(given)
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


def _run(given: Sequence[str]) -> None:
    """Runs one command. Its modules are imported here, where `main` handles Ctrl-C: that takes tenths of a second."""
    from twostep.cli.parser import parser

    try:
        options = parser(given[:1]).parse_args(given)
        options.run(options)
    except SystemExit:  # also after --help; what cannot be written is reported by `main`
        sys.stdout.flush()
        raise
    sys.stdout.flush()


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


def _forget_stdout() -> None:
    """After a broken pipe: prevents an error when the interpreter flushes standard output at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
