"""Markdown tables that compare servers: the best value of a row is bold; rows in which Twostep is behind are marked."""

from collections.abc import Iterable, Sequence

from benchmarks.peers_serving import ROWS, Row
from benchmarks.tables import TIMES, Json, number, provenance, table, with_spread

NOTHING = ""
REASON_LENGTH = 80


def readme(result: Json) -> str:
    """One column per engine, but several for Twostep. Each row uses the best settings of the engine."""
    count = _ours(result)
    engines = list(dict.fromkeys(one["engine"] for one in result["columns"][count:]))
    groups = [[one] for one in result["columns"][:count]]
    groups += [[one for one in result["columns"][count:] if one["engine"] == engine] for engine in engines]
    heads = [*(one["name"] for one in result["columns"][:count]), *engines]
    return f"{_table(result, heads, groups, spreads=False)}\n\n{provenance(result)}"


def peers(result: Json) -> str:
    """One column per engine and settings, with the spread of the runs; versions and commands below."""
    columns = result["columns"]
    shown = _table(result, [one["name"] for one in columns], [[one] for one in columns], spreads=True)
    return "\n\n".join([provenance(result), shown, _commands(columns), *_reasons(result["missing"])])


def _table(result: Json, heads: Sequence[str], groups: Sequence[Sequence[Json]], *, spreads: bool) -> str:
    missing = result["missing"]
    head = [result["model"], *heads, *(one["name"] for one in missing), "of the best other"]
    rows = [_row(result, name, groups, spreads) for name in ROWS]
    for i, row in enumerate(rows):
        row[-1:-1] = [_short(one["reason"]) if i == 0 else NOTHING for one in missing]
    return table(head, rows)


def _row(result: Json, name: str, groups: Sequence[Sequence[Json]], spreads: bool) -> list[str]:
    row = ROWS[name]
    found = [_best(row, (one["rows"][name] for one in group if name in one["rows"])) for group in groups]
    best = _best(row, (one for one in found if one))
    cells = [_cell(one, spreads, bold=one is not None and one == best) for one in found]
    other = _best(row, filter(None, found[_ours(result) :]))
    return [row.text.format(**result["effort"]), *cells, _ratio_to_best(row, found[0], other)]


def _best(row: Row, values: Iterable[Json]) -> Json | None:
    def median(value: Json) -> float:
        return float(value["median"])

    return (max if row.better == "more" else min)(values, key=median, default=None)


def _cell(value: Json | None, spreads: bool, *, bold: bool) -> str:
    if value is None:
        return NOTHING
    text = number(value["median"])
    shown = f"**{text}**" if bold else text
    return with_spread(value).replace(text, shown, 1) if spreads and value["n"] > 1 else shown


def _ratio_to_best(row: Row, ours: Json | None, other: Json | None) -> str:
    """Ratio to the best other engine; below 1, Twostep is behind."""
    if ours is None or other is None:
        return NOTHING
    ratio = ours["median"] / other["median"]
    ratio = ratio if row.better == "more" else 1 / ratio
    return f"{ratio:.2f} {TIMES}" + ("" if ratio >= 1 else ", behind")


def _ours(result: Json) -> int:
    """Number of Twostep columns; the first has default settings."""
    return sum(one["engine"] == result["columns"][0]["engine"] for one in result["columns"])


def _commands(columns: Sequence[Json]) -> str:
    return "\n".join(f"* {one['name']}: {one['version']}. `{one['command']}`" for one in columns)


def _reasons(missing: Sequence[Json]) -> list[str]:
    return ["\n".join(f"* {one['name']}: {one['reason']}" for one in missing)] if missing else []


def _short(reason: str) -> str:
    shown = reason if len(reason) <= REASON_LENGTH else reason[: REASON_LENGTH - 1] + "\N{HORIZONTAL ELLIPSIS}"
    return shown.replace("|", "/")
