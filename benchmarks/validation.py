"""`python -m benchmarks.validation`: predictions of `twostep.perf` against kernels and steps that others measured.

The measurements are published tables (docs/validation.md names them); this reads them from a folder, predicts every row
with the code that `twostep roofline` runs, and writes the errors. `--fit` first fits the efficiency factors that the
package ships to every second kernel, chosen by a hash of its shape; only the others count as validation.
"""

import argparse
import csv
import gzip
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import groupby, pairwise
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray

from benchmarks.measurement import say
from benchmarks.results import FOLDER, write
from twostep.core.cost import StepShape
from twostep.errors import TwostepError
from twostep.perf.hardware import Hardware, hardware_named
from twostep.perf.model_table import model_named
from twostep.perf.roofline_model import (
    Efficiency,
    KindTime,
    RooflineModel,
    decode_shape_of,
    efficiency_of,
    prefill_shape,
    typical_efficiency,
)
from twostep.perf.step_work import StepWork, Work, matrix_work, step_work
from twostep.spec.model_spec import Matrix, ModelSpec
from twostep.spec.number_types import number_type
from twostep.spec.shape import ModelShape

EFFICIENCY_FILE = Path("src/twostep/perf/data/efficiency.csv")
SYSTEMS = {
    "a100_sxm": "a100-80-sxm",
    "h100_sxm": "h100-sxm",
    "h200_sxm": "h200-sxm",
    "b200_sxm": "b200",
    "gb200": "gb200",
    "l40s": "l40s",
    "rtx_pro_6000_server": "rtxpro6000",
}
"""The names of AIConfigurator's tables, and ours."""
NUMBERS = {"bfloat16": "bf16", "fp8": "fp8", "nvfp4": "fp4"}
"""Of its types of matrix products; block-scaled fp8 is left out."""
LAYER = 1024
"""Matrices with at least so many rows and columns count as of layer size."""
KINDS = ("GEMM", "prefill attention", "decode attention")

Floats = NDArray[np.float64]
Pairs = list[tuple[float, float]]
"""Seconds, predicted and measured."""


@dataclass(frozen=True)
class Kernel:
    """One measured call: `kind` of `KINDS`, its work, and how long it took."""

    hardware: str
    arithmetic: str
    kind: str
    work: Work
    seconds: float
    fitted: bool
    """Used by `--fit`, so that it is no validation."""
    layer_size: bool = True


@dataclass(frozen=True)
class Errors:
    """How far predictions are from measurements: relative errors, signed for the bias, which is their median."""

    table: str
    hardware: str
    predicted_from: str
    rows: int
    median: float
    p95: float
    bias: float
    target: float | None = None
    """The largest median error that was aimed at."""


@dataclass(frozen=True)
class ValidationResult:
    command: str
    errors: list[Errors]
    efficiency: list[dict[str, str]]


def errors(table: str, hardware: str, origin: str, pairs: Pairs, target: float | None = None) -> Errors:
    """Of pairs (predicted, measured)."""
    signed = np.array([predicted / measured - 1 for predicted, measured in pairs])
    sizes = np.abs(signed)
    return Errors(
        table, hardware, origin, len(pairs), float(np.median(sizes)), float(np.quantile(sizes, 0.95)),
        float(np.median(signed)), target,
    )  # fmt: skip


# --- kernels ----------------------------------------------------------------------------------------------------------


