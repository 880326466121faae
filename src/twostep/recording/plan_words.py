"""Plans as readable text."""

from collections.abc import Callable
from typing import Any

from twostep.core.plan import Admission, Chunk, NotAdmitted, Plan, Preemption


def plan_words(plan: Plan) -> str:
    """A plan as one line: "step 7: 3 decode; 9: 48 tokens from 32 (token budget of 64 a step)"."""
    lists = (plan.preemptions, plan.admissions, plan.chunks, plan.not_admitted)
    parts = [f"{plan.decoding} decode"] if plan.decoding else []
    parts += [item_words(item) for items in lists for item in items]
    if plan.predicted_ns is not None:
        parts.append(f"predicted {plan.predicted_ns / 1e6:.1f} ms{_promise(plan)}")
    return f"step {plan.step}: {'; '.join(parts)}"


def _promise(plan: Plan) -> str:
    if plan.promise is None:
        return ""
    over = ", over budget" if plan.over_budget else ""
    budget_ns, overhead_ns, _ = plan.promise
    return f" + {overhead_ns / 1e6:.1f} outside the kernels, budget {budget_ns / 1e6:.1f} ms{over}"


def item_words(item: Preemption | Admission | Chunk | NotAdmitted) -> str:
    """An item of a plan as text that starts with the number of the sequence."""
    words: Callable[[Any], str] = _WORDS[type(item)]
    return f"{item.number} {words(item)}"


def _preemption(item: Preemption) -> str:
    return f"is preempted, {item.lost} tokens lost ({item.reason.words()})"


def _admission(item: Admission) -> str:
    arrived = f", {item.arrived} tokens arrived with their KV" if item.arrived else ""
    return f"is admitted with {item.known} tokens, {item.cached} blocks of them cached{arrived}"


def _chunk(item: Chunk) -> str:
    drafts = f", the last {item.drafts} drafted" if item.drafts else ""
    forks = f", also for {', '.join(map(str, item.forks))}" if item.forks else ""
    samples = ", then samples" if item.samples else ""
    return f"computes {item.tokens} from {item.start}{drafts}{samples}{forks} ({item.reason.words()})"


def _not_admitted(item: NotAdmitted) -> str:
    return f"must wait ({item.reason.words()})"


_WORDS: dict[type, Callable[[Any], str]] = {
    Preemption: _preemption,
    Admission: _admission,
    Chunk: _chunk,
    NotAdmitted: _not_admitted,
}
