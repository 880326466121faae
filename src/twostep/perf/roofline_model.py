"""A cost model without a machine: the work of a step against the roofs of a device.

Each kind of work takes max(operations / (efficiency x peak), bytes / (efficiency x bandwidth)) + a constant per kernel;
the kinds follow each other, so that their times add up. Nothing is learned from measured steps.
"""

import csv
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from math import inf
from statistics import median
from typing import Literal, NamedTuple, Self

from twostep.core.cost import Cost, StepShape, Terms, decode_shape
from twostep.errors import InvalidParameterError
from twostep.perf.hardware import Hardware
from twostep.perf.step_work import ACTIVATION_BYTES, Work, elementwise_work, step_work
from twostep.spec.model_spec import ModelSpec

Bound = Literal["arithmetic", "bandwidth", "overhead", "link"]
"""What takes the most of a kind's time: the larger roof, or the constant where that is larger than both."""


class Efficiency(NamedTuple):
    """Shares of the datasheet's peaks that real kernels reach, and what a kernel costs however little it does."""

    linear: float = 1.0
    """Of the peak, in matrix products of many rows."""
    bandwidth: float = 1.0
    """Of the memory bandwidth, streaming weights."""
    prefill_attention: float = 1.0
    """Of the fp16 peak."""
    prefill_kv: float = 1.0
    """Of the memory bandwidth, in prefill attention; at most `decode_attention`."""
    decode_attention: float = 1.0
    """Of the memory bandwidth, reading KV."""
    kernel_s: float = 0.0
    attention_kernel_s: float = 0.0
    step_s: float = 0.0
    """Once a step: launching, sampling, the host."""
    margin: float = 0.0
    """How much longer a kernel may take than expected: the 95th percentile of the held-out error."""
    origin: str = "peaks"
    """`measured`: fitted to kernels of this device. `datasheet`: typical shares of the measured devices. `peaks`: none,
    a lower bound of the time."""


PEAKS = Efficiency()
LINK_EFFICIENCY = 0.8
LINK_LATENCY_S = 10e-6
"""Of one all-reduce, however small (NVIDIA AIConfigurator uses 10 us)."""
ELEMENTWISE_KERNELS = 4
"""Of a layer: two norms, rotation, activation."""


@cache
def _fitted() -> dict[tuple[str, str], Efficiency]:
    text = files("twostep.perf").joinpath("data/efficiency.csv").read_text("utf-8")
    found = dict[tuple[str, str], Efficiency]()
    for row in csv.DictReader(text.splitlines()):
        numbers = [float(row[field]) for field in Efficiency._fields[:-1]]
        found[row["hardware"], row["arithmetic"]] = Efficiency._make([*numbers, "measured"])
    return found


def efficiency_of(hardware: Hardware, arithmetic: str) -> Efficiency:
    """Measured shares of this device where its kernels were measured, else typical ones. A machine whose own roofs were
    measured needs none."""
    if hardware.measured:
        return Efficiency(origin="measured")
    return _fitted().get((hardware.id, arithmetic)) or typical_efficiency(arithmetic)


def typical_efficiency(arithmetic: str, without: str | None = None) -> Efficiency:
    """The median of the devices whose kernels were measured, except the one with the id `without`: for datasheets."""
    fitted = [(kind, one) for (device, kind), one in _fitted().items() if device != without]
    alike = [one for kind, one in fitted if kind == arithmetic] or [one for kind, one in fitted if kind == "fp16"]
    shares = [median(column) for column in zip(*(one[:-1] for one in alike), strict=True)]
    return Efficiency._make([*shares, "datasheet"])


@dataclass(frozen=True, slots=True)
class KindTime:
    """The time of one kind of work in a step, on one device."""

    name: str
    work: Work
    arithmetic: str
    peak: float
    """Operations per second, of the datasheet."""
    arithmetic_s: float
    bandwidth_s: float
    constant_s: float
    link_s: float = 0.0

    @classmethod
    def of(
        cls, name: str, work: Work, hardware: Hardware, arithmetic: str, share: tuple[float, float], constant_s: float
    ) -> Self:
        """Of `work` on one device. `share`: of the peak and of the bandwidth that kernels of the kind reach."""
        peak = hardware.peak(arithmetic)
        arithmetic_s = work.operations / (share[0] * peak)
        return cls(name, work, arithmetic, peak, arithmetic_s, work.bytes / (share[1] * hardware.bandwidth), constant_s)

    @property
    def seconds(self) -> float:
        """The rule for every kind of work: the slower of arithmetic and memory traffic, and what is added to them."""
        return max(self.arithmetic_s, self.bandwidth_s) + self.constant_s + self.link_s

    @property
    def bound(self) -> Bound:
        """What takes most of the time."""
        times: dict[Bound, float] = {
            "arithmetic": self.arithmetic_s,
            "bandwidth": self.bandwidth_s,
            "overhead": self.constant_s,
            "link": self.link_s,
        }
        return max(times, key=lambda kind: times[kind])


