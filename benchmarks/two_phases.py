"""Tables and drawings of docs/two-phases.md, computed by the code behind `twostep roofline`."""

from collections.abc import Iterator
from itertools import product

from benchmarks.tables import TIMES, Json, number, table
from twostep.cli.roofline import plotted
from twostep.core.cost import decode_shape
from twostep.perf.hardware import hardware_named
from twostep.perf.model_table import model_named
from twostep.perf.roofline import Phase, Question, Roofline
from twostep.perf.roofline_model import RooflineModel
from twostep.spec.memory import (
    kv_bytes_per_token,
    sequence_kv_bytes,
    sequences_that_fit,
    size_text,
    weights_bytes,
)
from twostep.spec.number_types import number_type

MODEL, DEVICE = "llama-2-7b", "a10"
DEVICES = ("t4", "a10", "l40s", "a100", "h100")
PROMPTS = (128, 350, 1024, 4096, 16384, 65536)
BATCHES = (1, 4, 16, 40, 64, 208, 512)


def answer(model: str, device: str, question: Question) -> Roofline:
    return Roofline(model_named(model), hardware_named(device), question)


def drawings() -> dict[str, str]:
    """SVG by path below docs."""
    one, many = Question(350, 150), Question(350, 150, 32)
    return {
        "plots/roofline-a10.svg": plotted([answer(MODEL, DEVICE, one)]),
        "plots/roofline-a10-batch.svg": plotted([answer(MODEL, DEVICE, many)]),
        "plots/roofline-devices.svg": plotted([answer(MODEL, device, one) for device in DEVICES]),
    }


def phases() -> str:
    """One request on one device, by kind of work."""
    found = answer(MODEL, DEVICE, Question(350, 150))
    head = ("", "operations", "bytes", "operations a byte", "limit", "roofline, ms", "expected, ms")
    rows = [
        [f"{phase.name}: {row.ideal.name}", *_amounts(row.ideal.work.operations, row.ideal.work.bytes),
         row.expected.bound, _ms(row.ideal.seconds), _ms(row.expected.seconds)]
        for phase in (found.prefill, found.decode)
        for row in phase.rows
        if row.expected.seconds > 0.001 * phase.expected_s
    ]  # fmt: skip
    whole = [_whole(phase) for phase in (found.prefill, found.decode)]
    return table(head, [*rows, *whole])


def _whole(phase: Phase) -> list[str]:
    limit = phase.largest.expected.bound
    amounts = _amounts(phase.operations, phase.bytes)
    return [f"**{phase.name}, whole step**", *amounts, limit, _ms(phase.ideal_s), _ms(phase.expected_s)]


def _amounts(operations: float, traffic: float) -> list[str]:
    intensity = f"{operations / traffic:.3g}" if operations else "-"
    return [f"{operations:.3g}" if operations else "-", f"{traffic:.3g}", intensity]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}"


def prompts() -> str:
    """What grows how with the prompt."""
    head = (
        "prompt tokens",
        "linear layers, ms",
        "attention, ms",
        "attention, % of the step",
        "first token, ms",
        "KV cache",
    )
    return table(head, map(_prompt_row, PROMPTS))


def _prompt_row(tokens: int) -> list[str]:
    model = "llama-3.1-8b"
    phase = answer(model, "a100", Question(tokens, 1)).prefill
    seconds = {row.ideal.name: row.expected.seconds for row in phase.rows}
    linear = seconds["projections"] + seconds["feed-forward"]
    attention = seconds["prefill attention"]
    kv = size_text(round(tokens * kv_bytes_per_token(model_named(model))))
    return [str(tokens), _ms(linear), _ms(attention), f"{attention / phase.expected_s:.0%}", _ms(phase.expected_s), kv]


def batches() -> str:
    """What a decode batch brings, and what it costs each stream."""
    head = ("batch", "linear layers, operations a byte", "attention, operations a byte", "step, ms", "tokens/s", "gain",
            "fits in 24 GB")  # fmt: skip
    return table(head, map(_batch_row, BATCHES))


def _batch_row(batch: int) -> list[str]:
    alone, found = (answer(MODEL, DEVICE, Question(350, 150, size)) for size in (1, batch))
    works = {row.ideal.name: row.ideal.work for row in found.decode.rows}
    rate = batch / found.decode.expected_s
    return [
        str(batch),
        f"{works['feed-forward'].intensity:.3g}",
        f"{works['decode attention'].intensity:.3g}",
        _ms(found.decode.expected_s),
        number(rate),
        f"{rate * alone.decode.expected_s:.1f} {TIMES}",
        "yes" if batch <= found.sequences else "no",
    ]


CHUNKS = (64, 128, 256, 512, 1024, 4096)


def chunks() -> str:
    """A prompt of 4096 tokens arrives while 16 sequences decode: what chunks cost it, and spare them."""
    head = (
        "tokens a chunk",
        "steps",
        "longest gap of the 16 streams, ms",
        "first token of the prompt, ms",
        "of that with one chunk",
    )
    whole = sum(_chunk_steps(4096))
    return table(head, [_chunk_row(size, whole) for size in CHUNKS])


def _chunk_row(size: int, whole: float) -> list[str]:
    steps = _chunk_steps(size)
    first = sum(steps)
    return [str(size), str(len(steps)), _ms(max(steps)), _ms(first), f"{first / whole:.2f} {TIMES}"]


def _chunk_steps(size: int) -> list[float]:
    """Seconds of each step of Llama-3.1-8B on an A100 until all 4096 tokens are computed."""
    roofline = RooflineModel(model_named("llama-3.1-8b"), hardware_named("a100"))
    load = decode_shape(16, 16 * 1000)
    shapes = [load.with_slice(start, size, int(start + size == 4096)) for start in range(0, 4096, size)]
    return [roofline.estimate(shape).expected_ns / 1e9 for shape in shapes]


