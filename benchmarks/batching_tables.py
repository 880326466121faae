"""Markdown tables and plots of what batching brings, and of Twostep beside other engines that serve."""

from benchmarks.machine import slug
from benchmarks.plot import Dot, scatter
from benchmarks.scheduler_tables import percent
from benchmarks.tables import TIMES, Json, number, provenance, table, with_spread

DIVIDED = "\N{DIVISION SIGN}"
PLOTS = "plots"
"""Folder of the plots, beside the page."""


def batching(result: Json) -> str:
    """All of our own baselines."""
    parts = [
        provenance(result),
        f"### Output lengths: continuous {DIVIDED} static batching",
        lengths(result["lengths"]),
        f"![ratio over the variation of output lengths]({plot_path(result, 'lengths')})",
        "### A long prompt arrives",
        stalls("chunks", result["chunking"]),
        f"![longest gap over the newcomer's time to first token]({plot_path(result, 'chunking')})",
        f"### Prefix cache: on {DIVIDED} off",
        prefixes(result["prefixes"]),
        f"### Memory: paged {DIVIDED} contiguous",
        paging(result["paging"]),
    ]
    return "\n\n".join(parts)


def lengths(points: list[Json]) -> str:
    drawn = ["output lengths", "mean", "deviation / mean", "longest"]
    head = [*drawn, "static, tokens/s", "continuous, tokens/s", "ratio"]
    return table(head, [_lengths_row(point) for point in points])


def _lengths_row(point: Json) -> list[str]:
    drawn = [number(point["mean"]), f"{point['variation']:.2f}", str(point["longest"])]
    return [point["lengths"], *drawn, with_spread(point["static"]), with_spread(point["continuous"]), ratio(point)]


def ratio(point: Json) -> str:
    """With its spread."""
    found = point["ratio"]
    return f"**{found['median']:.2f} {TIMES}** ({found['min']:.2f} to {found['max']:.2f})"


def stalls(first: str, points: list[Json]) -> str:
    head = [first, "gap before, ms", "longest gap, ms", "p99 gap, ms", "newcomer's TTFT, ms"]
    names = ("before_ms", "longest_ms", "p99_ms", "ttft_ms")
    return table(head, [[point["name"], *(with_spread(point["gaps"][name]) for name in names)] for point in points])


def prefixes(points: list[Json]) -> str:
    head = ["prompts share", "found", "off, prompt tokens/s", "on, prompt tokens/s", "ratio"]
    return table(head, [_prefix_row(point) for point in points])


def _prefix_row(point: Json) -> list[str]:
    shared = f"{point['shared']} of {point['prompt']} tokens"
    return [shared, f"{point['hit_rate']:.0%}", with_spread(point["off"]), with_spread(point["on"]), ratio(point)]


def paging(found: Json) -> str:
    head = ["KV memory", "requests at a time", "waste", "preemptions / admissions"]
    tokens = found["blocks"] * 16
    contiguous = [f"contiguous, {found['most_tokens']} tokens each", str(found["contiguous"])]
    paged = [f"blocks of 16 tokens, {tokens} in all", with_spread(found["paged"])]
    rows = [
        [*contiguous, percent(found["contiguous_waste"]), ""],
        [*paged, percent(found["paged_waste"]), percent(found["preempted"])],
        ["ratio", ratio(found), "", ""],
    ]
    return table(head, rows)


# ------------------------------------------------------------------------------------------------------------- peers


def peers(result: Json) -> str:
    """Throughput and stall of all engines of a run in which there were others."""
    found = result["peers"]
    versions = "\n".join(f"* {one['engine']}: {one['version']}, `{one['file']}`" for one in found["throughput"])
    tables = [throughput(found), stalls("engine", found["stalls"])]
    return "\n\n".join([provenance(result), *tables, versions])


def throughput(found: Json) -> str:
    """Twostep first; what it reaches of the best of the others."""
    ours, *others = found["throughput"]
    best = max(one["output_tokens_per_s"]["median"] for one in others)
    reached = f"**{ours['output_tokens_per_s']['median'] / best:.2f} {TIMES}**"
    head = [f"{found['requests']} requests, {found['outstanding']} at a time", "output tokens/s", "of the best other"]
    rates = [(one["engine"], with_spread(one["output_tokens_per_s"])) for one in (ours, *others)]
    return table(head, [[*rates[0], reached], *([*rate, ""] for rate in rates[1:])])


def main_rows(result: Json) -> str:
    """What the README shows: one line a claim."""
    widest = max(result["lengths"], key=lambda point: point["variation"])
    equal = min(result["lengths"], key=lambda point: point["variation"])
    none, most = result["prefixes"]
    rows = [
        [f"continuous {DIVIDED} static batching, output lengths {widest['lengths']}", ratio(widest)],
        [f"the same, output lengths {equal['lengths']}", ratio(equal)],
        [f"prefix cache on {DIVIDED} off, {most['hit_rate']:.0%} of the prompts found", ratio(most)],
        [f"the same, {none['hit_rate']:.0%} found", ratio(none)],
        [f"requests at a time in the same memory, paged {DIVIDED} contiguous", ratio(result["paging"])],
        *peers_rows(result["peers"]),
    ]
    return table([result["model"], "measured"], rows)


def peers_rows(found: Json | None) -> list[list[str]]:
    if found is None:
        return []
    ours, *others = found["throughput"]
    best = max(others, key=lambda one: one["output_tokens_per_s"]["median"])
    shown = [f"{one['engine']} {number(one['output_tokens_per_s']['median'])}" for one in (ours, best)]
    gaps = [f"{one['name']} {number(one['gaps']['longest_ms']['median'])}" for one in found["stalls"]]
    return [
        [f"{found['requests']} mixed requests, {found['outstanding']} at a time, output tokens/s", ", ".join(shown)],
        [f"longest gap of 4 streams while a prompt of {found['newcomer']} tokens arrives, ms", ", ".join(gaps)],
    ]


# ------------------------------------------------------------------------------------------------------------- plots


def plots(result: Json) -> dict[str, str]:
    """Each plot's text by its path from the page."""
    return {
        plot_path(result, "lengths"): lengths_plot(result),
        plot_path(result, "chunking"): chunking_plot(result),
    }


def plot_path(result: Json, name: str) -> str:
    return f"{PLOTS}/{name}-{slug(result['machine']['cpu'])}.svg"


def lengths_plot(result: Json) -> str:
    dots = [_ratio_dot(point) for point in result["lengths"]]
    titles = ("deviation / mean of the output lengths", f"continuous {DIVIDED} static, output tokens/s")
    return scatter("Continuous against static batching", *titles, dots, line_y=1.0)


def _ratio_dot(point: Json) -> Dot:
    found = point["ratio"]
    return Dot(point["variation"], found["median"], found["min"], found["max"], point["lengths"])


def chunking_plot(result: Json) -> str:
    titles = ("newcomer's time to first token, ms", "longest gap of the others, ms")
    return scatter("A prompt arrives while 4 streams decode", *titles, [_gap_dot(one) for one in result["chunking"]])


def _gap_dot(point: Json) -> Dot:
    longest = point["gaps"]["longest_ms"]
    return Dot(point["gaps"]["ttft_ms"]["median"], longest["median"], longest["min"], longest["max"], point["name"])