class RooflineModel:
    """A `CostModel` of a model on a device, or on `tensor_parallel` devices that share each layer.

    `arithmetic`: how linear layers are multiplied; None takes the best that weight type and device allow. Raises
    `InvalidParameterError` for a combination that cannot be.
    """

    def __init__(
        self,
        model: ModelSpec,
        hardware: Hardware,
        efficiency: Efficiency | None = None,
        *,
        tensor_parallel: int = 1,
        arithmetic: str | None = None,
    ) -> None:
        self.model = model
        self.hardware = hardware
        self.devices = tensor_parallel
        self.arithmetic = arithmetic_for(model, hardware) if arithmetic is None else _checked(arithmetic, model)
        self._peak = hardware.peak(self.arithmetic)
        self.attention_arithmetic = next((kind for kind in ("fp16", "fp32") if kind in hardware.peaks), self.arithmetic)
        self.efficiency = efficiency_of(hardware, self.arithmetic) if efficiency is None else efficiency
        self._check_devices()

    def with_efficiency(self, efficiency: Efficiency) -> "RooflineModel":
        """The same model and device with other shares of the peaks."""
        return RooflineModel(
            self.model, self.hardware, efficiency, tensor_parallel=self.devices, arithmetic=self.arithmetic
        )

    def estimate(self, shape: StepShape) -> Cost:
        """The cost of a step of this shape.

        Expected are overlapped arithmetic and traffic. In the bound, those of attention do not overlap: then it cannot
        fall when a slice grows from a decode, which costs traffic, to a chunk, whose traffic other arithmetic may hide.
        """
        kinds = self.times(shape)
        times = {kind.name: kind.seconds * 1e9 for kind in kinds}
        hidden_s = sum(min(kind.arithmetic_s, kind.bandwidth_s) for kind in kinds if kind.name.endswith("attention"))
        linear = sum(times[name] for name in ("projections", "feed-forward", "elementwise", "all-reduce"))
        terms = Terms(
            fixed=times["fixed"],
            linear=linear,
            prefill_attention=times["prefill attention"],
            decode_attention=times["decode attention"],
            logits=times["logits"],
        )
        expected = sum(terms)
        return Cost(int(expected), int((expected + 1e9 * hidden_s) * (1 + self.efficiency.margin)), terms)

    def observe(self, shape: StepShape, measured_ns: int) -> None:
        """Does nothing: the constants are those of a table."""

    def times(self, shape: StepShape) -> tuple[KindTime, ...]:
        """The time of each kind of work in a step of this shape, on each of the devices."""
        work, layers, share = step_work(self.model, shape), self.model.shape.layers, self.efficiency
        weights, decode = (share.linear, share.bandwidth), (share.prefill_attention, share.decode_attention)
        prefill = (share.prefill_attention, share.prefill_kv)
        # One kernel computes the attention of all slices.
        kernel, attending = layers * share.kernel_s, layers * share.attention_kernel_s
        inner = 1 if self.model.experts is None else 2
        fp16 = self.attention_arithmetic
        rest_s = ELEMENTWISE_KERNELS * kernel if shape.tokens else 0.0
        elementwise = elementwise_work(self.model, shape.tokens, self.devices)
        return (
            self._kind("projections", work.projections, self.arithmetic, weights, 2 * kernel),
            self._kind("feed-forward", work.feed_forward, self.arithmetic, weights, 2 * inner * kernel),
            KindTime.of("elementwise", elementwise, self.hardware, fp16, weights, rest_s),
            self._kind("prefill attention", work.prefill_attention, fp16, prefill, attending if shape.prefills else 0),
            self._kind("decode attention", work.decode_attention, fp16, decode, 0 if shape.prefills else attending),
            self._kind("logits", work.logits, self._head_arithmetic, weights, share.kernel_s),
            self._kind("fixed", work.fixed, fp16, weights, share.step_s),
            self._all_reduce(shape.tokens),
        )

    @property
    def _head_arithmetic(self) -> str:
        return next((kind for kind in self.model.head_type.arithmetic if kind in self.hardware.peaks), self.arithmetic)

    def _kind(self, name: str, work: Work, arithmetic: str, share: tuple[float, float], constant_s: float) -> KindTime:
        """One kind of work on one of the devices; without work it takes no time, but `fixed` its constant."""
        kv_devices = min(self.devices, self.model.shape.kv_heads)
        each = Work(
            work.operations / self.devices,
            work.weight_bytes / self.devices,
            work.kv_bytes / kv_devices,  # more devices than KV heads keep copies
            work.activation_bytes / (1 if name == "fixed" else self.devices),
        )
        constant_s = constant_s if work.bytes or name == "fixed" else 0.0
        return KindTime.of(name, each, self.hardware, arithmetic, share, constant_s)

    def _all_reduce(self, tokens: int) -> KindTime:
        """Two a layer, of one row per token: each device sends 2·(n-1)/n of it (a ring)."""
        none = KindTime("all-reduce", Work(), self.arithmetic, self._peak, 0.0, 0.0, 0.0)
        if self.devices == 1 or not tokens:
            return none
        count, sizes = 2 * self.model.shape.layers, self.model.shape
        sent = 2 * (self.devices - 1) / self.devices * tokens * sizes.width * ACTIVATION_BYTES
        ideal = self.efficiency.origin == "peaks"
        link = (self.hardware.link_bandwidth or inf) * (1 if ideal else LINK_EFFICIENCY)
        return replace(none, link_s=count * (sent / link + (0 if ideal else LINK_LATENCY_S)))

    def _check_devices(self) -> None:
        heads = self.model.shape.heads
        if self.devices < 1 or heads % self.devices:
            allowed = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
            raise InvalidParameterError(
                f"--tp {self.devices} does not divide the {heads} heads of {self.model.name}; possible: {allowed}", "tp"
            )
        if self.devices > 1 and self.hardware.link_bandwidth is None:
            raise InvalidParameterError(
                f"no link between devices is known for {self.hardware.id}; --tp has to be 1", "tp"
            )

    def generation_s(self, prompt: int, output: int, batch: int = 1) -> tuple[float, float, float]:
        """Seconds to the first token, of the mean decode step, and of the whole, for `batch` sequences in step with
        each other. The first token comes from prefill: `output` tokens take `output` - 1 decode steps."""
        first = self.estimate(prefill_shape(prompt, batch)).expected_ns / 1e9
        steps = max(0, output - 1)
        middle = (self.estimate(decode_shape_of(prompt + 1, batch)).expected_ns
                  + self.estimate(decode_shape_of(prompt + max(1, steps), batch)).expected_ns) / 2e9  # fmt: skip
        return first, middle, first + steps * middle