def claims(results: list[Json]) -> str:
    """What is often said, with what these functions and our engine say instead."""
    one = answer(MODEL, DEVICE, Question(350, 150))
    rows = [*_memory_claims(one), *_time_claims(one), *_chunk_claims(), *_batch_claims(one, results)]
    return "\n".join(
        ["| often said | computed or measured |", "|---|---|", *(f"| {said} | {right} |" for said, right in rows)]
    )


def _memory_claims(one: Roofline) -> Iterator[tuple[str, str]]:
    count = sequences_that_fit(one.model, 24e9, 4096)
    yield (
        "1 MB of KV a token, Llama-2-7B in fp16",
        f"{size_text(round(one.kv_bytes_per_token))}: K and V, 2 bytes for each number",
    )
    yield (
        "4 GB of KV for 4096 tokens, hence 2 sequences in 24 GB",
        f"{size_text(round(sequence_kv_bytes(one.model, 4096)))}, hence {count} sequences by arithmetic",
    )


def _time_claims(one: Roofline) -> Iterator[tuple[str, str]]:
    times = one.times(one.ideal)
    intensity = next(row.ideal.work.intensity for row in one.prefill.rows if row.ideal.name == "feed-forward")
    yield (
        "a decode step moves 2 x parameters x 2 bytes",
        f"{one.weights_bytes / 1e9:.1f} GB of weights, once: {_ms(one.decode.ideal_s)} ms on an A10, KV included",
    )
    yield (
        "150 tokens take TTFT + 150 x ITL",
        f"TTFT + 149 x ITL: {_ms(times.ttft_s)} ms + 149 x {_ms(times.itl_s)} ms = {times.e2e_s:.2f} s, same device",
    )
    yield (
        "prefill has 62 operations a byte, so that memory limits it on an A10 (ridge point 208)",
        f"that is one unfused head of attention; linear layers have {intensity:.0f} with 350 tokens",
    )


def _chunk_claims() -> Iterator[tuple[str, str]]:
    longer = sum(_chunk_steps(256)) / sum(_chunk_steps(4096))
    yield (
        "the first chunk of a prompt gives the first token, so that small chunks make it earlier",
        f"the last one does: 16 chunks of 256 tokens take {longer:.2f} times as long as one of 4096",
    )


def _batch_claims(one: Roofline, results: list[Json]) -> Iterator[tuple[str, str]]:
    crowd = answer(MODEL, DEVICE, Question(350, 150, one.sequences))
    gain = one.sequences * one.decode.expected_s / crowd.decode.expected_s
    yield (
        "batching gives 20 times the throughput",
        f"{gain:.1f} times on an A10 at {one.sequences} requests, computed; "
        f"{_measured_gain(results)} on our CPU at 16, measured",
    )


def _measured_gain(results: list[Json]) -> str:
    rates = results[0]["models"][0]["engines"][0]["tokens_per_s"]
    one, many = (rates[f"decode, batch {batch}, context 128"]["median"] for batch in (1, 16))
    return f"{many / one:.1f} times"


def sizes() -> str:
    """Weights and KV of models in several types, in 24 GB."""
    head = ("model", "weights", "KV", "weights take", "KV of a token", "requests of 4096 tokens in 24 GB")
    names = ("llama-2-7b", "llama-3.1-8b", "mistral-7b-v0.1", "qwen3-30b-a3b", "gpt-oss-20b")
    types = (("fp16", "fp16"), ("int4", "fp16"), ("int4", "fp8"))
    return table(head, [_size_row(name, *kinds) for name, kinds in product(names, types)])


def _size_row(name: str, weights: str, kv: str) -> list[str]:
    model = model_named(name).with_types(number_type(weights), number_type(kv))
    taken, each = weights_bytes(model), kv_bytes_per_token(model)
    return [name, weights, kv, f"{taken / 1e9:.1f} GB", size_text(round(each)),
            str(sequences_that_fit(model, 24e9, 4096)) if taken < 24e9 else "weights do not fit"]  # fmt: skip


def devices() -> str:
    head = (
        "device",
        "ridge point, op/B",
        "first token, ms",
        "between tokens, ms",
        "150 tokens, s",
        "J a token, TDP",
        "from",
    )
    return table(head, map(_device_row, DEVICES))


def _device_row(device: str) -> list[str]:
    found = answer(MODEL, device, Question(350, 150))
    real, ideal = found.times(found.expected), found.times(found.ideal)
    return [
        found.hardware.id,
        f"{found.ridge:.0f}",
        f"{_ms(real.ttft_s)} ({_ms(ideal.ttft_s)})",
        f"{_ms(real.itl_s)} ({_ms(ideal.itl_s)})",
        f"{real.e2e_s:.3g} ({ideal.e2e_s:.3g})",
        f"{found.joules_per_token:.3g}",
        found.origin,
    ]


def measured(results: list[Json]) -> str:
    """Our own engine: tokens per second of both phases on the CPUs in the result files."""
    names = (
        "prefill 512",
        "decode, batch 1, context 128",
        "decode, batch 4, context 128",
        "decode, batch 16, context 128",
    )
    head = ("measured, SmolLM2-135M, Twostep, tokens/s", "prefill 512", "decode 1", "batch 4", "batch 16", "gain of 16")
    rows = []
    for result in results:
        rates = result["models"][0]["engines"][0]["tokens_per_s"]
        found = [rates[name]["median"] for name in names]
        rows.append([result["machine"]["cpu"], *map(number, found), f"{found[3] / found[1]:.1f} {TIMES}"])
    return table(head, rows)
