"""A latency breakdown, as JSON, in lines of text. Similar lines are merged: a long prompt has hundreds of chunks."""

from collections.abc import Iterable, Iterator
from typing import Any

from twostep.server.observe.verdict import NO_CORE

Json = dict[str, Any]

BETWEEN = "between steps"
GAPS = (BETWEEN, "steps of other requests")
"""Lines between the chunks of a run; such lines before or after it remain separate."""
SUMMED = (
    "tokens", "computed_again_tokens", "others_tokens",
    "own_ns_estimated", "others_ns_estimated", "starved_ns_estimated", "attention_ns_estimated",
    "kernel_ns", "least_arithmetic_ns", "least_bandwidth_ns",
)  # fmt: skip


def collapsed(lines: Iterable[Json]) -> Iterator[Json]:
    """Merges each run of chunks with the same limit into one line with `chunks`, its chunks and what is between them.
    Its time and parts are sums, so that the lines still cover the whole."""
    run: list[Json] = []
    for line in lines:
        if run and not _continues(run, line):
            yield from _merged(run)
            run = []
        if run or "reason" in line:
            run.append(line)
        else:
            yield line
    yield from _merged(run)


def limit(chunk: Json) -> str:
    """The reason's name: the text before the comma; the predicted time after it differs from step to step."""
    return str(chunk["reason"]).partition(",")[0]


def _continues(run: list[Json], line: Json) -> bool:
    if line["what"] in GAPS:
        return True
    return "reason" in line and (line["what"], limit(line)) == (run[0]["what"], limit(run[0]))


def _merged(run: list[Json]) -> Iterator[Json]:
    """Gaps after the last chunk are not part of the run."""
    last = max((place for place, line in enumerate(run) if "reason" in line), default=-1)
    chunks = [line for line in run[: last + 1] if "reason" in line]
    if len(chunks) > 1:
        yield _total(run[: last + 1], chunks)
    else:
        yield from chunks
    yield from run[last + 1 :]


def _total(run: list[Json], chunks: list[Json]) -> Json:
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


SHOWN = 0.005
"""Smaller shares of a limit are not shown."""
STARVED = 0.1
"""Share of a line above which it reports the time that the kernels had no core."""


def breakdown_lines(breakdown: Json) -> Iterator[str]:
    """Header and verdict, then for each choice its lines and the sums for TTFT, E2E and the whole."""
    yield from _header(breakdown)
    for choice in breakdown["choices"]:
        yield ""
        if len(breakdown["choices"]) > 1:
            yield f"prompt {choice['prompt']}, choice {choice['index']}: {choice['finish_reason']}"
            yield choice["verdict"]["words"]
            yield from _shares(choice["verdict"])
        yield from _choice(choice)


def _header(whole: Json) -> Iterator[str]:
    cached = f" ({whole['cached_tokens']} cached)" if whole["cached_tokens"] else ""
    prompt, answer = plural(whole["prompt_tokens"], "prompt token"), plural(whole["completion_tokens"], "token")
    yield f"{whole['id']}: {prompt}{cached} + {answer}"
    streamed = "streamed" if whole["stream"] else "whole"
    yield f"{whole['model']}, {whole['endpoint']}, {streamed}, status {whole['status']}"
    if whole["cut_ns"] is not None:
        yield f"cancelled after {whole['cut_ns'] / 1e6:.3f} ms; the engine continued until it was told"
    if not whole["verdict"]:
        yield "the engine has not reported on this request yet"
        return
    yield whole["verdict"]["words"]
    yield from _shares(whole["verdict"])


def _shares(verdict: Json) -> Iterator[str]:
    """Every limit's share, the largest first, if there is more than the one of the verdict."""
    shares = [f"{limit} {share:.0%}" for limit, share in verdict["shares"].items() if share >= SHOWN]
    if len(shares) > 1:
        yield f"what held it: {', '.join(shares)}"


