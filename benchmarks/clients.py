"""`python -m benchmarks.clients`: compares `twostep bench` with other load generators on one server.

All run closed loops with the same number of streams and the same prompt and answer lengths, in turns. The latencies
reported by each are compared with those of the server for the same requests, as a load generator also takes CPU time
from the server.
"""

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from benchmarks import command, machine
from benchmarks.http_client import fetch
from benchmarks.loading import COMMAND
from benchmarks.measurement import EngineError, Spread, say, spread
from benchmarks.server_process import Server
from twostep.store.catalogue import DEFAULT_MODEL
from twostep.store.resolve import resolve
from twostep.store.wheel_download import FetchProgress
from twostep.workload.arrivals import AtOnce
from twostep.workload.format import write_workload
from twostep.workload.kinds import Fixed, make_workload

NAME = "measured"
"""Name of the served model."""
FLAGS = ("--served-model-name", NAME, "--no-enable-prefix-caching")
"""No prefix cache, as some clients repeat their prompts in every run and others do not."""
LIMIT_S = 300

INSTALL = """
Install each in its own environment, separate from Twostep:

  guidellm    pip install guidellm       --guidellm: path of its program
  aiperf      pip install aiperf         --aiperf: path of its program

Both need --tokenizer, a tokenizer folder in Hugging Face format. To make one from a GGUF file, use transformers and
gguf: AutoTokenizer.from_pretrained(FOLDER, gguf_file=FILE).save_pretrained(OUT)
"""


@dataclass(frozen=True)
class Effort:
    streams: int
    requests: int
    input_tokens: int
    output_tokens: int
    runs: int


FULL = Effort(streams=4, requests=16, input_tokens=256, output_tokens=64, runs=3)
QUICK = Effort(streams=2, requests=3, input_tokens=16, output_tokens=4, runs=1)


@dataclass(frozen=True)
class Figures:
    """Means over the requests of a run in ms, as reported by a client or the server."""

    ttft_ms: float
    tpot_ms: float
    """Time per token after the first; the other clients call it inter-token latency."""
    e2e_ms: float


@dataclass(frozen=True)
class Client:
    name: str
    version: str
    ttft_ms: Spread
    tpot_ms: Spread
    e2e_ms: Spread
    server: dict[str, Spread]
    """The same figures, as reported by the server."""


@dataclass(frozen=True)
class Result:
    command: str
    machine: machine.Machine
    model: str
    load: Effort
    clients: list[Client]


