"""`twostep replay FILE`: runs a recording through the scheduler again and compares every plan."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from twostep.cli.subcommands import Subcommands

if TYPE_CHECKING:
    from twostep.recording.reader import Recording, Turn
    from twostep.sim.recorded import Replay


def add_to(commands: Subcommands) -> None:
    parser = commands.add_parser("replay", help="run a recording again, and compare every plan")
    parser.add_argument("file", type=Path, metavar="FILE", help="a recording of an engine; - reads standard input")
    parser.add_argument("--plans", action="store_true", help="print every plan, one line per step")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Raises `RecordingError` if the file cannot be replayed, and after the summary if a plan differs."""
    from twostep.errors import RecordingError
    from twostep.recording.reader import Recording
    from twostep.sim.recorded import replay

    recording = Recording(options.file)
    watch = _Watch(options.plans)
    try:
        replayed = replay(recording, watch)
    finally:
        watch.end()
    for name, text in _summary(recording, replayed):
        print(f"{name:<12}{text}")
    print(f"identical plans, byte for byte: {replayed.same} of {replayed.steps}")
    if replayed.difference:
        raise RecordingError(f"{options.file}, line {replayed.difference.line}: {replayed.difference.words()}")


class _Watch:
    """Prints plans if requested; otherwise shows progress on a terminal."""

    EVERY_TURNS = 256

    def __init__(self, plans: bool) -> None:
        from twostep.recording.plan_words import plan_words
        from twostep.terminal import StatusLine

        self._plans, self._plan_words = plans, plan_words
        self._status = StatusLine()

    def __call__(self, turn: "Turn") -> None:
        if turn.step and self._plans:
            print(f"{self._plan_words(turn.step.plan)}, took {turn.step.result.step_ns / 1e6:.1f} ms")
        elif turn.line % self.EVERY_TURNS == 0:
            self._status.show(f"replaying line {turn.line}")

    def end(self) -> None:
        self._status.clear()


def _summary(recording: "Recording", replayed: "Replay") -> list[tuple[str, str]]:
    header, counters = recording.header, replayed.counters
    ended = ", ".join(f"{count} {reason.value}" for reason, count in counters.finished.items() if count)
    about = "; ".join([f"twostep {header.twostep}", *(f"{key} {text}" for key, text in header.about.items())])
    lines = [
        ("recorded by", about),
        ("settings", ", ".join(f"{name} {_setting(value)}" for name, value in header.settings.to_json().items())),
        ("steps", f"{counters.steps} in {replayed.virtual_s:.3f} s; {replayed.computed_tokens} tokens computed"),
        ("requests", f"{replayed.requests} queued, {replayed.refused} refused; ended: {ended or 'none'}"),
        ("tokens", f"{replayed.prompt_tokens} of prompts, {replayed.output_tokens} of output"),
        ("prefixes", f"{counters.prefix_hit_tokens} of {counters.prefix_queried_tokens} looked-up tokens found"),
        ("preemptions", f"{counters.preemptions}, {counters.preempted_tokens} computed tokens lost"),
        ("step time", _prediction(sorted(replayed.prediction_errors))),
    ]
    if recording.torn_line:
        lines.append(("cut off", f"line {recording.torn_line}, the last, is incomplete and was skipped"))
    return lines


def _setting(value: object) -> str:
    return "+".join("all" if item is None else str(item) for item in value) if isinstance(value, list) else str(value)


def _prediction(errors: list[float]) -> str:
    if not errors:
        return "not predicted"
    p50, p90 = (errors[-(-len(errors) * percent // 100) - 1] for percent in (50, 90))
    return f"prediction error {p50:.1%} (p50), {p90:.1%} (p90) of the measured time; {len(errors)} steps"
