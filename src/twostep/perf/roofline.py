"""What `twostep roofline` answers: both phases of a request on a device, by kind of work, and what fits in memory."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from twostep.core.cost import StepShape
from twostep.errors import InvalidParameterError
from twostep.perf.hardware import Hardware
from twostep.perf.roofline_model import PEAKS, KindTime, RooflineModel, decode_shape_of, prefill_shape
from twostep.spec.memory import kv_bytes_per_token, sequence_kv_bytes, sequences_that_fit, weights_bytes
from twostep.spec.model_spec import ModelSpec


@dataclass(frozen=True)
class Question:
    """`batch` requests at a time, `prompt` tokens in and `output` tokens out each, on `devices` that share layers."""

    prompt: int
    output: int
    batch: int = 1
    devices: int = 1


class Row(NamedTuple):
    """One kind of work in a step: its time at the peaks, and as expected of real kernels."""

    ideal: KindTime
    expected: KindTime


@dataclass(frozen=True)
class Phase:
    """One step of a phase. `tokens` are computed in it, `context` positions are seen by the last of each sequence."""

    name: str
    tokens: int
    context: int
    rows: tuple[Row, ...]

    @property
    def ideal_s(self) -> float:
        """At the peaks: a lower bound."""
        return sum(row.ideal.seconds for row in self.rows)

    @property
    def expected_s(self) -> float:
        """With the efficiency of real kernels."""
        return sum(row.expected.seconds for row in self.rows)

    @property
    def operations(self) -> float:
        """Of one device."""
        return sum(row.ideal.work.operations for row in self.rows)

    @property
    def bytes(self) -> float:
        """Of one device."""
        return sum(row.ideal.work.bytes for row in self.rows)

    @property
    def intensity(self) -> float:
        """Operations per byte of the whole step."""
        return self.operations / self.bytes

    @property
    def largest(self) -> Row:
        """The kind that takes longest."""
        return max(self.rows, key=lambda row: row.expected.seconds)


class Times(NamedTuple):
    """Seconds of an answer: to the first token, between tokens on average, to the last token."""

    ttft_s: float
    itl_s: float
    e2e_s: float


class Roofline:
    """The answer for one model on one device. Raises `InvalidParameterError` for a combination that cannot be."""

    def __init__(self, model: ModelSpec, hardware: Hardware, question: Question, arithmetic: str | None = None) -> None:
        if question.prompt + question.output > model.shape.context:
            raise InvalidParameterError(
                f"{question.prompt} + {question.output} tokens are more than the context of {model.name}, "
                f"{model.shape.context} tokens; shorten --prompt or --output", "prompt",
            )  # fmt: skip
        self.model = model
        self.hardware = hardware
        self.question = question
        self.expected = RooflineModel(model, hardware, tensor_parallel=question.devices, arithmetic=arithmetic)
        self.ideal = self.expected.with_efficiency(PEAKS)

    @property
    def origin(self) -> str:
        """`measured` or `datasheet`: where the efficiency of the expected times comes from."""
        return self.expected.efficiency.origin

    @property
    def ridge(self) -> float:
        """Of the arithmetic of the linear layers, in operations per byte."""
        return self.hardware.ridge(self.expected.arithmetic)

    @property
    def request_tokens(self) -> int:
        """Tokens of a whole request."""
        return self.question.prompt + self.question.output

    @cached_property
    def prefill(self) -> Phase:
        """The step that computes all prompts."""
        asked = self.question
        return self._phase("prefill", prefill_shape(asked.prompt, asked.batch), asked.prompt)

    @cached_property
    def decode(self) -> Phase:
        """The decode step in the middle of the answers."""
        asked = self.question
        context = asked.prompt + (asked.output + 1) // 2
        return self._phase("decode", decode_shape_of(context, asked.batch), context)

    def _phase(self, name: str, shape: StepShape, context: int) -> Phase:
        rows = zip(self.ideal.times(shape), self.expected.times(shape), strict=True)
        used = tuple(Row(*row) for row in rows if row[1].seconds > 0)
        return Phase(name, shape.tokens, context, used)

    def times(self, roofline: RooflineModel) -> Times:
        """Of `ideal` or `expected`."""
        return Times(*roofline.generation_s(self.question.prompt, self.question.output, self.question.batch))

    @property
    def output_rate(self) -> float:
        """Expected output tokens per second of the whole batch, from arrival to the last token."""
        return self.question.batch * self.question.output / self.times(self.expected).e2e_s

    @property
    def joules_per_token(self) -> float | None:
        """Per output token, if the devices drew their TDP all the time: an indication, and an upper one for decode."""
        power = self.hardware.tdp_w
        return None if power is None else power * self.question.devices / self.output_rate

    @property
    def memory_bytes(self) -> float:
        """Of all devices."""
        return self.question.devices * self.hardware.memory_bytes

    @property
    def weights_bytes(self) -> int:
        return weights_bytes(self.model)

    @property
    def kv_bytes_per_token(self) -> float:
        return kv_bytes_per_token(self.model)

    @property
    def request_kv_bytes(self) -> float:
        """KV of one whole request."""
        return sequence_kv_bytes(self.model, self.request_tokens)

    @property
    def sequences(self) -> int:
        """How many whole requests fit beside the weights, by arithmetic."""
        return sequences_that_fit(self.model, self.memory_bytes, self.request_tokens)

    @property
    def crossing_batch(self) -> int:
        """The batch from which the linear layers of a decode step are bound by arithmetic instead of bandwidth, at the
        peaks and without activations: ridge x bytes of a weight / 2. With experts each gets its share of the batch."""
        experts = self.model.experts
        spread = experts.routed / experts.active if experts else 1.0
        return round(self.ridge * self.model.weight_type.bytes / 2 * spread)

    def json(self) -> dict[str, Any]:
        """All of it as numbers with their units in the names."""
        asked, model, hardware = self.question, self.model, self.hardware
        return {
            "model": {
                "name": model.name,
                "source": model.source,
                "parameters": model.parameters,
                "active_parameters": model.active_parameters,
                "weights": model.weight_type.name,
                "kv": model.kv_type.name,
                "weights_bytes": self.weights_bytes,
                "kv_bytes_per_token": self.kv_bytes_per_token,
            },
            "hardware": {
                "id": hardware.id,
                "name": hardware.name,
                "devices": asked.devices,
                "memory_bytes": self.memory_bytes,
                "bandwidth_bytes_per_s": hardware.bandwidth,
                "arithmetic": self.expected.arithmetic,
                "peak_operations_per_s": hardware.peak(self.expected.arithmetic),
                "ridge_operations_per_byte": self.ridge,
                "tdp_w": hardware.tdp_w,
                "confidence": hardware.confidence,
                "source": hardware.source,
            },
            "expected_from": self.origin,
            "efficiency": self.expected.efficiency._asdict(),
            "request": {"prompt_tokens": asked.prompt, "output_tokens": asked.output, "batch": asked.batch},
            "phases": [_phase_json(phase) for phase in (self.prefill, self.decode)],
            "roofline": self.times(self.ideal)._asdict(),
            "expected": self.times(self.expected)._asdict(),
            "output_tokens_per_s": self.output_rate,
            "joules_per_output_token": self.joules_per_token,
            "sequences_that_fit": self.sequences,
            "crossing_batch": self.crossing_batch,
        }


def _phase_json(phase: Phase) -> dict[str, Any]:
    return {
        "phase": phase.name,
        "tokens": phase.tokens,
        "context": phase.context,
        "roofline_s": phase.ideal_s,
        "expected_s": phase.expected_s,
        "operations": phase.operations,
        "bytes": phase.bytes,
        "intensity_operations_per_byte": phase.intensity,
        "kinds": [_row_json(row) for row in phase.rows],
    }


def _row_json(row: Row) -> dict[str, Any]:
    work = row.ideal.work
    return {
        "kind": row.ideal.name,
        "operations": work.operations,
        "weight_bytes": work.weight_bytes,
        "kv_bytes": work.kv_bytes,
        "activation_bytes": work.activation_bytes,
        "intensity_operations_per_byte": work.intensity,
        "bound": row.expected.bound,
        "roofline_s": row.ideal.seconds,
        "expected_s": row.expected.seconds,
    }
