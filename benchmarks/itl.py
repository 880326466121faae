"""`python -m benchmarks.itl`: inter-token latency against its budget, while long prompts arrive.

Streams run, and prompts arrive one after the other; each gap between two tokens of a stream during the wait of a
newcomer counts. Twostep is measured with budgets from 1.5 times the decode step up, with fixed chunks and without any;
the other engines with their settings for short steps. All are asked over HTTP by the same client, except OpenVINO,
which has no server.

`--only` measures some of the parts and merges them into the result file, so that each stays within a few minutes. From
the file `benchmarks.report` makes the tables and plots of docs/itl.md.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import command, http_engine, itl_steps, machine, results
from benchmarks.http_engine import HttpEngine, Launch
from benchmarks.http_load import Overtaken
from benchmarks.itl_steps import Steps
from benchmarks.jobs import Job, prompt
from benchmarks.measurement import EngineError, say
from benchmarks.openvino import OpenVinoServing, Tuning
from benchmarks.peers_contenders import NotThereError, Place
from benchmarks.peers_install import LLAMA, OPENVINO, VARIABLE, Missing, find, llama_programs
from benchmarks.traces import during_ms
from twostep.metrics.summary import percentile
from twostep.model.loaded import open_model
from twostep.store.catalogue import DEFAULT_MODEL
from twostep.store.resolve import resolve
from twostep.store.wheel_download import FetchProgress

OURS = "Twostep"
MULTIPLES = (1.5, 2.0, 3.0, 5.0)
"""Budgets, in decode steps of the streams."""
AUTO = "auto"
CHUNKINGS = ("tokens=128", "tokens=512", "none")
LLAMA_SETTINGS = (("-b", "128", "-ub", "128"), ("-b", "32", "-ub", "32"))
"""The setting that delays streams least, and one with still shorter steps."""
OPENVINO_CHUNKS = (128, 32)
SLOTS, CONTEXT = 20, 8192
STREAM_TOKENS = 256
"""Of an answer of a stream; then it is asked for again, so that contexts stay as they are."""
PARTS = ("budgets-4", "budgets-16", "chunks", "openvino", "llama")


@dataclass(frozen=True)
class Effort:
    streams: tuple[int, ...]
    newcomers: tuple[tuple[int, int], ...]
    """Tokens of the prompts, and how many of that length arrive, one after the other."""
    after: int
    """Tokens of each stream when the first newcomer arrives."""
    multiples: tuple[float, ...]
    chunkings: tuple[str, ...]


FULL = Effort((4, 16), ((512, 2), (2048, 1), (6000, 1)), 24, MULTIPLES, CHUNKINGS)
QUICK = Effort((4, 16), ((512, 1),), 8, (1.5, 3.0), ("tokens=128",))


@dataclass(frozen=True)
class Point:
    """One setting in one situation."""

    engine: str
    name: str
    budget_ms: float | None
    """None: none, or chosen for each step."""
    streams: int
    prompt: int
    decode_ms: float
    """Median gap before the first newcomer."""
    gaps: int
    """Gaps of the streams that overlap the wait of a newcomer for its first token."""
    p99_ms: float
    max_ms: float
    ttft_ms: float
    """Median of the newcomers."""
    steps: Steps | None
    """What the engine's recording says of these steps; None without one."""


@dataclass(frozen=True)
class Result:
    command: str
    machine: machine.Machine
    threads: int
    model: str
    points: list[Point]
    versions: dict[str, str]
    """Version and command, by name."""
    missing: list[Missing]


@dataclass(frozen=True)
class Setting:
    """A way to run an engine."""

    engine: str
    name: str
    start: Callable[[], Any]
    budget_ms: float | None = None
    record: Path | None = None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser_with_peers("itl", "Measures inter-token latency against its budget.")
    parser.add_argument("--only", choices=PARTS, action="append", help="measure this part and keep the others' results")
    parser.add_argument(
        "--budget", choices=(*map(str, MULTIPLES), AUTO), action="append", help="of the budgets, only this one"
    )
    parser.add_argument("--peers-dir", type=Path, metavar="DIR", help=f"of the other engines; default: ${VARIABLE}")
    options = parser.parse_args(arguments)
    return command.run("itl", options, lambda: measure(options))


