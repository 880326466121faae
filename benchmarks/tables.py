"""Markdown tables of results; computes nothing but ratios."""

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.machine import BUSY_LIMIT

Json = dict[str, Any]
TIMES = "\N{MULTIPLICATION SIGN}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the first column is left-aligned, the others right-aligned."""
    lines = [head, [":--", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def provenance(result: Json) -> str:
    """Machine, date, commit and command of a result."""
    machine = result["machine"]
    commit = (machine["commit"] or "unknown")[:7] + (", modified" if machine["modified"] else "")
    busy = f" **Not quiet: others used {machine['busy']:.0%} of it.**" if machine["busy"] > BUSY_LIMIT else ""
    flags = ", ".join(machine["flags"])
    where = f"{machine['cpu']}, {machine['cores']} cores ({flags}), Linux {machine['kernel']}.{busy}"
    return f"{where} {machine['date'][:10]}, commit {commit}. `{result['command']}`"


def number(value: float) -> str:
    """Three significant digits; more only before the decimal point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def with_spread(rate: Json) -> str:
    return f"{number(rate['median'])} ({number(rate['min'])} to {number(rate['max'])})"


# ------------------------------------------------------------------------------------------------------------- peers


def peers(comparison: Json, *, spreads: bool) -> str:
    """Tokens per second of Twostep, of the others, and the ratio to the best of them."""
    ours, *others = comparison["engines"]
    engines = [engine["engine"] for engine in comparison["engines"]]
    head = [f"{comparison['model']}, tokens/s", *engines, "of the best other"]
    return table(head, [_peers_row(name, ours, others, spreads) for name in ours["tokens_per_s"]])


def _peers_row(name: str, ours: Json, others: list[Json], spreads: bool) -> list[str]:
    rates = [engine["tokens_per_s"][name] for engine in (ours, *others)]
    ratio = rates[0]["median"] / max(rate["median"] for rate in rates[1:])
    cells = [with_spread(rate) if spreads else number(rate["median"]) for rate in rates]
    return [name, *cells, f"**{ratio:.2f} {TIMES}**"]


def versions(comparison: Json) -> str:
    return "\n".join(f"* {e['engine']}: {e['version']}, `{e['file']}`" for e in comparison["engines"])


# ------------------------------------------------------------------------------------------------------------- model

PARTS = ("linear", "attention", "head", "sampling", "rest")
_PART_HEADS = tuple(f"{part}, ms" for part in PARTS)


def prefill(points: list[Json]) -> str:
    """Prefill table; times are of the whole prompt."""
    head = ["prefill", "tokens/s", *_PART_HEADS, "linear, % of int8 peak", "attention, % of FMA peak"]
    return table(head, [_prefill_row(point) for point in points])


def _prefill_row(point: Json) -> list[str]:
    name = str(point["context"])
    return [name, with_spread(point["tokens_per_s"]), *_parts(point), *_shares(point, "linear", "attention")]


def decode(points: list[Json]) -> str:
    """Decode table; times are of one step."""
    limits = ["linear, % of int8 peak", "attention, % of FMA peak", "bytes, % of bandwidth"]
    head = [f"batch {TIMES} context", "tokens/s", *_PART_HEADS, *limits]
    return table(head, [_decode_row(point) for point in points])


def _decode_row(point: Json) -> list[str]:
    name = f"{point['batch']} {TIMES} {point['context']}"
    return [name, with_spread(point["tokens_per_s"]), *_parts(point), *_shares(point, "linear", "attention", "memory")]


def _parts(point: Json) -> list[str]:
    return [f"{point['ms'][part]:.2f}" for part in PARTS]


def _shares(point: Json, *names: str) -> list[str]:
    return [f"{point[name]['share']:.0%}" for name in names]


def limits(found: Json) -> str:
    rows = [
        [f"int8 dot product, {found['isa']}", *_peak(found["int8_dot"], "GOP/s")],
        [f"fp32 FMA, {found['isa']}", *_peak(found["fp32_fma"], "GFLOP/s")],
    ]
    reads = [[f"read, {r['bytes'] / 1e6:.0f} MB", "", f"{number(r['bytes_per_s'] / 1e9)} GB/s"] for r in found["read"]]
    return table(["limit", "one core", f"{found['threads']} threads"], rows + reads)


def _peak(peak: Json, unit: str) -> list[str]:
    return [f"{number(peak[of] / 1e9)} {unit}" for of in ("one_core", "all_threads")]


def loading(found: Json) -> str:
    names = {
        "open_s": "file opened and checked",
        "tokenizer_s": "tokenizer",
        "executor_s": "weights repacked",
        "first_token_s": "first step, 32 tokens",
        "total_s": "load to first token",
        "command_s": "the command, from its start to its first byte",
    }
    return table(["loading", "s"], [[text, with_spread(found[name])] for name, text in names.items()])


def counters(found: Json) -> str:
    if found["missing"]:
        return f"Hardware counters: {found['missing']}."
    rows = [[event, str(found["prefill"][event]), str(found["decode"][event])] for event in found["prefill"]]
    return table(["counter", "prefill 512", "32 decode steps"], rows)


def model_line(model: Json) -> str:
    sizes = f"{model['file_bytes'] / 1e6:.1f} MB, {model['weight_bytes'] / 1e6:.1f} MB in memory as repacked"
    return f"`{model['file']}`: {sizes}, {model['kv_bytes_per_token']} B of KV cache a token."