Measure = Callable[[str, Effort, Path], Figures]
"""Measures the server at a URL; the folder is for files."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser("clients", "Compares `twostep bench` with other load generators.")
    parser.epilog = INSTALL
    for name in ("guidellm", "aiperf", "tokenizer"):
        parser.add_argument(f"--{name}", type=Path, metavar="PATH", help="see below")
    options = parser.parse_args(arguments)
    if (options.guidellm or options.aiperf) and not options.tokenizer:
        parser.error("--guidellm and --aiperf need --tokenizer")
    return command.run("clients", options, lambda: measure(options))


def measure(options: argparse.Namespace) -> Result:
    surroundings, path = machine.watched(), resolve(DEFAULT_MODEL, FetchProgress())
    effort, clients = (QUICK if options.quick else FULL), _clients(options)
    found: dict[str, list[tuple[Figures, Figures]]] = {name: [] for name in clients}
    with Server(path, FLAGS) as server, tempfile.TemporaryDirectory() as folder:
        for run in range(effort.runs + 1):  # the first is a warm-up
            for name, (_, measured) in clients.items():
                url, before = f"http://127.0.0.1:{server.port}", totals(server.port)
                told = measured(url, effort, Path(folder, f"{name}{run}"))
                found[name].append((told, between(before, totals(server.port))))
                say(f"run {run} of {effort.runs}, {name}: {told}")
    summed = [_client(name, version, found[name][1:]) for name, (version, _) in clients.items()]
    words = "python -m benchmarks.clients --guidellm PATH --aiperf PATH --tokenizer DIR"
    return Result(words, surroundings, path.stem, effort, summed)


def _client(name: str, version: str, runs: Sequence[tuple[Figures, Figures]]) -> Client:
    told, server = ([run[side] for run in runs] for side in (0, 1))
    return Client(name, version, **_spreads(told), server=_spreads(server))


def _spreads(runs: Sequence[Figures]) -> dict[str, Spread]:
    return {one.name: spread([getattr(run, one.name) for run in runs]) for one in fields(Figures)}


# --- the server's own view ----------------------------------------------------------------------------------------

METRICS = ("time_to_first_token", "request_time_per_output_token", "e2e_request_latency")
"""Histograms of `/metrics`, in the order of `Figures`."""

Totals = list[tuple[float, int]]
"""Sum in seconds and count of each histogram."""


def totals(port: int) -> Totals:
    """Totals since the start of the server."""
    text = asyncio.run(fetch(port, "/metrics")).body().decode()
    return [(_value(text, f"{name}_seconds_sum"), int(_value(text, f"{name}_seconds_count"))) for name in METRICS]


def between(before: Totals, after: Totals) -> Figures:
    """Means of the requests between two readings."""
    pairs = zip(before, after, strict=True)
    return Figures(*(1000 * (late_s - early_s) / max(1, late - early) for (early_s, early), (late_s, late) in pairs))


def _value(text: str, name: str) -> float:
    """A value in `/metrics`; 0 if missing."""
    found = re.search(rf"^twostep:{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


# --- clients ------------------------------------------------------------------------------------------------------


def _clients(options: argparse.Namespace) -> dict[str, tuple[str, Measure]]:
    """For each name: version, and the function that measures."""
    found: dict[str, tuple[str, Measure]] = {"twostep bench": ("", ours)}
    tokenizer = options.tokenizer
    if options.guidellm:
        found["guidellm"] = _version(options.guidellm), lambda *asked: guidellm(options.guidellm, tokenizer, *asked)
    if options.aiperf:
        found["aiperf"] = _version(options.aiperf), lambda *asked: aiperf(options.aiperf, tokenizer, *asked)
    return found


# --- each client --------------------------------------------------------------------------------------------------


def ours(url: str, effort: Effort, folder: Path) -> Figures:
    folder.mkdir()
    lengths = Fixed((effort.input_tokens,) * 2, (effort.output_tokens,) * 2)
    write_workload(folder / "load.jsonl", make_workload(lengths, AtOnce(), effort.requests))
    words = ["bench", "--url", url, "--workload", str(folder / "load.jsonl"), "--concurrency", str(effort.streams)]
    words += ["--token-ids", "40000", "--warmup", "0", "--out", str(folder / "out.json")]
    _run([sys.executable, "-c", COMMAND, *words])
    figures = json.loads((folder / "out.json").read_text())["runs"][0]["figures"]
    return Figures(*(1000 * figures[name]["mean"] for name in ("ttft", "tpot", "e2e")))


def guidellm(program: Path, tokenizer: Path, url: str, effort: Effort, folder: Path) -> Figures:
    folder.mkdir()
    _run(
        [
            str(program), "run", "--disable-progress",
            "--backend", f"kind=openai_http,target={url},model={NAME},request_format=/v1/completions",
            "--profile", f"kind=concurrent,streams={effort.streams}",
            "--constraint", f"kind=max_requests,count={effort.requests}",
            "--tokenizer", f"kind=hf_auto,model={tokenizer}",
            "--data", f"kind=synthetic_text,prompt_tokens={effort.input_tokens},output_tokens={effort.output_tokens}",
            "--output", f"kind=json,path={folder / 'out.json'}",
        ],
        HF_HUB_OFFLINE="1",
    )  # fmt: skip
    metrics = json.loads((folder / "out.json").read_text())["benchmarks"][0]["metrics"]
    mean: Callable[[str], float] = lambda name: metrics[name]["successful"]["mean"]  # noqa: E731
    return Figures(mean("time_to_first_token_ms"), mean("inter_token_latency_ms"), 1000 * mean("request_latency"))


def aiperf(program: Path, tokenizer: Path, url: str, effort: Effort, folder: Path) -> Figures:
    _run([
        str(program), "profile", "--model", NAME, "--url", url, "--tokenizer", str(tokenizer), "--streaming",
        "--endpoint-type", "completions", "--request-count", str(effort.requests),
        "--concurrency", str(effort.streams), "--synthetic-input-tokens-mean", str(effort.input_tokens),
        "--output-tokens-mean", str(effort.output_tokens), "--extra-inputs", "ignore_eos:true", "--random-seed", "1",
        "--use-server-token-count", "--ui", "simple", "--artifact-dir", str(folder),
    ])  # fmt: skip
    [path] = folder.rglob("profile_export_aiperf.json")
    found = json.loads(path.read_text())
    return Figures(*(found[name]["avg"] for name in ("time_to_first_token", "inter_token_latency", "request_latency")))


def _run(words: Sequence[str], **environment: str) -> None:
    """Runs a program. Raises `EngineError` with its last line of output if it fails."""
    done: Any = subprocess.run(
        words, env=os.environ | environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).rpartition("\n")[2]
        raise EngineError(f"{Path(words[0]).name}: exit code {done.returncode}: {said[:300]}")


def _version(program: Path) -> str:
    """Version of the package named like the program, in its environment."""
    ask = f"from importlib.metadata import version; print(version({program.name!r}))"
    return subprocess.run(
        [program.parent / "python", "-c", ask], capture_output=True, text=True, check=True
    ).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
