"""A bill, as JSON has it, in lines for a person."""

from collections.abc import Iterator

from twostep.server.observe.breakdown_runs import BETWEEN, Json, collapsed, limit
from twostep.server.observe.verdict import NO_CORE
from twostep.server.words import plural

STARVED = 0.1
"""Share of a line; over it the line says that the kernels were kept from the cores."""


def bill_lines(bill: Json) -> Iterator[str]:
    """Header and verdict, then each choice: its lines, and what TTFT, E2E and the whole add up from."""
    yield from _header(bill)
    for choice in bill["choices"]:
        yield ""
        if len(bill["choices"]) > 1:
            yield f"prompt {choice['prompt']}, choice {choice['index']}: {choice['finish_reason']}"
            yield choice["verdict"]["words"]
        yield from _choice(choice)


def _header(bill: Json) -> Iterator[str]:
    cached = f" ({bill['cached_tokens']} cached)" if bill["cached_tokens"] else ""
    prompt, answer = plural(bill["prompt_tokens"], "prompt token"), plural(bill["completion_tokens"], "token")
    yield f"{bill['id']}: {prompt}{cached} + {answer}"
    yield f"{bill['model']}, {bill['endpoint']}, {'streamed' if bill['stream'] else 'whole'}, status {bill['status']}"
    if bill["cut_ns"] is not None:
        yield f"cut after {bill['cut_ns'] / 1e6:.3f} ms; what is later is the engine's, until it had heard of it"
    yield bill["verdict"]["words"] if bill["verdict"] else "what the engine did for it is not known yet"


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
        return f"decode, {plural(line['tokens'], 'token')}, one a step"
    if what == "preempted":
        return f"preempted, {plural(line['lost_tokens'], 'computed token')} lost: {line['why']}"
    if "last_prompt" in line:
        return f"{what}: prompt {line['last_prompt']}, choice {line['last_index']} was the last"
    return str(what)


def _run_title(line: Json) -> str:
    chunks = line["chunks"]
    tokens = _range([chunk["tokens"] for chunk in chunks], "d")
    steps = _range([chunk["step"] for chunk in chunks], "d")
    each = _range([chunk["ns"] / 1e6 for chunk in chunks], ".3f")
    noun = "token" if tokens == "1" else "tokens"
    return f"{line['what']}: {len(chunks)} chunks of {tokens} {noun}, steps {steps}, {each} ms each: {limit(chunks[0])}"


def _range(values: list[float], form: str) -> str:
    """The least and the most."""
    return " to ".join(dict.fromkeys(format(value, form) for value in (min(values), max(values))))


def _notes(line: Json) -> Iterator[str]:
    for held in line.get("held", ()):
        steps = f", {plural(held['steps'], 'step')}" if held["steps"] else ""
        yield f"{held['words']}: {held['ns'] / 1e6:.3f}{steps}"
    if "chunks" in line:
        yield f"with what was between them: {_sum(line['parts_ns'])}"
    if line.get("computed_again_tokens"):
        yield f"{line['computed_again_tokens']} of them had been computed before"
    if line.get("others_tokens"):
        shared = plural(line["others_tokens"], "token")
        yield f"shared with {shared} of others; estimated: {', '.join(_estimates(line))}"
    starved_ns = line.get("starved_ns_estimated", 0)
    if starved_ns > STARVED * line["ns"]:
        yield f"of that {starved_ns / 1e6:.3f} ms without a core: {NO_CORE} (estimated)"


def _estimates(line: Json) -> Iterator[str]:
    """Of the kernels' time; the rest of the line is the host's."""
    names = {"own": "own work", "others": "theirs", "others_decode": "their decodes", "others_prefill": "their prompts"}
    for name, words in names.items():
        if ns := line.get(f"{name}_ns_estimated"):
            yield f"{words} {ns / 1e6:.3f}"


def _sum(parts: dict[str, int]) -> str:
    return " + ".join(f"{part} {ns / 1e6:.3f}" for part, ns in parts.items() if ns)


def _ms(ns: int) -> str:
    return f"{ns / 1e6:12.3f}"
