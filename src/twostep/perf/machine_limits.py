"""What the steps of a model take at least on a calibrated machine: their operations at its measured peaks, and their
bytes at its measured bandwidth. What a step really took, against these, says how near it came to either limit."""

from twostep.core.cost import LeastTimes, StepShape
from twostep.perf.hardware import bandwidth_at
from twostep.perf.machine_profile import MachineProfile
from twostep.perf.step_work import step_work
from twostep.spec.model_spec import ModelSpec


class MachineLimits:
    """The limits of one model on the machine of `profile`."""

    def __init__(self, model: ModelSpec, profile: MachineProfile) -> None:
        self._model = model
        self._read = profile.roofs.read
        self._fp32 = profile.roofs.fp32_flops_per_s
        quantised = "int8" in model.weight_type.arithmetic
        self._linear = profile.roofs.int8_ops_per_s if quantised else self._fp32
        """Operations per second of the linear layers."""

    def least_ns(self, shape: StepShape) -> LeastTimes:
        """Of a step of this shape. Weights are read once, and so is the KV of each sequence; activations stay in the
        caches."""
        work = step_work(self._model, shape)
        linear = work.linear.operations + work.logits.operations
        attention = work.prefill_attention.operations + work.decode_attention.operations
        weights = work.linear.weight_bytes + work.logits.weight_bytes
        read = weights + work.prefill_attention.kv_bytes + work.decode_attention.kv_bytes
        return LeastTimes(
            int(1e9 * (linear / self._linear + attention / self._fp32)),
            int(1e9 * read / bandwidth_at(self._read, read)) if read else 0,
        )
