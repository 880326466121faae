"""A bill, as JSON has it, in lines for a person."""

from collections.abc import Iterator
from typing import Any

Json = dict[str, Any]

BETWEEN = "between steps"
"""Such lines are many and short: they are summed up."""


def bill_lines(bill: Json) -> Iterator[str]:
    """Header and verdict, then each choice: its lines, and what TTFT, E2E and the whole add up from."""
    cached = f" ({bill['cached_tokens']} cached)" if bill["cached_tokens"] else ""
    yield f"{bill['id']}: {bill['prompt_tokens']} prompt tokens{cached} + {bill['completion_tokens']} tokens"
    yield f"{bill['model']}, {bill['endpoint']}, {'streamed' if bill['stream'] else 'whole'}, status {bill['status']}"
    yield bill["verdict"]["words"] if bill["verdict"] else "what the engine did for it is not known yet"
    for choice in bill["choices"]:
        yield ""
        if len(bill["choices"]) > 1:
            yield f"prompt {choice['prompt']}, choice {choice['index']}: {choice['finish_reason']}"
        yield from _choice(choice)


def _choice(choice: Json) -> Iterator[str]:
    yield f"{'from':>12} {'took':>12}  ms"
    for line in choice["lines"]:
        if line["what"] != BETWEEN:
            yield f"{_ms(line['start_ns'])} {_ms(line['ns'])}  {_title(line)}"
            yield from (f"{'':25}    {note}" for note in _notes(line))
    between = [line["ns"] for line in choice["lines"] if line["what"] == BETWEEN]
    if between:
        yield f"{'':12} {_ms(sum(between))}  {BETWEEN}, {len(between)} times"
    yield ""
    for name, key in (("TTFT", "ttft"), ("E2E", "e2e"), ("whole", "total")):
        if choice[key]:
            yield f"{name:12} {_ms(choice[key]['ns'])}  = {_sum(choice[key]['parts_ns'])}"


def _title(line: Json) -> str:
    what = line["what"]
    if "reason" in line:
        return f"{what}, {line['tokens']} tokens in step {line['step']}: {line['reason']}"
    if what == "decode":
        return f"decode, {line['tokens']} tokens in as many steps"
    if what == "preempted":
        return f"preempted, {line['lost_tokens']} computed tokens lost: {line['why']}"
    return str(what)


def _notes(line: Json) -> Iterator[str]:
    for held in line.get("held", ()):
        steps = f", {held['steps']} steps" if held["steps"] else ""
        yield f"{held['words']}: {held['ns'] / 1e6:.3f}{steps}"
    if line.get("computed_again_tokens"):
        yield f"{line['computed_again_tokens']} of them had been computed before"
    if line.get("others_tokens"):
        yield f"shared with {line['others_tokens']} tokens of others; estimated: {', '.join(_estimates(line))}"


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
