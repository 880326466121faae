"""Points of the model benchmark."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median

from benchmarks.measurement import Spread, spread
from benchmarks.model_driver import Run
from twostep.kernels.machine_limits import Bandwidth, Limits


@dataclass(frozen=True)
class Against:
    """An achieved rate in operations or bytes per second, and its share of the limit measured in the same run."""

    per_s: float
    share: float


@dataclass(frozen=True)
class Point:
    """Prefill of one prompt of `context` tokens, or decode of `batch` sequences with `context` tokens.

    Rates and shares use the medians of the parts over the runs.
    """

    batch: int
    context: int
    steps: int
    """Steps of one run; prefill counts as one step."""
    tokens_per_s: Spread
    ms: dict[str, float]
    """Median of each part of a step, and of the total."""
    linear: Against
    """The matrices of the layers, compared with the integer dot product of all threads."""
    head: Against
    """The head, compared with the same limit."""
    attention: Against
    """Compared with the fp32 FMA of all threads."""
    memory: Against | None = None
    """Decode only: bytes of weights and KV cache read, compared with the bandwidth at that working set."""


def prefill_point(runs: Sequence[Run], limits: Limits) -> Point:
    return _point(1, runs[0].tokens, 1, runs, limits, None)


def decode_point(
    batch: int, context: int, steps: int, runs: Sequence[Run], limits: Limits, weight_bytes: int, read: Bandwidth
) -> Point:
    """`weight_bytes` are read once per step; `read` is the bandwidth at `step_bytes`."""
    total_s = median(run.seconds.total for run in runs)
    memory = _against(steps * step_bytes(runs[0], steps, weight_bytes), total_s, read.bytes_per_s)
    return _point(batch, context, steps, runs, limits, memory)


def step_bytes(run: Run, steps: int, weight_bytes: int) -> int:
    """Mean bytes read by a decode step of the run."""
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
