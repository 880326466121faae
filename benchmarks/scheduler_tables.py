"""Markdown tables of what scheduling costs, with the targets beside it."""

from benchmarks.tables import Json, number, provenance, table, with_spread

STANDING_TARGET = (256, 100)
"""Sequences, and µs that a step in which they only decode may take."""
EVENT_TARGET_US = 20
HOST_TARGETS = {"SmolLM2": 0.03, "Qwen2.5-Coder-1.5B": 0.01}
"""Share of a decode step that may be no kernels, by the beginning of the model's name."""


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
    """With its spread."""
    return f"{share['median']:.1%} ({share['min']:.1%} to {share['max']:.1%})"