def read(path: Path) -> Iterator[dict[str, str]]:
    """Rows of a CSV file, which may be compressed."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        yield from csv.DictReader(file)


def for_fit(*shape: object) -> bool:
    """Half of all shapes, the same on every machine; a shape is on one side for all devices."""
    return blake2b(repr(shape).encode(), digest_size=1).digest()[0] % 2 == 0


def gemms(data: Path) -> Iterator[Kernel]:
    for row in read(data / "aiconfigurator/gemm_vllm_ms.csv.gz"):
        if row["gemm_dtype"] in NUMBERS:
            kind = number_type(NUMBERS[row["gemm_dtype"]])
            m, n, k = (int(row[field]) for field in ("m", "n", "k"))
            work = matrix_work(Matrix("", k, n), kind, m)
            seconds = float(row["latency_ms"]) / 1e3
            yield Kernel(SYSTEMS[row["system"]], kind.arithmetic[0], "GEMM", work, seconds, for_fit(m, n, k),
                         min(n, k) >= LAYER)  # fmt: skip


def one_layer(row: dict[str, str]) -> ModelSpec:
    """A model of one layer whose attention is that of the row."""
    heads, kv_heads, head_dim = (int(row[field]) for field in ("num_heads", "num_key_value_heads", "head_dim"))
    return ModelSpec("", ModelShape("", 1, heads * head_dim, heads, kv_heads, head_dim, 1, 1, 1 << 20))


def attentions(data: Path) -> Iterator[Kernel]:
    tables: list[tuple[str, str, str, Callable[[int, int], StepShape], Callable[[StepWork], Work]]] = [
        ("context", "isl", "prefill attention", prefill_shape, lambda work: work.prefill_attention),
        ("generation", "kv_len", "decode attention", decode_shape_of, lambda work: work.decode_attention),
    ]
    for name, length, kind, shape_of, part in tables:
        for row in read(data / f"aiconfigurator/{name}_attention_vllm_ms.csv.gz"):
            if row["kv_cache_dtype"] != "bfloat16" or (row[length] == "1" and kind == KINDS[1]):
                continue
            shape = shape_of(int(row[length]), int(row["batch_size"]))
            work, where = part(step_work(one_layer(row), shape)), list(row.values())[3:-1]
            seconds = float(row["latency_ms"]) / 1e3
            yield Kernel(SYSTEMS[row["system"]], "fp16", kind, work, seconds, for_fit(*where))


RTX4090 = "llmservingsim/kernel_profiles/RTX4090_meta-llama_Llama-3.1-8B_bf16_tp1"


def rtx4090_kernels(data: Path) -> Iterator[Kernel]:
    """The kernels of one layer of Llama-3.1-8B; attention without prefill and decode in one call."""
    model = model_named("llama-3.1-8b")
    sizes = {matrix.name: matrix for matrix in model.matrices}
    names = {"qkv_proj": "qkv", "o_proj": "output", "gate_up_proj": "up", "down_proj": "down"}
    for row in read(data / RTX4090 / "dense.csv.gz"):
        if row["layer"] in names:
            work = matrix_work(sizes[names[row["layer"]]], model.weight_type, int(row["tokens"]))
            yield _rtx4090("GEMM", work, row, for_fit(row["layer"], row["tokens"]))
    layer = replace(model, shape=replace(model.shape, layers=1))
    for row in read(data / RTX4090 / "attention.csv.gz"):
        chunk, before, decodes, context = (int(row[field]) for field in list(row)[:4])
        if chunk and not decodes and before + chunk > 1:
            work = step_work(layer, StepShape().with_slice(before, chunk, 1)).prefill_attention
            yield _rtx4090(KINDS[1] if chunk > 1 else KINDS[2], work, row, for_fit(chunk, before))
        elif decodes and not chunk:
            work = step_work(layer, decode_shape_of(context, decodes)).decode_attention
            yield _rtx4090(KINDS[2], work, row, for_fit(decodes, context))


def _rtx4090(kind: str, work: Work, row: dict[str, str], fitted: bool) -> Kernel:
    return Kernel("rtx4090", "fp16", kind, work, float(row["time_us"]) / 1e6, fitted)


def predicted(kernel: Kernel, hardware: Hardware, share: Efficiency) -> float:
    """Seconds that the cost model expects of the kernel."""
    shares, constant = (share.linear, share.bandwidth), share.kernel_s
    if kernel.kind != "GEMM":
        read = share.prefill_kv if kernel.kind == "prefill attention" else share.decode_attention
        shares, constant = (share.prefill_attention, read), share.attention_kernel_s
    return KindTime.of(kernel.kind, kernel.work, hardware, kernel.arithmetic, shares, constant).seconds


# --- fit --------------------------------------------------------------------------------------------------------------


def fitted(kernels: Sequence[Kernel]) -> list[dict[str, str]]:
    """Rows of the efficiency file, from those kernels that are for the fit."""
    found = []
    used = sorted((one for one in kernels if one.fitted and one.layer_size), key=lambda one: one.hardware)
    for device, group in groupby(used, key=lambda one: one.hardware):
        mine, hardware = list(group), hardware_named(device)
        attention = _attention_shares(mine, hardware)
        for arithmetic in sorted({one.arithmetic for one in mine}):
            products = [one for one in mine if one.kind == "GEMM" and one.arithmetic == arithmetic]
            linear, bandwidth, kernel_s = _shares(products, hardware, (None, None, None))
            share = Efficiency(linear, bandwidth, *attention[:3], kernel_s, attention[3])
            held_out = [one for one in kernels if not one.fitted and one.layer_size and one.kind == "GEMM"
                        and (one.hardware, one.arithmetic) == (device, arithmetic)]  # fmt: skip
            margin = errors("", "", "", [(predicted(one, hardware, share), one.seconds) for one in held_out]).p95
            found.append(_efficiency_row(device, arithmetic, share._replace(margin=margin), len(products)))
    return found


def _efficiency_row(device: str, arithmetic: str, share: Efficiency, kernels: int) -> dict[str, str]:
    numbers = {field: f"{value:.4g}" for field, value in zip(Efficiency._fields[:-1], share[:-1], strict=True)}
    return {"hardware": device, "arithmetic": arithmetic, **numbers, "kernels": str(kernels)}


def _attention_shares(kernels: Sequence[Kernel], hardware: Hardware) -> tuple[float, float, float, float]:
    """Prefill's shares of peak and bandwidth, decode's share of bandwidth, and the constant, which both have in common
    and decode gives."""
    decode = [one for one in kernels if one.kind == "decode attention"]
    prefill = [one for one in kernels if one.kind == "prefill attention"]
    _, bandwidth, constant = _shares(decode, hardware, (1.0, None, None))
    arithmetic, prefill_kv, _ = _shares(prefill, hardware, (None, None, constant))
    return arithmetic, min(bandwidth, prefill_kv), bandwidth, constant


Known = tuple[float | None, float | None, float | None]


def _shares(kernels: Sequence[Kernel], hardware: Hardware, known: Known) -> tuple[float, float, float]:
    """Share of the peak, share of the bandwidth and constant with the least mean |log(predicted / measured)|; `known`
    ones are kept. Pattern search in the logarithms: halves its steps until they are below 0.5 %."""
    ideal = np.array([one.work.operations / hardware.peak(one.arithmetic) for one in kernels])
    moved = np.array([one.work.bytes / hardware.bandwidth for one in kernels])
    measured = np.array([one.seconds for one in kernels])

    def loss(x: Floats) -> float:
        linear, bandwidth, constant = np.exp(x)
        times = np.maximum(ideal / linear, moved / bandwidth) + constant
        return float(np.mean(np.abs(np.log(times / measured))))

    start = [value or first for value, first in zip(known, (0.7, 0.7, 5e-6), strict=True)]
    free = [i for i, value in enumerate(known) if value is None]
    linear, bandwidth, constant = np.exp(_least(loss, np.log(np.array(start)), free))
    return min(1.0, float(linear)), min(1.0, float(bandwidth)), float(constant)


def _least(loss: Callable[[Floats], float], x: Floats, free: Sequence[int]) -> Floats:
    best, step = loss(x), 0.5
    while step > 0.005:
        moves = [x + sign * step * np.eye(len(x))[i] for i in free for sign in (1, -1)]
        nearest = min(moves, key=loss)
        if loss(nearest) < best:
            x, best = nearest, loss(nearest)
        else:
            step /= 2
    return x


# --- kernels that were not fitted -------------------------------------------------------------------------------------


def kernel_errors(kernels: Iterable[Kernel]) -> Iterator[Errors]:
    """By device, kind and arithmetic: with the device's own shares, and from its datasheet with those of the others."""

    def place(one: Kernel) -> tuple[str, str, str]:
        return one.kind, one.hardware, one.arithmetic

    for (kind, device, arithmetic), group in groupby(sorted((k for k in kernels if not k.fitted), key=place), place):
        rows, hardware = [one for one in group if one.layer_size], hardware_named(device)
        label = f"{kind}, {arithmetic}"
        own, others = efficiency_of(hardware, arithmetic), typical_efficiency(arithmetic, without=device)
        for share, target in ((own, None), (others, 0.3)):
            pairs = [(predicted(one, hardware, share), one.seconds) for one in rows]
            yield errors(label, device, share.origin, pairs, target)


