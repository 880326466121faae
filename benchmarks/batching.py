"""`python -m benchmarks.batching`: gains of batching, chunking, prefix reuse and paging, and comparison with other
engines.

First measures our own baselines on one model: continuous against static batching, chunked against unchunked prefill,
prefix cache on and off, blocks against contiguous reservations. With other engines given, it then measures throughput
of mixed requests and the stall caused by a long prompt, in turns. The result is a JSON file, from which
`benchmarks.report` generates tables and plots of docs/batching.md.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from benchmarks import command, http_engine, interference, machine, output_lengths, paging, prefix_reuse, throughput
from benchmarks.engines import programs_version, requantise
from benchmarks.http_engine import HttpEngine
from benchmarks.interference import StallPoint
from benchmarks.measurement import say
from benchmarks.openvino import OpenVinoServing
from benchmarks.output_lengths import LengthsPoint
from benchmarks.paging import Paging
from benchmarks.peers_model import LLAMA_BEST
from benchmarks.prefix_reuse import PrefixPoint
from benchmarks.serving_engines import Twostep
from benchmarks.throughput import Throughput
from twostep.model.loaded import LoadedModel, open_model
from twostep.store.catalogue import DEFAULT_MODEL
from twostep.store.resolve import resolve
from twostep.store.wheel_download import FetchProgress

CHUNKED = ("-b", "256", "-ub", "256")
"""Chunk size of llama-server, the same as for OpenVINO; also gives its best throughput."""
STALLS = ("tokens=256", "time=50")
"""Our chunkings in the comparison: the same token budget as the others, and one by time."""


@dataclass(frozen=True)
class Effort:
    lengths: output_lengths.Effort
    stalls: interference.Effort
    prefixes: prefix_reuse.Effort
    paging: paging.Effort
    throughput: throughput.Effort


FULL = Effort(output_lengths.FULL, interference.FULL, prefix_reuse.FULL, paging.FULL, throughput.FULL)
QUICK = Effort(output_lengths.QUICK, interference.QUICK, prefix_reuse.QUICK, paging.QUICK, throughput.QUICK)


@dataclass(frozen=True)
class Peers:
    """Results of all engines, including Twostep: `requests`, `outstanding` at a time; a newcomer of `newcomer`
    tokens."""

    requests: int
    outstanding: int
    newcomer: int
    throughput: list[Throughput]
    stalls: list[StallPoint]


@dataclass(frozen=True)
class Result:
    command: str
    machine: machine.Machine
    threads: int
    model: str
    lengths: list[LengthsPoint]
    chunking: list[StallPoint]
    prefixes: list[PrefixPoint]
    paging: Paging
    peers: Peers | None
    """None if no other engine was given."""


def main(arguments: Sequence[str] | None = None) -> int:
    description = "Measures the gains of batching, and compares Twostep with other serving engines."
    options = command.parser_with_peers("batching", description).parse_args(arguments)
    return command.run("batching", options, lambda: measure(options))


def measure(options: argparse.Namespace) -> Result:
    surroundings = machine.watched()
    effort = QUICK if options.quick else FULL
    model = open_model(resolve(DEFAULT_MODEL, FetchProgress()))
    return Result(
        command=command.command_with_peers("batching", options),
        machine=surroundings,
        threads=surroundings.threads,
        model=model.path.stem,
        lengths=output_lengths.measure(model, effort.lengths),
        chunking=interference.measure(
            interference.engines(model, effort.stalls, effort.stalls.chunkings), effort.stalls
        ),
        prefixes=prefix_reuse.measure(model, effort.prefixes),
        paging=paging.measure(effort.paging),
        peers=_compare(options, surroundings, model, effort),
    )


def _compare(
    options: argparse.Namespace, surroundings: machine.Machine, model: LoadedModel, effort: Effort
) -> Peers | None:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        openvino = [stack.enter_context(closing(one)) for one in _openvino(options, model.path, surroundings.threads)]
        started = _llama_servers(options, model.path, folder, surroundings.threads)
        llama = [stack.enter_context(closing(one)) for one in started]
        if not (openvino or llama):
            say("no other engine was given: comparison skipped")
            return None
        ours = Twostep(model, f"commit {surroundings.commit}", max_num_seqs=effort.throughput.outstanding)
        cutting = interference.engines(model, effort.stalls, STALLS, "Twostep ")
        stalls = interference.measure([*cutting, *openvino, *llama], effort.stalls)
        rates = throughput.measure([ours, *openvino, *llama[1:]], effort.throughput)
        return Peers(effort.throughput.requests, effort.throughput.outstanding, effort.stalls.newcomer, rates, stalls)


def _openvino(options: argparse.Namespace, path: Path, threads: int) -> Iterator[OpenVinoServing]:
    """OpenVINO on the same file, if requested."""
    if options.openvino_python is not None:
        yield OpenVinoServing(options.openvino_python, threads, path, path.stem.rpartition(".")[2])


def _llama_servers(options: argparse.Namespace, path: Path, folder: Path, threads: int) -> Iterator[HttpEngine]:
    """llama-server, if requested, with its fastest weight format: with defaults, and with its best throughput
    settings."""
    if options.llama_dir is not None:
        version = options.llama_version or programs_version(options.llama_dir)
        weights = requantise(options.llama_dir, path, LLAMA_BEST, folder)
        for arguments in ((), CHUNKED):
            yield HttpEngine(http_engine.launch_llama_server(options.llama_dir, version, threads, weights, arguments))


if __name__ == "__main__":
    sys.exit(main())
