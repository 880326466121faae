"""Markdown tables and plots of inter-token latency against its budget."""

from collections.abc import Iterator, Sequence

from benchmarks.itl import OURS
from benchmarks.machine import slug
from benchmarks.tables import Json, number, provenance, table
from twostep.bench.report.plot import Axis, LogAxis, circle, fitting_axis, line, text

COLOURS = {OURS: "#1f5fa8", "chunks": "#e08214", "OpenVINO": "#5aae61", "llama.cpp": "#b2182b"}
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 400, 60, 300, 24, 50


def itl(result: Json) -> str:
    """For each number of streams a table and the plot of each prompt's length."""
    parts = [provenance(result), f"`{result['model']}`, {result['threads']} threads."]
    for streams in sorted({point["streams"] for point in result["points"]}):
        parts.append(f"### {streams} streams")
        for tokens in sorted({point["prompt"] for point in result["points"] if point["streams"] == streams}):
            shown = _points(result, streams, tokens)
            parts += [f"**A prompt of {tokens} tokens arrives:**", _table(shown)]
            parts.append(f"![p99 ITL over TTFT]({plot_path(result, streams, tokens)})")
    parts += [f"* {one['name']}: {one['reason']}" for one in result["missing"]]
    return "\n\n".join(parts)


def _points(result: Json, streams: int, tokens: int) -> list[Json]:
    return [point for point in result["points"] if (point["streams"], point["prompt"]) == (streams, tokens)]


def _table(points: Sequence[Json]) -> str:
    head = [
        "setting", "decode step, ms", "budget, ms", "p99 ITL, ms", "max ITL, ms", "TTFT, ms", "steps", "late",
        "of these disturbed", "impossible",
    ]  # fmt: skip
    return table(head, [_row(point) for point in points])


def _row(point: Json) -> list[str]:
    budget, steps = point["budget_ms"], point["steps"]
    if budget is None and steps and steps["budget_ms"]:
        budget = steps["budget_ms"]
    kept = budget is not None and point["p99_ms"] <= budget
    p99 = f"**{number(point['p99_ms'])}**" if kept else number(point["p99_ms"])
    return [
        point["name"], number(point["decode_ms"]), "" if budget is None else number(budget), p99,
        number(point["max_ms"]), number(point["ttft_ms"]), *_steps(point),
    ]  # fmt: skip


def _steps(point: Json) -> list[str]:
    """Counts of steps with a part of the prompt; without a budget nothing is late."""
    steps = point["steps"]
    if not steps:
        return ["", "", "", ""]
    counts = [str(steps["late"]), str(steps["late_disturbed"]), str(steps["impossible"])]
    return [str(steps["steps"]), *(counts if steps["budget_ms"] else ["", "", ""])]


# --- plots ------------------------------------------------------------------------------------------------------------


def plot_path(result: Json, streams: int, tokens: int) -> str:
    return f"plots/itl-{streams}-{tokens}-{slug(result['machine']['cpu'])}.svg"


def plots(result: Json) -> Iterator[tuple[str, str]]:
    """SVG documents by path below docs."""
    for streams, tokens in sorted({(point["streams"], point["prompt"]) for point in result["points"]}):
        yield plot_path(result, streams, tokens), _plot(_points(result, streams, tokens), streams, tokens)


def _plot(points: Sequence[Json], streams: int, tokens: int) -> str:
    """TTFT of the newcomer across, p99 ITL of the streams up: nearer to the corner is better."""
    x = fitting_axis("TTFT of the prompt, ms", [point["ttft_ms"] for point in points])
    y = fitting_axis("p99 ITL of the streams, ms", [point["p99_ms"] for point in points])
    title = f"{streams} streams run, a prompt of {tokens} tokens arrives"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><title>{title}</title><rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    )
    return "\n".join([head, *_grid(x, y), *_dots(points, x, y), "</svg>"]) + "\n"


def _grid(x: Axis | LogAxis, y: Axis | LogAxis) -> Iterator[str]:
    for value in x.ticks():
        across = _across(x, value)
        yield line(across, TOP, across, HEIGHT - BOTTOM, 'stroke="#ddd"')
        yield text(across, HEIGHT - BOTTOM + 16, f"{value:g}", "middle")
    for value in y.ticks():
        down = _down(y, value)
        yield line(LEFT, down, WIDTH - RIGHT, down, 'stroke="#ddd"')
        yield text(LEFT - 6, down + 4, f"{value:g}", "end")
    yield text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, x.title, "middle")
    yield text(4, 14, y.title)


def _dots(points: Sequence[Json], x: Axis | LogAxis, y: Axis | LogAxis) -> Iterator[str]:
    """Numbered; the names are beside the plot."""
    for number_, point in enumerate(points, 1):
        colour = COLOURS["chunks" if point["name"].startswith("chunks") else point["engine"]]
        across, down = _across(x, point["ttft_ms"]), _down(y, point["p99_ms"])
        yield circle(across, down, 4, f'fill="{colour}"', point["name"])
        yield text(across + 6, down - 5, str(number_), "start", f'fill="{colour}"')
        yield text(WIDTH - RIGHT + 12, TOP + 16 * number_, f"{number_}  {point['name']}", "start", f'fill="{colour}"')


def _across(x: Axis | LogAxis, value: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * x.share(value)


def _down(y: Axis | LogAxis, value: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * y.share(value)