# --- layers: Vidur ----------------------------------------------------------------------------------------------------

VIDUR_MODELS = {
    "meta-llama/Llama-2-7b-hf": "llama-2-7b",
    "meta-llama/Llama-2-70b-hf": "llama-2-70b",
    "codellama/CodeLlama-34b-Instruct-hf": "codellama-34b",
    "meta-llama/Meta-Llama-3-8B": "llama-3-8b",
    "meta-llama/Meta-Llama-3-70B": "llama-3-70b",
}
VIDUR_DEVICES = {"a100": "a100-80-sxm", "h100": "h100-sxm", "a40": "a40"}
VIDUR_LINEAR = ("attn_pre_proj_ms", "attn_post_proj_ms", "mlp_up_proj_ms", "mlp_down_proj_ms")


def layer_errors(data: Path) -> Iterator[Errors]:
    """The linear layers of one layer of five models, on 1, 2, 4 or 8 devices, 1 to 4096 tokens."""
    rows = [row for row in read(data / "vidur/mlp_median_ms.csv.gz") if row["model"] in VIDUR_MODELS]
    for name, device in VIDUR_DEVICES.items():
        mine, hardware = [row for row in rows if row["device"] == name], hardware_named(device)
        for share in _predictions(hardware, "fp16"):
            pairs = [pair for row in mine if (pair := _layer_pair(row, hardware, share))]
            yield errors("linear layers of one layer, Vidur", device, share.origin, pairs, _target(share))


