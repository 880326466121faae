"""Times of steps as running totals, so that the time of any range of steps is the difference of two readings.

A sequence that decodes is in every step, so nothing is stored per token.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from twostep.core.cost import CostModel, LeastTimes, StepShape, decode_shape
from twostep.core.plan import Chunk, Plan
from twostep.engine.timing.promises import Promised, PromiseMeter
from twostep.perf.machine_limits import MachineLimits

STEP_S = (
    0.001, 0.002, 0.003, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5,
    1.0, 2.5,
)  # fmt: skip
"""Bounds of step times and of the gaps between tokens."""
STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
KINDS = ("decode", "prefill", "mixed")
"""A step without prompts, with prompts only, with both."""
ESTIMATE_EVERY_STEPS = 16
"""So many steps that only decode share one estimate of the parts of a step, as they are alike."""


class Counted(NamedTuple):
    """A histogram at one moment. `counts`: values between each bound and the one before, then those above all
    bounds."""

    counts: tuple[int, ...]
    total: float


class Histogram:
    """Counts values by size, cheaply enough for every token. `bounds` ascend; a value equal to a bound counts below it,
    as Prometheus has it (`le`)."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Adds `value` so many times."""
        self._counts[bisect_left(self.bounds, value)] += times
        self._total += value * times

    def counted(self) -> Counted:
        """The counts so far."""
        return Counted(tuple(self._counts), self._total)


class Reading(NamedTuple):
    """Totals since the start."""

    steps: int = 0
    mixed_steps: int = 0
    """Decodes and prompts together."""
    kernel_ns: int = 0
    tokens: int = 0
    alone_ns: int = 0
    """Estimated: had each step been a decode of one average sequence."""
    prefill_ns: int = 0
    """Estimated: by how much prompts made steps longer in which others decoded."""
    starved_ns: int = 0
    """Estimated: of `kernel_ns`, what the kernels were kept from the cores."""
    attention_ns: int = 0
    """Estimated: of `kernel_ns`, attention of the decodes."""
    least_arithmetic_ns: int = 0
    """See `MachineLimits`; 0 without any."""
    least_bandwidth_ns: int = 0

    def since(self, earlier: "Reading") -> "Reading":
        return Reading(*(now - before for now, before in zip(self, earlier, strict=True)))


@dataclass(frozen=True, slots=True)
class Measured:
    """Histograms and totals since the start, for metrics."""

    itl_s: Counted
    step_s: dict[str, Counted]
    """By kind of step, the kernels' time."""
    step_tokens: dict[str, Counted]
    starved_ns: int
    """See `Reading`."""
    computed_tokens: int
    generated_tokens: int
    host_ns: int = 0
    """Time outside the kernels, from the end of one step to the end of the next, where one followed at once."""
    host_steps: int = 0
    promised: Promised = field(default_factory=Promised)
    """How budgets by time were kept."""

    @property
    def host_ns_per_step(self) -> float:
        """What a simulator adds to each step (`sim.modelled`); 0 before anything is measured."""
        return self.host_ns / self.host_steps if self.host_steps else 0.0


