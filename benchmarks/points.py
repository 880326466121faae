"""A point of the benchmark: runs of one prefill length, or of one batch and context, each part against its limit."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median

from benchmarks.limits import Bandwidth, Limits
from benchmarks.runs import Run
from benchmarks.spread import Spread, spread


@dataclass(frozen=True)
class Against:
    """A rate reached, in operations or bytes per second, and the share it is of the limit measured in the same run."""

    per_s: float
    share: float


@dataclass(frozen=True)
class Point:
    """Prefill of one prompt of `context` tokens, or decode by `batch` sequences that have `context` tokens.

    Rates and shares are from the medians of the parts over the runs.
    """

    batch: int
    context: int
    steps: int
    """Of one run: 1 for prefill, seen as one long step."""
    tokens_per_s: Spread
    ms: dict[str, float]
    """Median of each part of one step, and of the total."""
    linear: Against
    """The layers' matrices against the integer dot product of all threads."""
    head: Against
    """The head likewise."""
    attention: Against
    """Against the fp32 FMA of all threads."""
    memory: Against | None = None
    """Decode only: bytes of all weights and of the KV read against the bandwidth at that working set."""


def prefill_point(runs: Sequence[Run], limits: Limits) -> Point:
    return _point(1, runs[0].tokens, 1, runs, limits, None)


def decode_point(
    batch: int, context: int, steps: int, runs: Sequence[Run], limits: Limits, weight_bytes: int, read: Bandwidth
) -> Point:
    """`weight_bytes` are read once a step; `read` is the bandwidth at `step_bytes`."""
    total_s = median(run.seconds.total for run in runs)
    memory = _against(steps * step_bytes(runs[0], steps, weight_bytes), total_s, read.bytes_per_s)
    return _point(batch, context, steps, runs, limits, memory)


def step_bytes(run: Run, steps: int, weight_bytes: int) -> int:
    """Mean bytes that a decode step of the run has to read."""
    return weight_bytes + run.work.kv_bytes // steps


def _point(batch: int, context: int, steps: int, runs: Sequence[Run], limits: Limits, memory: Against | None) -> Point:
    parts = _median_parts(runs)
    work, integer = runs[0].work, limits.int8_dot.all_threads
    return Point(
        batch=batch,
        context=context,
        steps=steps,
        tokens_per_s=spread([run.tokens / run.seconds.total for run in runs]),
        ms={name: 1000 * seconds / steps for name, seconds in parts.items()},
        linear=_against(work.linear_ops, parts["linear"], integer),
        head=_against(work.head_ops, parts["head"], integer),
        attention=_against(work.attention_flops, parts["attention"], limits.fp32_fma.all_threads),
        memory=memory,
    )


def _median_parts(runs: Sequence[Run]) -> dict[str, float]:
    parts = [{**asdict(run.seconds), "total": run.seconds.total} for run in runs]
    return {name: median(part[name] for part in parts) for name in parts[0]}


def _against(amount: int, seconds: float, limit_per_s: float) -> Against:
    return Against(amount / seconds, amount / seconds / limit_per_s)