def _predictions(hardware: Hardware, arithmetic: str) -> list[Efficiency]:
    own, others = efficiency_of(hardware, arithmetic), typical_efficiency(arithmetic, without=hardware.id)
    return [own, others] if own.origin == "measured" else [others]


def _target(share: Efficiency) -> float | None:
    return 0.3 if share.origin == "datasheet" else None


def _layer_pair(row: dict[str, str], hardware: Hardware, share: Efficiency) -> tuple[float, float] | None:
    if not all(row[field] for field in VIDUR_LINEAR):
        return None
    model, devices = model_named(VIDUR_MODELS[row["model"]]), int(row["tp"])
    expected = 0.0
    for matrix in model.matrices:
        inner = matrix.name in ("output", "down")
        part = matrix._replace(
            inputs=matrix.inputs // devices if inner else matrix.inputs,
            outputs=matrix.outputs if inner else matrix.outputs // devices,
        )
        work = matrix_work(part, model.weight_type, int(row["num_tokens"]))
        shares = (share.linear, share.bandwidth)
        expected += KindTime.of(matrix.name, work, hardware, "fp16", shares, share.kernel_s).seconds
    return expected, sum(float(row[field]) for field in VIDUR_LINEAR) / 1e3


# --- whole steps: vLLM ------------------------------------------------------------------------------------------------

RUNS = {"RTX4090__Llama-3.1-8B": ("rtx4090", "llama-3.1-8b"),
        "RTXPRO6000__Qwen3-30B-A3B-Instruct-2507": ("rtxpro6000", "qwen3-30b-a3b")}  # fmt: skip
FULL = 90.0
"""Percent of the KV cache."""


@dataclass(frozen=True)
class Tick:
    """One second of a vLLM run in which nothing but decoding happened: mean step, sequences and their context."""

    step_s: float
    running: int
    context: int
    full: bool
    """The KV cache was nearly full, so that requests were preempted and their prompts computed again, uncounted."""


def decode_ticks(run: Path) -> list[Tick]:
    """Seconds without prompt tokens in which few sequences ended; a step gives each running one a token."""
    rows = [{key: float(value) for key, value in row.items()} for row in read(run / "timeseries.csv")]
    requests = [json.loads(line) for line in (run / "requests.jsonl").read_text().splitlines()]
    began = min(request["queued_ts"] for request in requests)
    found = []
    for before, row in pairwise(rows):
        calm = not row["prompt_throughput"] and not before["prompt_throughput"]
        running = (row["running"] + before["running"]) / 2
        ended = abs(row["running"] - before["running"])
        if calm and row["running"] > 0 and ended <= max(2, running / 10) and row["gen_throughput"]:
            context = _mean_context(requests, began + row["t"] - 0.5)
            if context is not None:
                full = max(before["kv_cache_pct"], row["kv_cache_pct"]) > FULL
                found.append(Tick(running / row["gen_throughput"], round(running), round(context), full))
    return found


def _mean_context(requests: Iterable[dict[str, float]], at: float) -> float | None:
    """Of the requests that decode then, as if each one's tokens came evenly."""
    contexts = []
    for request in requests:
        first, last = request["first_token_ts"], request["last_token_ts"]
        if first <= at < last:
            contexts.append(request["input_toks"] + request["output_toks"] * (at - first) / (last - first))
    return sum(contexts) / len(contexts) if contexts else None


