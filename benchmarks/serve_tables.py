"""Markdown tables of what the server costs, and of load generators compared."""

from benchmarks.batching_tables import percent
from benchmarks.tables import TIMES, Json, number, provenance, table, with_spread

LEAST_RATIO = 0.92
"""Share of the tokens per second in process."""
MOST_ADDED_MS = 3
MOST_HEALTH_P99_MS = 20
MOST_START_S = 1
"""Approximate target for the start of `serve`."""


def serve(result: Json) -> str:
    how = f"`{result['model']}`, server and `LLM` alike with `{result['flags']}`."
    return "\n\n".join([provenance(result), how, table(["", "measured", "target"], _rows(result))])


def readme(result: Json) -> str:
    """The rows with a target."""
    rows = [row for row in _rows(result) if row[2]]
    return f"{table(['', 'measured', 'target'], rows)}\n\n{provenance(result)}"


def _rows(result: Json) -> list[list[str]]:
    return [*_rate_rows(result["rates"]), *_idle_rows(result["idle"]), *_health_rows(result["health"]),
            *_start_rows(result["start"], result["rates"])]  # fmt: skip


def _rate_rows(rates: Json) -> list[list[str]]:
    streams = f"{rates['outstanding']} streams"
    return [
        [f"{streams}, output tokens/s through `LLM`", with_spread(rates["llm"]), ""],
        [f"{streams}, output tokens/s over HTTP", with_spread(rates["http"]), ""],
        [f"{streams}, HTTP of `LLM`", percent(rates["ratio"]), f"at least {LEAST_RATIO:.0%}"],
        ["meanwhile of all CPUs: engine", percent(rates["cpu_engine"]), ""],
        ["meanwhile of all CPUs: front end", percent(rates["cpu_front"]), ""],
        ["meanwhile of all CPUs: the clients that measure", percent(rates["cpu_client"]), ""],
    ]


def _idle_rows(idle: Json) -> list[list[str]]:
    added = "idle, added to the first token by the front end, ms: median, p90"
    return [
        ["idle, first byte, ms: median, p90", _median_and_p90(idle["first_byte"]), ""],
        [added, _median_and_p90(idle["added"]), f"at most {MOST_ADDED_MS}"],
        ["of it before the first step", _median_and_p90(idle["before_step"]), ""],
        ["not in it: connecting", _median_and_p90(idle["connecting"]), ""],
    ]


def _median_and_p90(summary: Json) -> str:
    return f"{number(summary['p50'])}, {number(summary['p90'])}"


def _health_rows(health: Json) -> list[list[str]]:
    latency = health["latency"]
    values = ", ".join(number(latency[name]) for name in ("p50", "p99", "max"))
    name = f"`/health` during a prefill of {health['prefill']} tokens, ms: median, p99, max of {latency['n']}"
    client = "its client, of one CPU"
    return [[name, values, f"p99 under {MOST_HEALTH_P99_MS}"], [client, f"{health['client_cores']:.1%}", ""]]


def _start_rows(start: Json, rates: Json) -> list[list[str]]:
    memory = ", ".join(number(start[name]["median"]) for name in ("front_mb", "engine_mb"))
    after = ", ".join(map(number, rates["resident_mb"]))
    return [
        ["start of the process to ready, s", with_spread(start["ready_s"]), f"about {MOST_START_S}"],
        ["resident when ready, MB: front end, engine", memory, ""],
        [f"resident after {rates['requests']} requests, MB: front end, engine", after, ""],
    ]


def versions(result: Json) -> str:
    """This version beside another: ratios of measurements in pairs."""
    how = (
        f"`twostep serve {result['model']}` of commit {result['machine']['commit'][:7]} beside {result['base']}, both "
        "running, requests in turn; tokens/s of prompts and answers together. Ratios: medians over pairs; the median, "
        f"the least and the greatest of {result['points'][0]['this']['n']} starts of the servers."
    )
    head = ["streams", "prompt", "answer", "pairs", "base, tokens/s", "this version", "base, a second server"]
    rows = [
        [*(str(point["burst"][name]) for name in ("streams", "prompt", "tokens")), str(point["pairs"]),
         with_spread(point["base_tokens_per_s"]), f"**{_ratio(point['this'])}**", _ratio(point["base_again"])]
        for point in result["points"]
    ]  # fmt: skip
    return "\n\n".join([how, table(head, rows), provenance(result)])


def _ratio(ratio: Json) -> str:
    return f"{ratio['median']:.2f} {TIMES} ({ratio['min']:.2f} to {ratio['max']:.2f})"


CLIENT_ROWS = {"ttft_ms": "TTFT", "tpot_ms": "TPOT (the others' ITL)", "e2e_ms": "E2E (request latency)"}


def clients(result: Json) -> str:
    load = result["load"]
    names = [" ".join(filter(None, (one["name"], one["version"]))) for one in result["clients"]]
    rows = [row for key, title in CLIENT_ROWS.items() for row in _client_rows(result["clients"], key, title)]
    how = (
        f"`twostep serve {result['model']}` without prefix cache, {load['streams']} streams, {load['requests']} "
        f"completions of {load['input_tokens']} prompt and {load['output_tokens']} answer tokens, {load['runs']} runs "
        "of each in turn. Means over requests, in ms; the median of the runs, and the least and greatest."
    )
    return "\n\n".join([how, table(["", *names], rows), provenance(result)])


def _client_rows(clients: list[Json], key: str, title: str) -> list[list[str]]:
    """Values reported by each client, and by the server for the same requests."""
    return [
        [title, *(with_spread(one[key]) for one in clients)],
        ["by the server", *(with_spread(one["server"][key]) for one in clients)],
    ]
