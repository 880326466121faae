"""Tables of `benchmarks.profile_steps`."""

from statistics import mean

from benchmarks.tables import TIMES, Json, provenance, table

_HEAD = (
    "operation", "arithmetic", "traffic", "prepare", "compute", "finish", "wait", "thread: work + wait", "over limit",
)  # fmt: skip


def profile(result: Json) -> str:
    """All points of one machine."""
    return f"### {result['model']}\n\n{provenance(result)}\n\n{points(result)}"


def points(result: Json) -> str:
    return "\n\n".join(map(_point, result["points"]))


def _point(point: Json) -> str:
    name = f"{point['streams']} {TIMES} {point['context']}" if point["streams"] else f"prompt of {point['context']}"
    rest = f"sampling {point['sampling_us']:.0f}, Python around {point['outside_us']:.0f}"
    memory = f"memory {point['read']['bytes_per_s'] / 1e9:.1f} GB/s"
    where = f"**{name}**: {point['step_us']:.0f} µs a step, of which {rest}; {memory}"
    rows = [_numbers(operation) for operation in point["operations"]]
    total = [sum(column) for column in zip(*[row for row, _ in rows], strict=True)]
    threads = [
        [sum(cell) for cell in zip(*column, strict=True)] for column in zip(*[by for _, by in rows], strict=True)
    ]
    names = [operation["name"] for operation in point["operations"]]
    lines = [_line(name, numbers, by) for name, (numbers, by) in zip(names, rows, strict=True)]
    return f"{where}\n\n{table(_HEAD, [*lines, _line('**all**', total, threads)])}"


def _numbers(operation: Json) -> tuple[list[float], list[list[float]]]:
    """Microseconds, means over the threads; and by thread, work and wait."""
    stages = operation["stages_us"].values()
    limits = [operation["arithmetic_us"], operation["traffic_us"]]
    work = [sum(by_stage) for by_stage in zip(*stages, strict=True)]
    by_thread = [[w, wait] for w, wait in zip(work, operation["wait_us"], strict=True)]
    wait = mean(operation["wait_us"])
    return [*limits, *map(mean, stages), wait, mean(work) + wait - max(limits)], by_thread


def _line(name: str, numbers: list[float], by_thread: list[list[float]]) -> list[str]:
    threads = ", ".join(f"{work:.0f} + {wait:.0f}" for work, wait in by_thread)
    *left, over = [f"{number:.0f}" for number in numbers]
    return [name, *left, threads, over]