def step_errors(data: Path) -> Iterator[Errors]:
    """Decode steps of vLLM 0.19 in bf16: a dense model on an RTX 4090, and one with experts on an RTX PRO 6000."""
    table = KernelTable(data)
    for run, (device, name) in RUNS.items():
        ticks, hardware = decode_ticks(data / "llmservingsim/vllm_runs" / run), hardware_named(device)
        for title, part in _parts(f"whole decode steps of {name}, vLLM", ticks):
            if device == "rtx4090":
                pairs = [(table.step_s(tick.running, tick.context), tick.step_s) for tick in part]
                yield errors(title, device, "its kernel tables, interpolated", pairs, 0.1)
            for share in _predictions(hardware, "fp16"):
                roofline = RooflineModel(model_named(name), hardware, share)
                yield errors(title, device, share.origin, _tick_pairs(roofline, part), _target(share) or 0.1)


def _parts(title: str, ticks: list[Tick]) -> Iterator[tuple[str, list[Tick]]]:
    """All, and those in which nothing was preempted, if they differ."""
    yield title, ticks
    calm = [tick for tick in ticks if not tick.full]
    if 0 < len(calm) < len(ticks):
        yield f"{title}, no preemptions", calm


def _tick_pairs(roofline: RooflineModel, ticks: Iterable[Tick]) -> Pairs:
    return [
        (roofline.estimate(decode_shape_of(tick.context, tick.running)).expected_ns / 1e9, tick.step_s)
        for tick in ticks
    ]


class KernelTable:
    """A decode step as the sum of measured kernels, each interpolated in tokens, sequences or context."""

    LAYER = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "rotary_emb", "act_fn", "layernorm", "layernorm")
    ONCE = ("embedding", "final_layernorm")

    def __init__(self, data: Path) -> None:
        self._dense = _curves(read(data / RTX4090 / "dense.csv.gz"), "layer", "tokens")
        self._once = _curves(read(data / RTX4090 / "per_sequence.csv.gz"), "layer", "sequences")
        rows = [row for row in read(data / RTX4090 / "attention.csv.gz") if row["prefill_chunk"] == "0"]
        self._attention = {int(n): curve for n, curve in _curves(rows, "n_decode", "kv_decode").items()}

    def step_s(self, running: int, context: int) -> float:
        """Seconds of a decode step of `running` sequences of `context` tokens each."""
        layer = sum(_at(self._dense[name], running) for name in self.LAYER)
        attention = [(n, _at(curve, context)) for n, curve in sorted(self._attention.items())]
        layer += _at(attention, running)
        once = sum(_at(self._dense[name], running) for name in self.ONCE)
        return (32 * layer + once + sum(_at(curve, running) for curve in self._once.values())) / 1e6


Curve = list[tuple[int, float]]


def _curves(rows: Iterable[dict[str, str]], name: str, axis: str) -> dict[str, Curve]:
    found = dict[str, Curve]()
    for row in rows:
        found.setdefault(row[name], []).append((int(row[axis]), float(row["time_us"])))
    return {key: sorted(curve) for key, curve in found.items()}


def _at(curve: Curve, x: float) -> float:
    return float(np.interp(x, [a for a, _ in curve], [b for _, b in curve]))


# --- whole phases: Splitwise, TensorRT-LLM ----------------------------------------------------------------------------

SPLITWISE_MODELS = {"llama2-70b": "llama-2-70b", "bloom-176b": "bloom"}
SPLITWISE_DEVICES = {"a100-80gb": "a100-80-sxm", "h100-80gb": "h100-sxm"}


def splitwise_errors(data: Path) -> Iterator[Errors]:
    """Prompt and token times of two models: the bare roofline, and with one constant per step for each model, device
    and degree of parallelism, which the points at batch 1 and 512 tokens give (they are not counted then)."""
    rows = [row for row in read(data / "splitwise-sim/perf_model.csv") if row["hardware"] in SPLITWISE_DEVICES]
    for phase, field in (("prompt", "prompt_time"), ("token", "token_time")):
        for name, device in SPLITWISE_DEVICES.items():
            hardware = hardware_named(device)
            mine = _medians([row for row in rows if row["hardware"] == name], field)
            for share in _predictions(hardware, "fp16"):
                bare, constant = _splitwise_pairs(mine, phase, hardware, share)
                title = f"{phase} time, Splitwise"
                yield errors(title, device, share.origin, bare, _target(share))
                yield errors(title, device, f"{share.origin} + a constant per step", constant, _target(share))