def arithmetic_for(model: ModelSpec, hardware: Hardware) -> str:
    """The best arithmetic that weight type and device allow. Raises `InvalidParameterError` if there is none."""
    wanted = model.weight_type.arithmetic
    for kind in wanted:
        if kind in hardware.peaks:
            return kind
    raise InvalidParameterError(
        f"{hardware.id} ({hardware.name}) has no {' or '.join(map(str.upper, wanted))} arithmetic in the table, which "
        f"{model.weight_type.name} weights need; it has {', '.join(map(str.upper, hardware.peaks))}. "
        "Choose other --weights, or --compute to widen them", "weights",
    )  # fmt: skip


_ARITHMETIC_BYTES = {"fp32": 4.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "fp4": 0.5}


def _checked(arithmetic: str, model: ModelSpec) -> str:
    """Weights can be widened before they are multiplied, not narrowed: that would be another way to store them."""
    if arithmetic not in _ARITHMETIC_BYTES:
        raise InvalidParameterError(
            f"--compute {arithmetic}: unknown arithmetic; known: {', '.join(_ARITHMETIC_BYTES)}", "compute"
        )
    if model.weight_type.bytes > 1.125 * _ARITHMETIC_BYTES[arithmetic]:  # the scales of a group take some
        raise InvalidParameterError(
            f"--compute {arithmetic}: {model.weight_type.name} weights are wider than that; choose narrower --weights",
            "compute",
        )
    return arithmetic


def prefill_shape(prompt: int, batch: int = 1) -> StepShape:
    """One step that computes `batch` whole prompts and the first token of each."""
    one = StepShape().with_slice(0, prompt, 1)
    return StepShape(*(batch * amount for amount in one))


def decode_shape_of(context: int, batch: int) -> StepShape:
    """One decode step of `batch` sequences whose token sees `context` positions, its own included."""
    return decode_shape(batch, batch * context)
