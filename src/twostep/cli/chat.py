"""`twostep chat [MODEL]`: a conversation in the terminal, with a model of this machine or, by `--url`, a server's."""

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
/reset         begin a new conversation
/system TEXT   say how the model should answer; without TEXT: no system message
/exit          leave, as Ctrl-D does
Ctrl-C stops an answer. A line that begins with a space is sent even if a / follows."""


@dataclass
class Said:
    """What is known of an answer beside its text."""

    tokens: int | None = None
    cut: bool = False
    """Whether it ended because it may not be longer."""


class Partner(Protocol):
    """Whoever answers."""

    name: str

    def answer(self, messages: list[Message], said: Said) -> Generator[str, None, None]:
        """Pieces of the answer's text, the first when its first token comes; fills in `said`. Leaving early stops it.

        Raises `TwostepError` for what cannot be answered."""
        ...

    def close(self) -> None: ...


def add_to(commands: Subcommands) -> None:
    parser = commands.add_parser("chat", help="talk with a model, here or at a server")
    parser.add_argument("model", nargs="?", metavar="MODEL", help="default: that of generate, or the server's first")
    parser.add_argument("--url", help="an OpenAI-compatible server, such as http://127.0.0.1:8000")
    connection.add_to(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message, how the model should answer")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="longest answer (default: as the context allows)")
    parser.add_argument("--temperature", type=float, default=0.7, metavar="T", help="0: likeliest token (default: 0.7)")
    parser.add_argument("--seed", type=int, metavar="N", help="same seed, same answers (default: random)")
    parser.add_argument("--threads", type=int, metavar="N", help="default: the cores that this process may use")
    parser.set_defaults(run=lambda options: run(options, parser))


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    if options.url is not None and options.threads is not None:
        parser.error("--threads is for a model of this machine, not for --url")
    for name in connection.OPTIONS:
        if options.url is None and getattr(options, name):
            parser.error(f"--{name.replace('_', '-')} is for --url")
    with closing(_partner(options)) as partner:
        Chat(partner, options.system).run()


def _partner(options: argparse.Namespace) -> Partner:
    if options.url is not None:
        from twostep.cli.remote import RemotePartner

        return RemotePartner(options)
    from twostep.cli.local_engine import LocalPartner

    return LocalPartner(options)


@dataclass
class Chat:
    """The conversation: what the person types goes to the partner, with all that was said before."""

    partner: Partner
    system: str | None
    messages: list[Message] = field(default_factory=list)

    def run(self) -> None:
        """Until the input ends or somebody says so."""
        _say(f"{self.partner.name}; /help lists commands, Ctrl-D leaves")
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
        return lambda _: _say(f"twostep: {command} is no command; /help lists them")

    def _reset(self, _: str) -> None:
        self.messages.clear()
        _say("a new conversation")

    def _set_system(self, text: str) -> None:
        self.system = text or None
        _say("system message set" if text else "no system message")

    def _ask(self, question: str) -> None:
        """A question that got no answer is not remembered; one that was stopped is, with what was said."""
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
    """When pieces of an answer came."""

    started_s: float = field(default_factory=perf_counter)
    first_s: float | None = None
    last_s: float = 0.0

    def note(self) -> None:
        """A piece came."""
        self.last_s = perf_counter()
        if self.first_s is None:
            self.first_s = self.last_s

    def line(self, said: Said, pieces: int) -> str:
        """The first token is not among those that the rate counts: its time is TTFT. Pieces stand for tokens if nobody
        counted those."""
        assert self.first_s is not None, "no piece came"
        count, unit = (pieces, "pieces") if said.tokens is None else (said.tokens, "tokens")
        words = [f"TTFT {self.first_s - self.started_s:.3f} s", f"{count} {unit}"]
        if count > 1 and self.last_s > self.first_s:
            words.append(f"{(count - 1) / (self.last_s - self.first_s):.1f} {unit}/s")
        return "[" + ", ".join(words) + (", cut at its longest]" if said.cut else "]")


def _read_line() -> str | None:
    """What the person typed; None: no more. Ctrl-C throws a half-typed line away."""
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
