"""Hardware counters of a run, from `perf stat`. Virtual machines often have none."""

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

EVENTS = ("instructions", "cycles", "cache-references", "cache-misses")


def missing_counters(events: tuple[str, ...] = EVENTS) -> str | None:
    """Why the counters are unavailable; None if they are available."""
    if shutil.which("perf") is None:
        return "not measured: perf is not installed"
    command = ["perf", "stat", "-x,", "-e", ",".join(events), "true"]
    probe = subprocess.run(command, capture_output=True, text=True, check=False)
    if probe.returncode != 0:
        lines = probe.stderr.strip().splitlines() or [f"exit code {probe.returncode}"]
        return f"not measured: perf: {lines[0]}"
    missing = [event for event, count in parse(probe.stderr).items() if count is None]
    return f"not supported by this machine: {', '.join(missing)}" if missing else None


def parse(report: str) -> dict[str, int | None]:
    """Counts by event from the output of `perf stat -x,`; None for events that were not counted."""
    fields = [line.split(",") for line in report.splitlines() if line.count(",") >= 3 and not line.startswith("#")]
    return {field[2].removesuffix(":u"): None if field[0].startswith("<") else int(float(field[0])) for field in fields}


def count(run: Callable[[], object], events: tuple[str, ...] = EVENTS) -> dict[str, int | None]:
    """Counts events of all threads of this process during `run`. Requires that `missing_counters()` is None.

    perf attaches first, and is enabled and disabled through its control pipe.
    """
    with tempfile.TemporaryDirectory() as folder:
        control, acknowledge = Path(folder, "control"), Path(folder, "acknowledge")
        os.mkfifo(control)
        os.mkfifo(acknowledge)
        perf = subprocess.Popen(_command(events, control, acknowledge), stderr=subprocess.PIPE, text=True)
        with control.open("w") as orders, acknowledge.open() as answers:
            _order("enable", orders, answers)
            run()
            _order("disable", orders, answers)
            perf.send_signal(signal.SIGINT)
            return parse(perf.communicate()[1])


def _command(events: tuple[str, ...], control: Path, acknowledge: Path) -> list[str]:
    """`--delay=-1`: attached, but not counting until enabled."""
    pipes = f"--control=fifo:{control},{acknowledge}"
    return ["perf", "stat", "-x,", "--delay=-1", pipes, "-e", ",".join(events), "-p", str(os.getpid())]


def _order(order: str, orders: TextIO, answers: TextIO) -> None:
    """Sends an order and waits until perf acknowledges it."""
    print(order, file=orders, flush=True)
    answers.readline()
