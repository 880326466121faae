"""`python -m benchmarks.simulated_vllm`: a run of vLLM on an RTX 4090, request by request, against its simulation.

The run and the kernels' times were published by the authors of LLMServingSim (casys-kaist/LLMServingSim, MIT): vLLM
0.19 serves 300 ShareGPT requests with Llama-3.1-8B in bf16 and 2 588 KV blocks, so that most requests wait for blocks.
Our scheduler gets vLLM's settings and step times from the kernel tables, or from the roofline; nothing is fitted to the
run.
"""

import csv
import gzip
import json
import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray

from benchmarks import results
from twostep.config.configs import SchedulerSettings
from twostep.core.cost import Cost, CostModel, StepShape, Terms
from twostep.metrics.load import LoadSummary, RequestTimes, summarise_load
from twostep.perf.hardware import hardware_named
from twostep.perf.model_table import model_named
from twostep.perf.roofline_model import RooflineModel, typical_efficiency
from twostep.perf.step_times import StepTimes
from twostep.sim.simulation import ReplicaSpec, Simulation, simulate
from twostep.workload.definition import Workload, WorkloadRequest
from twostep.workload.schedule import Open

RUN = "llmservingsim/vllm_runs/RTX4090__Llama-3.1-8B"
TABLES = "llmservingsim/kernel_profiles/RTX4090_meta-llama_Llama-3.1-8B_bf16_tp1"
LAYERS = 32
LAYER = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "rotary_emb", "act_fn", "layernorm", "layernorm")
ONCE = ("embedding", "final_layernorm")

Floats = NDArray[np.float64]


# --- step times ---------------------------------------------------------------------------------------------------


class KernelTables:
    """A `CostModel` that adds up measured kernels: linear layers by tokens, attention by chunk and context of prompts
    and by number and context of decodes, the output head by sequences; each interpolated in straight lines."""

    def __init__(self, folder: Path) -> None:
        self._dense = _curves(folder / "dense.csv.gz", "tokens")
        self._once = _curves(folder / "per_sequence.csv.gz", "sequences")
        self._attention = _Attention(list(_rows(folder / "attention.csv.gz")))

    def estimate(self, shape: StepShape) -> Cost:
        linear_us = LAYERS * sum(_at(self._dense[name], shape.tokens) for name in LAYER)
        fixed_us = sum(_at(self._dense[name], shape.tokens) for name in ONCE)
        head_us = sum(_at(curve, shape.logit_rows) for curve in self._once.values()) if shape.logit_rows else 0.0
        attention_us = LAYERS * self._attention.us(shape)
        terms = Terms(fixed_us * 1e3, linear_us * 1e3, attention_us * 1e3, 0.0, head_us * 1e3)
        ns = int(sum(terms))
        return Cost(ns, ns, terms)

    def observe(self, shape: StepShape, measured_ns: int) -> None:
        """Does nothing."""


Curve = tuple[Floats, Floats]


