"""Markdown tables and plots of batching and scheduling."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from benchmarks.machine import slug
from benchmarks.tables import TIMES, Json, number, provenance, table, with_spread
from twostep.bench.report.plot import Axis, axis, circle, line, text

DIVIDED = "\N{DIVISION SIGN}"
PLOTS = "plots"
"""Folder of the plots, beside the page."""


# --- scatter plots: points with a spread and a label; same input, same bytes ------------------------------------------

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 60, 150, 20, 50
"""Margins; the right one has room for labels."""


@dataclass(frozen=True)
class Dot:
    """A point with an error bar from `low` to `high`."""

    x: float
    y: float
    low: float
    high: float
    label: str


def scatter(title: str, x_title: str, y_title: str, dots: Sequence[Dot], line_y: float | None = None) -> str:
    """An SVG document. `line_y`: position of a dashed horizontal line."""
    x, y = axis(x_title, max(dot.x for dot in dots)), axis(y_title, max(dot.high for dot in dots))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><title>{escape(title)}</title><rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        *(_x_tick(x, value) for value in x.ticks()),
        *(_y_tick(y, value) for value in y.ticks()),
        text(_across(x, x.top / 2), HEIGHT - 12, x.title, "middle"),
        f'<g transform="rotate(-90 16 {_down(y, y.top / 2):.1f})">'
        f"{text(16, _down(y, y.top / 2), y.title, 'middle')}</g>",
    ]
    if line_y is not None:
        down = _down(y, line_y)
        parts.append(line(LEFT, down, WIDTH - RIGHT, down, 'stroke="#888" stroke-dasharray="4"'))
    parts += [_dot(x, y, dot) for dot in dots]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _dot(x: Axis, y: Axis, dot: Dot) -> str:
    across, down = _across(x, dot.x), _down(y, dot.y)
    bar = line(across, _down(y, dot.low), across, _down(y, dot.high), 'stroke="#1f5fa8" stroke-width="2"')
    return bar + circle(across, down, 4, 'fill="#1f5fa8"') + text(across + 8, down - 6, dot.label, "start")


def _x_tick(x: Axis, value: float) -> str:
    across = _across(x, value)
    grid = line(across, TOP, across, HEIGHT - BOTTOM, 'stroke="#ddd"')
    return grid + text(across, HEIGHT - BOTTOM + 16, f"{value:g}", "middle")


def _y_tick(y: Axis, value: float) -> str:
    down = _down(y, value)
    return line(LEFT, down, WIDTH - RIGHT, down, 'stroke="#ddd"') + text(LEFT - 6, down + 4, f"{value:g}", "end")


def _across(x: Axis, value: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * value / x.top


def _down(y: Axis, value: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / y.top


# --- batching ---------------------------------------------------------------------------------------------------------


def batching(result: Json) -> str:
    """Tables of our own baselines."""
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
    """A value with its spread."""
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
    """Throughput and stall of all engines, for a run with other engines."""
    found = result["peers"]
    versions = "\n".join(f"* {one['engine']}: {one['version']}, `{one['file']}`" for one in found["throughput"])
    tables = [throughput(found), stalls("engine", found["stalls"])]
    return "\n\n".join([provenance(result), *tables, versions])


def throughput(found: Json) -> str:
    """Twostep first, with its ratio to the best other engine."""
    ours, *others = found["throughput"]
    best = max(one["output_tokens_per_s"]["median"] for one in others)
    reached = f"**{ours['output_tokens_per_s']['median'] / best:.2f} {TIMES}**"
    head = [f"{found['requests']} requests, {found['outstanding']} at a time", "output tokens/s", "of the best other"]
    rates = [(one["engine"], with_spread(one["output_tokens_per_s"])) for one in (ours, *others)]
    return table(head, [[*rates[0], reached], *([*rate, ""] for rate in rates[1:])])


def main_rows(result: Json) -> str:
    """Rows for the README: one line per claim."""
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
    """SVG text of each plot by its path relative to the page."""
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


# --- scheduling -------------------------------------------------------------------------------------------------------

STANDING_TARGET = (256, 100)
"""Sequences, and target in µs for a step in which they only decode."""
EVENT_TARGET_US = 20
HOST_TARGETS = {"SmolLM2": 0.03, "Qwen2.5-Coder-1.5B": 0.01}
"""Target share of a decode step outside the kernels, by prefix of the model name."""


def scheduler(result: Json) -> str:
    parts = [provenance(result), standing(result["standing"]), events(result["events"]), host(result["host"])]
    return "\n\n".join(parts)


def standing(points: list[Json]) -> str:
    head = ["decoding", "chunks by", "µs a step", "p99, µs", "plan", "advance", "resolve", "at most, µs"]
    return table(head, [_standing_row(point) for point in points])


def _standing_row(point: Json) -> list[str]:
    sequences, target_us = STANDING_TARGET
    parts = [number(point["parts_us"][part]) for part in ("plan", "advance", "resolve")]
    times = [with_spread(point["us"]), number(point["p99_us"]["median"]), *parts]
    return [str(point["standing"]), point["chunking"], *times, str(target_us) if point["standing"] == sequences else ""]


def events(points: list[Json]) -> str:
    head = ["each request more that is", "beside decoding", "chunks by", "µs", "at most, µs"]
    return table(head, [_event_row(point) for point in points])


def _event_row(point: Json) -> list[str]:
    target = "" if point["event"] == "queued" else str(EVENT_TARGET_US)
    return [point["event"], str(point["standing"]), point["chunking"], with_spread(point["us"]), target]


def host(points: list[Json]) -> str:
    head = ["decode", "overlap", "ms a step", "not kernels", "outside the step", "at most"]
    return table(head, [_host_row(point) for point in points])


def _host_row(point: Json) -> list[str]:
    shares = [percent(point[name]) for name in ("outside_kernels", "outside_steps")]
    target = next((f"{share:.0%}" for name, share in HOST_TARGETS.items() if point["model"].startswith(name)), "")
    overlap = "on" if point["overlap"] else "off"
    return [f"{point['model']}, batch {point['batch']}", overlap, with_spread(point["step_ms"]), *shares, target]


def percent(share: Json) -> str:
    """A value with its spread."""
    return f"{share['median']:.1%} ({share['min']:.1%} to {share['max']:.1%})"