def measure(options: argparse.Namespace) -> Result:
    surroundings, path = machine.watched(), resolve(DEFAULT_MODEL, FetchProgress())
    effort, found, versions = QUICK if options.quick else FULL, list[Point](), dict[str, str]()
    missing = list[Missing]()
    with tempfile.TemporaryDirectory() as scratch:
        place = Place(path, surroundings.threads, Path(scratch), options)
        for part in options.only or PARTS:
            try:
                for setting in _settings(part, place, effort):
                    for point in _measured(setting, effort, part, versions):
                        found.append(point)
            except NotThereError as error:
                missing.append(error.missing)
            except EngineError as error:
                if part not in ("openvino", "llama"):
                    raise
                missing.append(Missing(part, f"failed: {error}"))
    for one in missing:
        say(f"{one.name}: {one.reason}")
    result = Result("make bench-itl", surroundings, surroundings.threads, path.stem, found, versions, missing)
    return merged(result, options) if options.only else result


def merged(result: Result, options: argparse.Namespace) -> Result:
    """With the points of the result file, if there is one, that were not measured again."""
    path = options.out or results.FOLDER / f"itl-{machine.slug(result.machine.cpu)}.json"
    before: dict[str, Any] = results.read_file(path) if path.is_file() else {}
    kept = [
        Point(**{**one, "steps": one["steps"] and Steps(**one["steps"])})
        for one in before.get("points", [])
        if not _again(one, result.points)
    ]
    names = {point.engine for point in (*kept, *result.points)}
    gone = [Missing(**one) for one in before.get("missing", []) if one["name"] not in names]
    missing = {one.name: one for one in (*gone, *result.missing)}
    return replace(
        result,
        points=[*kept, *result.points],
        versions={**before.get("versions", {}), **result.versions},
        missing=list(missing.values()),
    )


def _again(one: dict[str, Any], points: Sequence[Point]) -> bool:
    """Whether a point of before was measured again; budgets are multiples of a decode step, which differs a little."""
    return any(
        (point.engine, point.streams, point.prompt, _kind(point.name), point.budget_ms is None)
        == (one["engine"], one["streams"], one["prompt"], _kind(one["name"]), one["budget_ms"] is None)
        for point in points
    )


def _kind(name: str) -> str:
    """Without the milliseconds of a budget."""
    return name.partition(" ms")[0].rstrip("0123456789.") if " ms" in name else name


# --- what is measured -------------------------------------------------------------------------------------------------


def _settings(part: str, place: Place, effort: Effort) -> Iterator[Setting]:
    """Raises `NotThereError` for an engine that is not installed."""
    if part.startswith("budgets"):
        yield from _budgets(int(part.partition("-")[2]), place, effort)
    elif part == "chunks":
        for how in effort.chunkings:
            yield _twostep(place, f"chunks: {how}", ("--chunking", how))
    elif part == "openvino":
        python = _installed(place.options.openvino_python or find(OPENVINO, place.folder))
        for chunk in OPENVINO_CHUNKS:
            yield _openvino(python, place, chunk)
    else:
        given = place.options.llama_dir
        programs = given or llama_programs(_installed(find(LLAMA, place.folder)))
        for more in LLAMA_SETTINGS:
            yield _llama(programs, place, more)


def _installed(found: Path | Missing) -> Path:
    if isinstance(found, Missing):
        raise NotThereError(found)
    return found


def _budgets(streams: int, place: Place, effort: Effort) -> Iterator[Setting]:
    """Multiples of the decode step of so many streams, and the automatic budget."""
    decode_ms = _decode_step_ms(streams, place, effort)
    say(f"decode step of {streams} streams: {decode_ms:.2f} ms")
    asked = place.options.budget or (*map(str, effort.multiples), AUTO)
    for multiple in (float(one) for one in asked if one != AUTO):
        budget_ms = round(multiple * decode_ms, 1)
        how = f"budget {multiple:g} decode steps, {budget_ms} ms"
        yield _twostep(place, how, ("--itl-budget", str(budget_ms)), budget_ms)
    if AUTO in asked:
        yield _twostep(place, "budget auto", ("--itl-budget", AUTO))


def _decode_step_ms(streams: int, place: Place, effort: Effort) -> float:
    with closing(_twostep(place, "probe", ()).start()) as engine:
        found = engine.overtaken(_streams(streams, 0), [Job(prompt(4, "probe"), 1)], STREAM_TOKENS)
    return _median([gap for trace in found.streams for gap in trace.gaps_ms])


