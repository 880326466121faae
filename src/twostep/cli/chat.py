"""`twostep chat [MODEL]`: a conversation in the terminal with a local model or, with `--url`, a server."""

import argparse
import sys
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol

from twostep.cli import connection
from twostep.cli.subcommands import Subcommands
from twostep.errors import TwostepError

Message = dict[str, Any]

HELP = """\
/reset         start a new conversation
/system TEXT   set the system message; without TEXT, remove it
/exit          quit, like Ctrl-D
Ctrl-C stops an answer. Start a line with a space to send text that begins with /."""


@dataclass
class Said:
    """Facts about an answer other than its text."""

    tokens: int | None = None
    cut: bool = False
    """Whether it ended because it reached the token limit."""


class Partner(Protocol):
    """Answers the messages of a chat."""

    name: str

    def answer(self, messages: list[Message], said: Said) -> Generator[str, None, None]:
        """Yields pieces of the answer's text as tokens arrive, and fills in `said`. Closing the generator stops it.

        Raises `TwostepError` if there is no answer."""
        ...

    def close(self) -> None: ...


def add_to(commands: Subcommands) -> None:
    parser = commands.add_parser("chat", help="chat with a model, local or on a server")
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="default: the default model, or the first model of the server"
    )
    parser.add_argument("--url", help="an OpenAI-compatible server, such as http://127.0.0.1:8000")
    connection.add_to(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="maximum answer length (default: what the context allows)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.7, metavar="T", help="0: most likely token (default: 0.7)"
    )
    parser.add_argument(
        "--seed", type=int, metavar="N", help="seed; the same seed gives the same answers (default: random)"
    )
    parser.add_argument("--threads", type=int, metavar="N", help="default: the cores available to this process")
    parser.set_defaults(run=lambda options: run(options, parser))


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    if options.url is not None and options.threads is not None:
        parser.error("--threads cannot be used with --url")
    for name in connection.OPTIONS:
        if options.url is None and getattr(options, name):
            parser.error(f"--{name.replace('_', '-')} needs --url")
    with closing(_partner(options)) as partner:
        Conversation(partner, options.system).run()


def _partner(options: argparse.Namespace) -> Partner:
    if options.url is not None:
        from twostep.cli.remote import RemotePartner

        return RemotePartner(options)
    from twostep.cli.local_engine import LocalPartner

    return LocalPartner(options)


@dataclass
class Conversation:
    """The conversation: sends each typed line to the partner, with all earlier messages."""

    partner: Partner
    system: str | None
    messages: list[Message] = field(default_factory=list)

    def run(self) -> None:
        """Runs until the input ends or /exit."""
        _say(f"{self.partner.name}; /help lists commands, Ctrl-D quits")
        while (line := _read_line()) is not None:
            if line.startswith("/"):
                command, _, argument = line.partition(" ")
                if command == "/exit":
                    return
                self._commands().get(command, self._unknown(command))(argument.strip())
            elif line.strip():
                self._ask(line.strip())

    def _commands(self) -> dict[str, Callable[[str], None]]:
        return {"/reset": self._reset, "/system": self._set_system, "/help": lambda _: _say(HELP)}

    def _unknown(self, command: str) -> Callable[[str], None]:
        return lambda _: _say(f"twostep: unknown command {command}; /help lists the commands")

    def _reset(self, _: str) -> None:
        self.messages.clear()
        _say("new conversation")

    def _set_system(self, text: str) -> None:
        self.system = text or None
        _say("system message set" if text else "system message removed")

    def _ask(self, question: str) -> None:
        """A question without any answer is dropped; an answer that was stopped is kept as far as it got."""
        self.messages.append({"role": "user", "content": question})
        text = self._show_answer()
        if text:
            self.messages.append({"role": "assistant", "content": text})
        else:
            self.messages.pop()

    def _show_answer(self) -> str:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        said, watch, pieces = Said(), Stopwatch(), list[str]()
        try:
            with closing(self.partner.answer([*system, *self.messages], said)) as answer:
                for piece in answer:
                    watch.note()
                    pieces.append(piece)
                    _show(piece)
            _show("\n")
        except KeyboardInterrupt:
            _show("\n")
            _say("stopped")
        except TwostepError as error:
            _show("\n" if pieces else "")
            _say(f"twostep: {error}")
        if pieces:
            _say(watch.line(said, len(pieces)))
        return "".join(pieces)


@dataclass
class Stopwatch:
    """Arrival times of the pieces of an answer."""

    started_s: float = field(default_factory=perf_counter)
    first_s: float | None = None
    last_s: float = 0.0

    def note(self) -> None:
        """Records the arrival of a piece."""
        self.last_s = perf_counter()
        if self.first_s is None:
            self.first_s = self.last_s

    def line(self, said: Said, pieces: int) -> str:
        """The summary line. The rate does not count the first token, whose time is TTFT. Without a token count, it
        counts pieces."""
        assert self.first_s is not None, "no piece came"
        count, unit = (pieces, "pieces") if said.tokens is None else (said.tokens, "tokens")
        words = [f"TTFT {self.first_s - self.started_s:.3f} s", f"{count} {unit}"]
        if count > 1 and self.last_s > self.first_s:
            words.append(f"{(count - 1) / (self.last_s - self.first_s):.1f} {unit}/s")
        return "[" + ", ".join(words) + (", cut at the token limit]" if said.cut else "]")


def _read_line() -> str | None:
    """Returns the typed line, or None at the end of the input. Ctrl-C discards a half-typed line."""
    interactive = sys.stdin.isatty()
    if interactive:
        with suppress(ImportError):
            import readline  # noqa: F401  `input` edits lines with it
    while True:
        try:
            return input("> " if interactive else "").encode(errors="surrogateescape").decode()
        except EOFError:
            _show("\n" if interactive else "")
            return None
        except KeyboardInterrupt:
            if not interactive:
                raise
            _show("\n")
        except UnicodeDecodeError:
            _say("twostep: that line is not UTF-8")


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