Setting = tuple[str, int, int, int, int]
"""Model, devices, prompt tokens, batch, output tokens."""


def _medians(rows: Iterable[dict[str, str]], field: str) -> dict[Setting, float]:
    """Seconds by setting, the median of its repeats."""
    found = dict[Setting, list[float]]()
    for row in rows:
        numbers = (int(row[key]) for key in ("tensor_parallel", "prompt_size", "batch_size", "token_size"))
        devices, prompt, batch, output = numbers
        found.setdefault((row["model"], devices, prompt, batch, output), []).append(float(row[field]) / 1e3)
    return {key: median(values) for key, values in found.items()}


def _splitwise_pairs(
    measured: dict[Setting, float], phase: str, hardware: Hardware, share: Efficiency
) -> tuple[Pairs, Pairs]:
    bare, with_constant = Pairs(), Pairs()
    by_pool = groupby(sorted(measured.items()), key=lambda item: item[0][:2])
    for (name, devices), group in by_pool:
        roofline = RooflineModel(model_named(SPLITWISE_MODELS[name]), hardware, share, tensor_parallel=devices)
        found = [(key, _phase_s(roofline, phase, key), seconds) for key, seconds in group]
        beyond = median(seconds - expected for key, expected, seconds in found if key[2:4] == (512, 1))
        for key, expected, seconds in found:
            bare.append((expected, seconds))
            if key[2:4] != (512, 1):
                with_constant.append((expected + max(0.0, beyond), seconds))
    return bare, with_constant


def _phase_s(roofline: RooflineModel, phase: str, setting: Setting) -> float:
    _, _, prompt, batch, output = setting
    middle = decode_shape_of(prompt + output // 2, batch)
    shape = prefill_shape(prompt, batch) if phase == "prompt" else middle
    return roofline.estimate(shape).expected_ns / 1e9


def first_token_errors(data: Path) -> Iterator[Errors]:
    """First tokens of TensorRT-LLM at batch 1, as published by NVIDIA: fp8 on H100 and L40S, fp16 on A100."""
    models = {"llama-7b": "llama-2-7b", "llama-70b": "llama-2-70b"}
    table = data / "trtllm-published/first_token_latency_bs1_v0.5.csv"
    rows = [row for row in read(table) if row["model"] in models]
    for device, group in groupby(sorted(rows, key=lambda row: row["gpu"]), key=lambda row: row["gpu"]):
        mine, hardware = list(group), hardware_named(device)
        for share in _predictions(hardware, mine[0]["precision"]):
            pairs = [(_first_token_s(row, models, hardware, share), float(row["ttft_ms"]) / 1e3) for row in mine]
            yield errors("first token, TensorRT-LLM", device, share.origin, pairs, _target(share))


def _first_token_s(row: dict[str, str], models: dict[str, str], hardware: Hardware, share: Efficiency) -> float:
    model = model_named(models[row["model"]]).with_types(weights=number_type(row["precision"]))
    roofline = RooflineModel(model, hardware, share, tensor_parallel=int(row["tp"]))
    return roofline.estimate(prefill_shape(int(row["input_len"]))).expected_ns / 1e9


# --- command ----------------------------------------------------------------------------------------------------------


def validate(data: Path, kernels: Sequence[Kernel]) -> ValidationResult:
    found = [
        *kernel_errors(kernels),
        *layer_errors(data),
        *step_errors(data),
        *splitwise_errors(data),
        *first_token_errors(data),
    ]
    return ValidationResult("python -m benchmarks.validation --data DIR", found, list(read(EFFICIENCY_FILE)))


def write_fit(kernels: Sequence[Kernel]) -> None:
    rows = fitted(kernels)
    with EFFICIENCY_FILE.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    say(f"wrote {EFFICIENCY_FILE}; run again without --fit to validate with it")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.validation", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="folder with the published tables")
    parser.add_argument("--fit", action="store_true", help="fit the shipped efficiency factors instead")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help=f"result file (default: {FOLDER.name}/validation-published.json)"
    )
    options = parser.parse_args()
    try:
        kernels = [*gemms(options.data), *attentions(options.data), *rtx4090_kernels(options.data)]
        if options.fit:
            write_fit(kernels)
        else:
            write(validate(options.data, kernels), "validation-published.json", options.out, quick=False)
    except (TwostepError, OSError) as error:
        print(f"benchmarks.validation: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
