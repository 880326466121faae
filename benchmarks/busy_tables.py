"""A Markdown table of decode rates beside busy loops."""

from benchmarks.busy import ALL_THREADS, ONE_THREAD
from benchmarks.tables import TIMES, Json, number, provenance, table, with_spread

GAP = "—"


def busy(result: Json) -> str:
    """The table, who was compared, and on which machine."""
    names = [one["name"] for one in result["contenders"]]
    head = ["busy loops", *(_title(name, result["threads"]) for name in names)]
    head += ["of the better number of threads", "fair share", "of the fair share"]
    alone = next((point for point in result["points"] if point["loops"] == 0), None)
    rows = [_row(point, alone, names) for point in result["points"]]
    return "\n\n".join([_how(result), table(head, rows), _contenders(result), provenance(result)])


def _title(name: str, threads: int) -> str:
    return name if name == ONE_THREAD else f"{name}, {threads} thread{'s' if threads > 1 else ''}"


def _how(result: Json) -> str:
    return (
        f"One stream, {result['tokens']} tokens after {result['context']}, in tokens/s; median of {result['runs']} "
        "runs in turn, and the least and greatest."
    )


def _row(point: Json, alone: Json | None, names: list[str]) -> list[str]:
    rates = point["tokens_per_s"]
    cells = [with_spread(rates[name]) if name in rates else GAP for name in names]
    return [str(point["loops"]), *cells, _of_the_better(rates), *_of_the_share(point, alone)]


def _of_the_better(rates: Json) -> str:
    """Nothing to compare with where there is one thread at most."""
    if ONE_THREAD not in rates:
        return GAP
    ours, one = rates[ALL_THREADS]["median"], rates[ONE_THREAD]["median"]
    return f"**{ours / max(ours, one):.2f} {TIMES}**"


def _of_the_share(point: Json, alone: Json | None) -> list[str]:
    """The fair share in tokens/s, and what was reached of it."""
    if alone is None:
        return [GAP, GAP]
    fair = alone["tokens_per_s"][ALL_THREADS]["median"] * point["fair_share"]
    return [number(fair), f"**{point['tokens_per_s'][ALL_THREADS]['median'] / fair:.2f} {TIMES}**"]


def _contenders(result: Json) -> str:
    lines = [f"* {one['name']}: {one['version']}, `{one['file']}`" for one in result["contenders"]]
    if not any(one["name"].startswith("llama.cpp") for one in result["contenders"]):
        lines.append("* llama.cpp was not measured in this run.")
    return "\n".join(lines)