def _choice(choice: Json) -> Iterator[str]:
    yield f"{'from':>12} {'took':>12}  ms"
    lines = list(collapsed(choice["lines"]))
    for line in lines:
        if line["what"] != BETWEEN:
            yield f"{_ms(line['start_ns'])} {_ms(line['ns'])}  {_title(line)}"
            yield from (f"{'':25}    {note}" for note in _notes(line))
    between = [line["ns"] for line in lines if line["what"] == BETWEEN]
    if between:
        yield f"{'':12} {_ms(sum(between))}  {BETWEEN}, {plural(len(between), 'time')}"
    yield ""
    for name, key in (("TTFT", "ttft"), ("E2E", "e2e"), ("whole", "total")):
        if choice[key]:
            yield f"{name:12} {_ms(choice[key]['ns'])}  = {_sum(choice[key]['parts_ns'])}"


def _title(line: Json) -> str:
    what = line["what"]
    if "chunks" in line:
        return _run_title(line)
    if "reason" in line:
        return f"{what}, {plural(line['tokens'], 'token')} in step {line['step']}: {line['reason']}"
    if what == "decode":
        return f"decode, {plural(line['tokens'], 'token')}, one per step"
    if what == "preempted":
        return f"preempted, {plural(line['lost_tokens'], 'computed token')} lost: {line['why']}"
    if what == "engine restarted":
        return f"{what}, {plural(line['lost_tokens'], 'computed token')} lost"
    if "lost" in line["parts_ns"]:
        return f"{what}, {plural(line['tokens'], 'token')}" if line["tokens"] else str(what)
    if "last_prompt" in line:
        return f"{what}: prompt {line['last_prompt']}, choice {line['last_index']} ended last"
    return str(what)


def _run_title(line: Json) -> str:
    chunks = line["chunks"]
    tokens = _range([chunk["tokens"] for chunk in chunks], "d")
    steps = _range([chunk["step"] for chunk in chunks], "d")
    each = _range([chunk["ns"] / 1e6 for chunk in chunks], ".3f")
    noun = "token" if tokens == "1" else "tokens"
    return f"{line['what']}: {len(chunks)} chunks of {tokens} {noun}, steps {steps}, {each} ms each: {limit(chunks[0])}"


def _range(values: list[float], form: str) -> str:
    """Minimum and maximum."""
    return " to ".join(dict.fromkeys(format(value, form) for value in (min(values), max(values))))


def _notes(line: Json) -> Iterator[str]:
    for reason in line.get("held", ()):
        steps = f", {plural(reason['steps'], 'step')}" if reason["steps"] else ""
        yield f"{reason['words']}: {reason['ns'] / 1e6:.3f}{steps}"
    if "chunks" in line:
        yield f"including the time between chunks: {_sum(line['parts_ns'])}"
    if line.get("computed_again_tokens"):
        yield f"{line['computed_again_tokens']} of these tokens were recomputed"
    if line.get("others_tokens"):
        shared = plural(line["others_tokens"], "token")
        yield f"shared with {shared} of other requests; estimated: {', '.join(_estimates(line))}"
    starved_ns = line.get("starved_ns_estimated", 0)
    if starved_ns > STARVED * line["ns"]:
        yield f"of this {starved_ns / 1e6:.3f} ms without a core: {NO_CORE} (estimated)"
    if line.get("least_bandwidth_ns") and line["kernel_ns"] > 0:
        shares = {name: line[f"least_{name}_ns"] / line["kernel_ns"] for name in ("arithmetic", "bandwidth")}
        reached = " and ".join(f"{share:.0%} of the {name}" for name, share in shares.items())
        yield f"its steps reached {reached} that this machine has (calibrated)"


def _estimates(line: Json) -> Iterator[str]:
    """Shares of the kernels' time; the rest of the line is host time."""
    names = {"own": "own", "others": "others'", "others_decode": "others' decodes", "others_prefill": "others' prompts"}
    for name, words in names.items():
        if ns := line.get(f"{name}_ns_estimated"):
            yield f"{words} {ns / 1e6:.3f}"


def _sum(parts: dict[str, int]) -> str:
    return " + ".join(f"{part} {ns / 1e6:.3f}" for part, ns in parts.items() if ns)


def _ms(ns: int) -> str:
    return f"{ns / 1e6:12.3f}"


def plural(count: int, noun: str) -> str:
    """ "1 step", "2 steps"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
