"""`python -m benchmarks.calibration`: calibrates as `twostep calibrate` does, and keeps how well it went."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import command, machine
from benchmarks.measurement import say
from twostep.engine.calibration.calibrate import calibrate
from twostep.model.loaded import open_model
from twostep.perf.typical_steps import typical_steps
from twostep.store.catalogue import DEFAULT_MODEL
from twostep.store.resolve import resolve
from twostep.store.wheel_download import FetchProgress


@dataclass(frozen=True)
class Result:
    command: str
    machine: machine.Machine
    model: str
    typical: list[dict[str, Any]]
    """Estimates in ms, see `TypicalStep`."""
    profile: dict[str, Any]
    """As `twostep calibrate --json` prints it."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser("calibration", "Calibrates this machine with one model; takes about a minute.")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="name or path (default: %(default)s)")
    options = parser.parse_args(arguments)
    name = f"calibration-{machine.slug(options.model)}"
    return command.run("calibration", options, lambda: measure(options), name)


def measure(options: argparse.Namespace) -> Result:
    surroundings = machine.watched()
    say("calibrating")
    profile = calibrate(open_model(resolve(options.model, FetchProgress())), quick=options.quick)
    typical = [step._asdict() for step in typical_steps(profile.costs)]
    return Result("python -m benchmarks.calibration", surroundings, options.model, typical, profile.to_json())


if __name__ == "__main__":
    sys.exit(main())