class StepMeter:
    """Is told of every step. `cost`, which the scheduler fits, divides the time of a step among its sequences."""

    def __init__(self, cost: CostModel) -> None:
        self.now = Reading()
        """After the last step."""
        self.before = Reading()
        """Before it."""
        self.ended_ns = 0
        """When it ended."""
        self.first_tokens = self._further_tokens = 0
        self.host_ns = self.host_steps = 0
        self.promises = PromiseMeter(cost)
        self.limits: MachineLimits | None = None
        """Of the calibrated machine, if it is."""
        self.least = LeastTimes()
        """Of the last step; without `limits` 0."""
        self._cost = cost
        self._steps_until_estimate = 0
        self._decoding = 0
        """Sequences in the steps without prompts that the estimates are for."""
        self._whole_ns = 1
        self._alone = self._prefill = self._attention = 0.0
        """Shares of a step."""
        self._itl = Histogram(STEP_S)
        self._step_s = {kind: Histogram(STEP_S) for kind in KINDS}
        self._step_tokens = {kind: Histogram(STEP_TOKENS) for kind in KINDS}

    def add(self, plan: Plan, kernel_ns: int, starved_ns: int, ended_ns: int, *, failed: bool) -> None:
        """Adds a finished step. A failed one counts in the totals, not in the histograms."""
        mixed = bool(plan.chunks and plan.decoding)
        self._steps_until_estimate -= 1
        if not failed:
            self._count(plan, "mixed" if mixed else "prefill" if plan.chunks else "decode", kernel_ns)
        if plan.chunks or plan.decoding != self._decoding or self._steps_until_estimate <= 0:
            self._estimate(plan)
        if plan.decoding and self.ended_ns:  # it continues the step before: the engine was not idle between
            self.host_ns += ended_ns - self.ended_ns - kernel_ns
            self.host_steps += 1
        if plan.promise and not failed:
            self.promises.add(plan, kernel_ns, starved_ns, ended_ns - self.ended_ns)
        alone_ns, prefill_ns = int(kernel_ns * self._alone), int(kernel_ns * self._prefill)
        self.before, self.ended_ns, now = self.now, ended_ns, self.now
        self.now = Reading(
            now.steps + 1,
            now.mixed_steps + mixed,
            now.kernel_ns + kernel_ns,
            now.tokens + plan.shape.tokens,
            now.alone_ns + min(alone_ns, kernel_ns - prefill_ns),
            now.prefill_ns + prefill_ns,
            now.starved_ns + starved_ns,
            now.attention_ns + int(kernel_ns * self._attention),
            now.least_arithmetic_ns + self.least.arithmetic,
            now.least_bandwidth_ns + self.least.bandwidth,
        )

    def alone_ns(self, chunk: Chunk, kernel_ns: int) -> tuple[int, int]:
        """Estimates what the last step would have taken with this chunk only, and its attention's part of that."""
        cost = self._cost.estimate(StepShape().with_slice(chunk.start, chunk.tokens, _sampled(chunk)))
        alone_ns = int(kernel_ns * min(1.0, cost.expected_ns / self._whole_ns))
        attention = (cost.terms.prefill_attention + cost.terms.decode_attention) / max(1, cost.expected_ns)
        return alone_ns, int(alone_ns * min(1.0, attention))

    def gave(self, before_ns: list[int]) -> None:
        """Adds the tokens of the last step, except first tokens, by the time of the token before each; most are
        equal."""
        for at_ns, count in Counter(before_ns).items():
            self._itl.add((self.ended_ns - at_ns) / 1e9, count)
        self._further_tokens += len(before_ns)

    def measured(self) -> Measured:
        return Measured(
            self._itl.counted(),
            {kind: histogram.counted() for kind, histogram in self._step_s.items()},
            {kind: histogram.counted() for kind, histogram in self._step_tokens.items()},
            self.now.starved_ns,
            self.now.tokens,
            self.first_tokens + self._further_tokens,
            self.host_ns,
            self.host_steps,
            self.promises.promised(),
        )

    def _count(self, plan: Plan, kind: str, kernel_ns: int) -> None:
        self._step_s[kind].add(kernel_ns / 1e9)
        self._step_tokens[kind].add(plan.shape.tokens)

    def _estimate(self, plan: Plan) -> None:
        """Updates the estimate of the parts of such steps."""
        self._steps_until_estimate = ESTIMATE_EVERY_STEPS
        self._decoding = 0 if plan.chunks else plan.decoding
        cost = self._cost.estimate(plan.shape)
        self._whole_ns = max(1, cost.expected_ns)
        if self.limits is not None:
            self.least = self.limits.least_ns(plan.shape)
        self._attention = min(1.0, cost.terms.decode_attention / self._whole_ns) if plan.decoding else 0.0
        decodes = plan.shape
        for chunk in plan.chunks:
            decodes = decodes.without_slice(chunk.start, chunk.tokens, _sampled(chunk))
        self._alone = self._share(decode_shape(1, decodes.decode_kv_tokens // plan.decoding)) if plan.decoding else 0.0
        self._prefill = 1 - self._share(decodes) if plan.decoding and plan.chunks else 0.0

    def _share(self, part: StepShape) -> float:
        """The share of the step's time that `part` would have taken alone."""
        return min(1.0, self._cost.estimate(part).expected_ns / self._whole_ns)


def _sampled(chunk: Chunk) -> int:
    return (1 + chunk.drafts) * chunk.samples