def _twostep(place: Place, name: str, more: Sequence[str], budget_ms: float | None = None) -> Setting:
    kv_bytes = open_model(place.model).network.shape.kv_bytes_per_token() * (SLOTS * 1024 + 2 * CONTEXT)
    launch = http_engine.launch_twostep("", place.threads, place.model, 1, ())
    sized = [
        *launch.command[: launch.command.index("--max-num-seqs")], "--max-num-seqs", str(SLOTS), "--max-model-len",
        str(CONTEXT), "--kv-memory", f"{kv_bytes}B", *more,
    ]  # fmt: skip
    record = place.scratch / f"{name.replace(' ', '-').replace(':', '').replace('/', '')}.rec"
    if "probe" in name:
        return Setting(OURS, name, lambda: HttpEngine(replace(launch, name=OURS, command=sized)))
    recorded = replace(launch, name=name, command=[*sized, "--record", str(record)])
    return Setting(OURS, name, lambda: HttpEngine(recorded), budget_ms, record)


def _llama(programs: Path, place: Place, more: Sequence[str]) -> Setting:
    launch = http_engine.launch_llama_server(programs, LLAMA.packages[0], place.threads, place.model, more)
    words = list(launch.command)
    words[words.index("-np") + 1], words[words.index("-c") + 1] = str(SLOTS), str(SLOTS * CONTEXT)
    sized: Launch = replace(launch, command=words)
    return Setting(LLAMA.name, launch.name, lambda: HttpEngine(sized))


def _openvino(python: Path, place: Place, chunk: int) -> Setting:
    tuning = Tuning(chunk_tokens=chunk, cache_tokens=SLOTS * 1024 + 2 * CONTEXT)
    kind = f"{place.model.stem.rpartition('.')[2]}, steps of {chunk}"
    return Setting(
        OPENVINO.name, f"OpenVINO {kind}", lambda: OpenVinoServing(python, place.threads, place.model, kind, tuning)
    )


# --- a measurement ----------------------------------------------------------------------------------------------------


def _measured(setting: Setting, effort: Effort, part: str, versions: dict[str, str]) -> Iterator[Point]:
    """All situations of one setting, on one server; those that took too long are left out."""
    streams = [int(part.partition("-")[2])] if part.startswith("budgets") else effort.streams
    points = list[Point]()
    with closing(setting.start()) as engine:
        versions[setting.name] = engine.version or setting.engine
        _warm_up(engine)
        for count in streams:
            for tokens, newcomers in effort.newcomers:
                try:
                    points.append(_point(setting, engine, effort, count, tokens, newcomers))
                except EngineError as error:
                    say(f"no point: {error}")
    steps = itl_steps.read(setting.record) if setting.record else {}
    for point in points:
        found = steps.get((point.streams, point.prompt))
        yield replace(point, steps=found)


def _warm_up(engine: Any) -> None:
    """Prompts beside streams, from which a cost model learns."""
    for i in range(2):
        engine.overtaken(_streams(4, 100 + i), [Job(prompt(700, "warm", i, j), 2) for j in range(2)], 16)


def _point(setting: Setting, engine: Any, effort: Effort, streams: int, tokens: int, newcomers: int) -> Point:
    arriving = [Job(prompt(tokens, "newcomer", streams, i), 2) for i in range(newcomers)]
    found: Overtaken = engine.overtaken(_streams(streams, tokens), arriving, effort.after)
    running, late = found.streams, found.newcomers
    before = [gap for trace in running for gap in trace.gaps_until_ms(late[0].asked_s)]
    during = [gap for trace in running for gap in during_ms(trace, late)]
    ttft = [1000 * (trace.token_s[0] - trace.asked_s) for trace in late]
    point = Point(
        setting.engine, setting.name, setting.budget_ms, streams, tokens, _median(before), len(during),
        percentile(during, 99), max(during), _median(ttft), None,
    )  # fmt: skip
    say(f"{point.name}, {streams} streams, {tokens}: p99 {point.p99_ms:.1f} max {point.max_ms:.1f} ms, "
        f"TTFT {point.ttft_ms:.0f} ms, {point.gaps} gaps")  # fmt: skip
    return point


def _streams(count: int, key: int) -> list[Job]:
    return [Job(prompt(32, "stream", key, i), STREAM_TOKENS) for i in range(count)]


def _median(values: Sequence[float]) -> float:
    return percentile(values, 50)


if __name__ == "__main__":
    sys.exit(main())
