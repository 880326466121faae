"""The verdict: which limit took most of a request's time, from the lines of its latency breakdown."""

from collections import Counter
from collections.abc import Iterable
from typing import Any, Protocol


class _Line(Protocol):
    """See `latency_breakdown.Line`."""

    @property
    def parts(self) -> dict[str, int]: ...
    @property
    def details(self) -> dict[str, Any]: ...


NO_CORE = "other programs of this machine, or a limit of CPU time"
"""Why the kernels had no core."""

LIMITS = {
    "queue": "the queue",
    "blocks": "KV blocks: it waited until enough were free",
    "arithmetic": "arithmetic: computing its prompt",
    "bandwidth": "memory bandwidth: decoding, which reads all weights in each step",
    "attention": "attention: its own tokens over its context (estimated)",
    "company": "other requests in the batch: their prompts, or their tokens in its prefill steps (estimated)",
    "cores": f"cores: the kernels waited for them because of {NO_CORE} (estimated)",
    "preemption": "preemption: it lost its KV blocks, waited and was recomputed",
    "restart": "an engine that died: what it did is not known in detail, and another one had to be started",
    "host": "the engine's work between and around the kernels",
    "front": "the front end: tokenizing",
    "form": "the check of its structured output: a new schema or grammar is compiled first, one at a time",
    "answers": "the reply's other choices (it ends with the last of them)",
    "send": "sending: detokenizing, transport, and a client that reads slowly",
}


def verdict(lines: Iterable[_Line]) -> dict[str, Any]:
    """`limit`: the key of `LIMITS` that took most of the request's time, with its share of the whole. `shares`: of all
    limits that took time, the largest first; they add up to 1."""
    lines = tuple(lines)
    took = _by_limit(lines)
    whole_ns = sum(took.values())
    limit = max(took, key=lambda limit: took[limit])
    words = f"{LIMITS[limit]}{_because(limit, lines)}"
    share = took[limit] / whole_ns if whole_ns else 0.0
    line = f"limited by {words}; {took[limit] / 1e6:.1f} of {whole_ns / 1e6:.1f} ms ({share:.0%})"
    order = sorted((one for one in took if took[one]), key=lambda one: -took[one])
    shares = {one: round(took[one] / whole_ns, 4) for one in order}
    return {
        "limit": limit, "ns": took[limit], "share": round(share, 4), "words": line, "limits_ns": took, "shares": shares,
    }  # fmt: skip


def _by_limit(lines: Iterable[_Line]) -> dict[str, int]:
    took = dict.fromkeys(LIMITS, 0)
    for line in lines:
        parts, details = line.parts, line.details
        for part, limit in (("queue", "queue"), ("blocks", "blocks"), ("preempted", "preemption"), ("host", "host"),
                            ("lost", "restart"), ("restart", "restart"),
                            ("front", "front"), ("form", "form"), ("answers", "answers"), ("send", "send"),
                            ("others", "company")):  # fmt: skip
            took[limit] += parts.get(part, 0)
        if "prefill" in parts:
            _share(took, "arithmetic", parts["prefill"], details["others_ns_estimated"], details)
        if "decode" in parts:
            _share(took, "bandwidth", parts["decode"], details["others_prefill_ns_estimated"], details)
    return took


def _share(took: dict[str, int], own: str, kernel_ns: int, company_ns: int, details: dict[str, Any]) -> None:
    """Splits the kernels' time: time without a core is subtracted from own work and company in proportion; of own
    work, attention is told apart."""
    starved_ns, attention_ns = details["starved_ns_estimated"], details["attention_ns_estimated"]
    own_ns = max(1, kernel_ns - company_ns)
    company_ns -= company_ns * starved_ns // max(1, kernel_ns)
    took["cores"] += starved_ns
    took["company"] += company_ns
    left_ns = kernel_ns - starved_ns - company_ns
    attending_ns = left_ns * min(attention_ns, own_ns) // own_ns
    took["attention"] += attending_ns
    took[own] += left_ns - attending_ns


def _because(limit: str, lines: Iterable[_Line]) -> str:
    """Details of the limit."""
    if limit == "answers":
        [last] = [line.details for line in lines if "answers" in line.parts]
        return f": prompt {last['last_prompt']}, choice {last['last_index']}"
    if limit == "arithmetic":
        return _cut(lines)
    return _longest(lines) if limit == "queue" else ""


def _cut(lines: Iterable[_Line]) -> str:
    """Into how many chunks the prompt was cut and the most frequent reason; each chunk has its own overhead."""
    reasons = [line.details["reason"] for line in lines if "prefill" in line.parts]
    if len(reasons) < 2:
        return ""
    [(why, count)] = Counter(reason.partition(",")[0].partition(":")[0] for reason in reasons[:-1]).most_common(1)
    return f", in {len(reasons)} chunks ({count} of them limited by: {why})"


def _longest(lines: Iterable[_Line]) -> str:
    """The reason for waiting that lasted longest."""
    reasons = [one for line in lines if "queue" in line.parts for one in line.details.get("held", ())]
    reasons = [one for one in reasons if one["why"] != "no_blocks"]
    return f": {max(reasons, key=lambda one: int(one['ns']))['words']}" if reasons else ""
