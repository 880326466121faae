"""A Markdown table of what load generators say of the same server under the same load."""

from benchmarks.tables import Json, provenance, table, with_spread

ROWS = {"ttft_ms": "TTFT", "tpot_ms": "TPOT (the others' ITL)", "e2e_ms": "E2E (request latency)"}


def clients(result: Json) -> str:
    load = result["load"]
    names = [" ".join(filter(None, (one["name"], one["version"]))) for one in result["clients"]]
    rows = [row for key, title in ROWS.items() for row in _rows(result["clients"], key, title)]
    how = (
        f"`twostep serve {result['model']}` without prefix cache, {load['streams']} streams, {load['requests']} "
        f"completions of {load['input_tokens']} prompt and {load['output_tokens']} answer tokens, {load['runs']} runs "
        "of each in turn. Means over requests, in ms; the median of the runs, and the least and greatest."
    )
    return "\n\n".join([how, table(["", *names], rows), provenance(result)])


def _rows(clients: list[Json], key: str, title: str) -> list[list[str]]:
    """What each says, and what the server says of the same requests."""
    return [
        [title, *(with_spread(one[key]) for one in clients)],
        ["by the server", *(with_spread(one["server"][key]) for one in clients)],
    ]