def _rows(path: Path) -> Iterator[dict[str, str]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        yield from csv.DictReader(file)


def _curves(path: Path, axis: str) -> dict[str, Curve]:
    found = dict[str, list[tuple[float, float]]]()
    for row in _rows(path):
        found.setdefault(row["layer"], []).append((float(row[axis]), float(row["time_us"])))
    return {
        name: (np.array([x for x, _ in sorted(points)]), np.array([y for _, y in sorted(points)]))
        for name, points in found.items()
    }


def _at(curve: Curve, x: float) -> float:
    return float(np.interp(x, *curve))


class _Attention:
    """Microseconds of one layer's attention in a step."""

    def __init__(self, rows: Sequence[dict[str, str]]) -> None:
        points = {
            tuple(int(row[name]) for name in ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")): float(
                row["time_us"]
            )
            for row in rows
        }
        self._decode = _Grid({(n, kv): us for (chunk, _, n, kv), us in points.items() if not chunk})
        self._prefill = _Grid({(chunk, kv): us for (chunk, kv, n, _), us in points.items() if not n})
        self._mixed = _Grid({key: us for key, us in points.items() if key[0] and key[2]})

    def us(self, shape: StepShape) -> float:
        """Several chunks count as equal ones with the same pairs; all but the first take what they take alone."""
        rows, decodes = shape.tokens - shape.decodes, shape.decodes
        context = shape.decode_kv_tokens / decodes if decodes else 0.0
        if not rows:
            return self._decode((decodes, context)) if decodes else 0.0
        chunk = rows / shape.prefills
        before = max(0.0, shape.prefill_pairs / rows - (chunk + 1) / 2)
        alone = self._prefill((chunk, before))
        others = (shape.prefills - 1) * alone
        return others + (self._mixed((chunk, before, decodes, context)) if decodes else alone)


class _Grid:
    """Multilinear interpolation on a complete grid; beyond its edges the outermost cell goes on in straight lines, but
    never below half of the nearest value."""

    def __init__(self, points: dict[tuple[int, ...], float]) -> None:
        self._axes = [np.array(sorted(set(column)), dtype=float) for column in zip(*points, strict=True)]
        places = [{int(x): i for i, x in enumerate(axis)} for axis in self._axes]
        self._values = np.full([len(axis) for axis in self._axes], np.nan)
        for key, us in points.items():
            self._values[tuple(place[x] for place, x in zip(places, key, strict=True))] = us
        assert not np.isnan(self._values).any(), "a table with holes"

    def __call__(self, at: tuple[float, ...]) -> float:
        cells, shares = list[int](), list[float]()
        for axis, x in zip(self._axes, at, strict=True):
            cell = int(np.clip(np.searchsorted(axis, x) - 1, 0, len(axis) - 2))
            cells.append(cell)
            shares.append((x - axis[cell]) / (axis[cell + 1] - axis[cell]))
        total = 0.0
        for corner in product((0, 1), repeat=len(cells)):
            weight = float(np.prod([share if up else 1 - share for share, up in zip(shares, corner, strict=True)]))
            total += weight * float(self._values[tuple(cell + up for cell, up in zip(cells, corner, strict=True))])
        ends = (cell + round(min(1.0, max(0.0, share))) for cell, share in zip(cells, shares, strict=True))
        nearest = self._values[tuple(ends)]
        return max(total, 0.5 * float(nearest))


# --- the run ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figures:
    """Seconds; tokens per second."""

    ttft_mean: float
    ttft_p50: float
    ttft_p99: float
    tpot_mean: float
    tpot_p50: float
    tpot_p99: float
    output_rate: float


def published(run: Path) -> tuple[Workload, list[RequestTimes]]:
    """What arrived, and what vLLM made of it: first and last token of each request, evenly spread between them."""
    lines = [json.loads(line) for line in (run / "requests.jsonl").read_text().splitlines()]
    origin = min(line["queued_ts"] for line in lines)
    lines.sort(key=lambda line: line["queued_ts"])
    requests = [WorkloadRequest(line["queued_ts"] - origin, line["input_toks"], line["output_toks"]) for line in lines]
    return Workload(requests, name="ShareGPT, 300 requests"), [_times(line, origin) for line in lines]


def _times(line: dict[str, float], origin: float) -> RequestTimes:
    first, last = ((line[name] - origin) * 1e9 for name in ("first_token_ts", "last_token_ts"))
    tokens = np.linspace(first, last, int(line["output_toks"])).astype(int).tolist()
    return RequestTimes(round((line["queued_ts"] - origin) * 1e9), tokens, tokens[-1], int(line["input_toks"]))


def figures(requests: Sequence[RequestTimes]) -> Figures:
    found: LoadSummary = summarise_load(requests)
    assert found.ttft is not None
    assert found.tpot is not None
    return Figures(
        found.ttft.mean, found.ttft.p50, found.ttft.p99, found.tpot.mean, found.tpot.p50, found.tpot.p99,
        found.output_rate,
    )  # fmt: skip


def simulated(made: Workload, cost: CostModel, host_ns: int) -> tuple[Simulation, Figures]:
    """With vLLM's settings: whole budget for prompts, and no blocks kept back at admission."""
    settings = SchedulerSettings(
        (2588,), max_num_seqs=256, max_num_batched_tokens=2048, max_model_len=32768, chunking="tokens=2048",
        admission="fcfs",
    )  # fmt: skip
    run = simulate(made, Open(), [ReplicaSpec(settings, cost, host_ns=host_ns)], prefix_caching=False)
    times = [
        RequestTimes(one.due_ns, one.token_ns, one.ended_ns or 0, made.requests[one.number].input_tokens)
        for one in run.requests
    ]
    return run, figures(times)


def request_errors(run: Simulation, real: Sequence[RequestTimes]) -> tuple[float, float]:
    """Median relative error of single requests: of TPOT, and of the time to the last token."""
    pairs = [(RequestTimes(one.due_ns, one.token_ns, 0), real[one.number]) for one in run.requests]
    tpot = [abs(ours.tpot_s / theirs.tpot_s - 1) for ours, theirs in pairs if ours.tpot_s and theirs.tpot_s]
    e2e = [abs(ours.e2e_s / theirs.e2e_s - 1) for ours, theirs in pairs if ours.e2e_s and theirs.e2e_s]
    return median(tpot), median(e2e)


@dataclass(frozen=True)
class Prediction:
    """One simulation. Errors are relative to the run."""

    predicted_from: str
    figures: Figures
    errors: Figures
    request_tpot_error: float
    """Median over requests."""
    request_e2e_error: float
    preemptions: int


@dataclass(frozen=True)
class PublishedRun:
    """The result file."""

    command: str
    run: str
    measured: Figures
    predictions: tuple[Prediction, ...]


def predictions(data: Path) -> Iterator[tuple[str, CostModel]]:
    """Where step times come from, and the model."""
    roofline = RooflineModel(model_named("llama-3.1-8b"), hardware_named("rtx4090"))
    typical = typical_efficiency(roofline.arithmetic, without="rtx4090")
    yield "its kernel tables, interpolated", KernelTables(data / TABLES)
    yield "roofline, efficiency fitted to half of its kernels", StepTimes(roofline)
    yield "roofline, datasheet and typical efficiency", StepTimes(roofline.with_efficiency(typical))


def predicted(name: str, cost: CostModel, made: Workload, real: Sequence[RequestTimes]) -> Prediction:
    """Simulates, and compares with the run."""
    run, found = simulated(made, cost, 0)
    measured = asdict(figures(real))
    errors = Figures(**{key: value / measured[key] - 1 for key, value in asdict(found).items()})
    preemptions = run.replicas[0].counters.preemptions
    return Prediction(name, found, errors, *request_errors(run, real), preemptions)


def main() -> int:
    parser = ArgumentParser(description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument(
        "--data", type=Path, required=True, metavar="DIR", help="folder with the published tables (docs/validation.md)"
    )
    parser.add_argument("--out", type=Path, help="write here instead of to benchmarks/results")
    options = parser.parse_args()
    results.check_writable(options.out)
    made, real = published(options.data / RUN)
    found = tuple(predicted(name, cost, made, real) for name, cost in predictions(options.data))
    command = "python -m benchmarks.simulated_vllm --data DIR"
    result = PublishedRun(command, "vLLM 0.19, RTX 4090, Llama-3.1-8B bf16, 300 requests", figures(real), found)
    results.write(result, "simulated-vllm-rtx4090.json", options.out, quick=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
