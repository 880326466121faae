"""A long prompt is cut into hundreds of chunks: for a person, neighbours that are alike become one line."""

from collections.abc import Iterable, Iterator
from typing import Any

Json = dict[str, Any]

BETWEEN = "between steps"
GAPS = (BETWEEN, "steps of others")
"""What lies between the chunks of one run; what lies around it keeps its own line."""
SUMMED = (
    "tokens", "computed_again_tokens", "others_tokens",
    "own_ns_estimated", "others_ns_estimated", "starved_ns_estimated",
)  # fmt: skip


def collapsed(lines: Iterable[Json]) -> Iterator[Json]:
    """The lines, but runs of chunks, limited by the same, as one with `chunks`: they and what is between them. Its time
    and parts are the sums, so that the lines still tile the whole."""
    run: list[Json] = []
    for line in lines:
        if run and not _goes_on(run, line):
            yield from _one(run)
            run = []
        if run or "reason" in line:
            run.append(line)
        else:
            yield line
    yield from _one(run)


def limit(chunk: Json) -> str:
    """The words begin with the limit; what a step was predicted to take differs from one to the next."""
    return str(chunk["reason"]).partition(",")[0]


def _goes_on(run: list[Json], line: Json) -> bool:
    if line["what"] in GAPS:
        return True
    return "reason" in line and (line["what"], limit(line)) == (run[0]["what"], limit(run[0]))


def _one(run: list[Json]) -> Iterator[Json]:
    """Gaps after the last chunk are not the run's."""
    last = max((place for place, line in enumerate(run) if "reason" in line), default=-1)
    chunks = [line for line in run[: last + 1] if "reason" in line]
    if len(chunks) > 1:
        yield _sum(run[: last + 1], chunks)
    else:
        yield from chunks
    yield from run[last + 1 :]


def _sum(run: list[Json], chunks: list[Json]) -> Json:
    parts: dict[str, int] = {}
    for line in run:
        for part, ns in line["parts_ns"].items():
            parts[part] = parts.get(part, 0) + ns
    return {
        "what": run[0]["what"],
        "start_ns": run[0]["start_ns"],
        "ns": sum(line["ns"] for line in run),
        "parts_ns": parts,
        "chunks": chunks,
        **{name: sum(chunk[name] for chunk in chunks) for name in SUMMED},
    }
