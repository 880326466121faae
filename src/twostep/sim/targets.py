"""What can be simulated: a device of the hardware table, or a machine that was calibrated. Sizes memory, gives step
times, and says where each number comes from."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from twostep.config.configs import EngineConfig, SchedulerSettings
from twostep.config.values import KvMemory, MemoryBlocks, MemoryBytes, MemoryShare
from twostep.core.cost import decode_shape
from twostep.core.policies import TimeBudget
from twostep.core.request import BLOCK_TOKENS, blocks_for
from twostep.core.scheduler import least_step_tokens
from twostep.errors import InvalidParameterError, MemoryPlanError
from twostep.metrics.load import Limits
from twostep.perf.machine_profile import MachineProfile
from twostep.perf.roofline_model import RooflineModel
from twostep.perf.step_time_model import StepTimeModel
from twostep.perf.step_times import StepTimes
from twostep.sim.simulation import FrontEndCosts, ReplicaSpec
from twostep.spec.kv_layout import VECTOR_ELEMENTS, KvLayout, grouped
from twostep.spec.memory import MemoryDemand, MemoryPlan, plan_share, plan_stated, weights_bytes
from twostep.spec.model_spec import ModelSpec

DEVICE_SHARE = MemoryShare(0.9)
"""Of a device's memory, unless the user says otherwise: nothing else runs on it."""
HOST_NS = 700_000
"""Between the kernels of two steps: what Twostep's own host takes for 16 streams (benchmarks/results/scheduler-*)."""
FRONT_END = FrontEndCosts(request_ns=4_000_000)
"""What Twostep's own front end adds to a first token (docs/serving.md)."""
KV_ELEMENT_BYTES = 2
"""Of the elements in which KV layouts count."""


@dataclass(frozen=True)
class Assumption:
    """A number that a simulation rests on, in words with its origin."""

    name: str
    words: str


@dataclass(frozen=True)
class Target:
    """What is simulated: one kind of replica, its front end, and what both rest on."""

    replica: ReplicaSpec
    front_end: FrontEndCosts
    where: str
    """The device or machine, in words."""
    assumptions: tuple[Assumption, ...]

    @property
    def least_step_ns(self) -> int:
        """The shortest step: one sequence decodes, with nothing before it."""
        return self.replica.cost.estimate(decode_shape(1, 1)).expected_ns + self.replica.host_ns

    def recorded_costs(self) -> Mapping[str, Any] | None:
        """What a recording has to keep of the costs that steps are planned with. Raises `InvalidParameterError` if
        chunks are sized by those of a table, which it cannot keep."""
        if isinstance(self.replica.cost, StepTimeModel):
            return self.replica.cost.costs.to_json()
        if isinstance(self.replica.settings.chunking, TimeBudget):
            raise InvalidParameterError(
                "record: a recording cannot keep the costs of a hardware table, by which chunks are sized here; use "
                "--chunking tokens=N, or --profile",
                "record",
            )
        return None


def check_limits(target: Target, limits: Limits) -> None:
    """Raises `InvalidParameterError` for limits that one request alone misses, with the nearest that it may meet."""
    least_ns = target.least_step_ns
    first_ns = least_ns + target.front_end.request_ns + target.front_end.reply_ns
    chunking = target.replica.settings.chunking
    budget_ns = chunking.budget_ns if isinstance(chunking, TimeBudget) else None
    wanted = [("itl_budget", budget_ns, least_ns)]
    wanted += [
        (f"goodput: {name}", None if limit_s is None else round(limit_s * 1e9), possible_ns)
        for name, limit_s, possible_ns in (
            ("ttft", limits.ttft_s, first_ns),
            ("itl", limits.itl_s, least_ns),
            ("tpot", limits.tpot_s, least_ns),
            ("e2e", limits.e2e_s, first_ns),
        )
    ]
    for name, limit_ns, possible_ns in wanted:
        if limit_ns is not None and limit_ns < possible_ns:
            raise InvalidParameterError(
                f"{name} is {limit_ns / 1e6:g} ms; on {target.where} not even one request alone with a single token "
                f"of context keeps that: the nearest possible is {-(-possible_ns // 100_000) / 10:g} ms",
                "goodput" if name.startswith("goodput") else name,
            )


def device_target(
    roofline: RooflineModel,
    config: EngineConfig,
    *,
    kv_memory: KvMemory = DEVICE_SHARE,
    host_ns: int = HOST_NS,
    front_end: FrontEndCosts = FRONT_END,
) -> Target:
    """One replica of the roofline's model on its devices, with these settings.

    Raises `MemoryPlanError` with the arithmetic if the model does not fit, `InvalidParameterError` for settings that
    contradict the model or each other.
    """
    settings, memory = _settings(roofline, config, kv_memory)
    replica = ReplicaSpec(settings, StepTimes(roofline), host_ns=host_ns)
    name, devices = roofline.hardware.id, roofline.devices
    where = f"{name} (each replica on {devices})" if devices > 1 else name
    assumptions = (
        Assumption(
            "step times",
            f"{ORIGINS.get(roofline.efficiency.origin, roofline.efficiency.origin)}; specifications: confidence "
            f"{roofline.hardware.confidence}",
        ),
        _kv_assumption(memory, settings, "arithmetic"),
        *_host_assumptions(replica, front_end),
    )
    return Target(replica, front_end, where, assumptions)


def calibrated_target(
    profile: MachineProfile,
    origin: str,
    settings: SchedulerSettings,
    memory: MemoryPlan,
    *,
    noise: bool = False,
    host_ns: int = HOST_NS,
    front_end: FrontEndCosts = FRONT_END,
) -> Target:
    """One replica on the machine of the profile. `origin`: where that comes from, in words. `noise`: each step is off
    by the relative error of one of the profile's steps, drawn at random."""
    known = StepTimeModel(profile.costs)
    residuals = [step.ns / known.estimate(step.shape).expected_ns - 1 for step in profile.steps] if noise else []
    replica = ReplicaSpec(settings, known, lambda: StepTimeModel(profile.costs), host_ns, residuals)
    held_out = ", ".join(f"{region} {errors.mean:.1%}" for region, errors in profile.held_out.items())
    drawn = f"; noise: drawn from {len(residuals)} residuals" if noise else "; no noise"
    assumptions = (
        Assumption("step times", f"{origin}; mean error of steps that it did not see: {held_out}{drawn}"),
        _kv_assumption(memory, settings, "free memory of this machine"),
        *_host_assumptions(replica, front_end),
    )
    return Target(replica, front_end, f"{profile.identity.cpu}, {profile.identity.threads} threads", assumptions)


def _settings(
    roofline: RooflineModel, config: EngineConfig, kv_memory: KvMemory
) -> tuple[SchedulerSettings, MemoryPlan]:
    context = roofline.model.shape.context
    longest = context if config.max_model_len is None else config.max_model_len
    if not 2 <= longest <= context:
        raise InvalidParameterError(
            f"max_model_len is {longest}; it has to be from 2 to the context of {roofline.model.name}, {context}"
        )
    least = least_step_tokens(config.max_num_seqs, config.chunking)
    step_tokens = config.max_num_batched_tokens or max(longest, least)
    memory = _memory(roofline, config, step_tokens, kv_memory)
    useful = config.max_num_seqs * blocks_for(longest)
    blocks = min(memory.blocks, useful) if isinstance(kv_memory, MemoryShare) else memory.blocks
    names = ("max_num_seqs", "batching", "chunking", "admission", "priority_preempts")
    settings = SchedulerSettings(
        blocks=memory.demand.group_blocks(blocks),
        windows=memory.demand.layout.windows,
        max_num_batched_tokens=step_tokens,
        max_model_len=longest,
        **{name: getattr(config, name) for name in names},
    )
    try:
        settings.config()
    except ValueError as error:
        raise InvalidParameterError(str(error)) from None
    return settings, memory


# --- memory -------------------------------------------------------------------------------------------------------


def _memory(roofline: RooflineModel, config: EngineConfig, step_tokens: int, kv_memory: KvMemory) -> MemoryPlan:
    """Raises `MemoryPlanError`."""
    model, hardware, devices = roofline.model, roofline.hardware, roofline.devices
    demand = MemoryDemand(
        model.shape,
        _layout(model, devices),
        weights_bytes(model),
        step_tokens,
        logit_rows=config.max_num_seqs,
        sequences=config.max_num_seqs,
    )
    free_bytes = int(hardware.memory_bytes) * devices
    match kv_memory:
        case MemoryShare(share=share):
            memory = plan_share(demand, free_bytes, share)
        case MemoryBytes(count=count):
            memory = plan_stated(demand, free_bytes, count)
        case MemoryBlocks(count=count):
            memory = MemoryPlan(demand, free_bytes, None, count)
    if fault := memory.fault(2 * BLOCK_TOKENS):
        where = f"{devices} x {hardware.name}" if devices > 1 else hardware.name
        raise MemoryPlanError(f"{model.name} on {where}: {fault}. {_advice(roofline, demand)}")
    return memory


def _advice(roofline: RooflineModel, demand: MemoryDemand) -> str:
    """The nearest that would fit."""
    size, share = roofline.hardware.memory_bytes, DEVICE_SHARE.share
    needed = demand.fixed_bytes + demand.kv_bytes(2)
    counts = (n for n in range(1, roofline.model.shape.heads + 1) if roofline.model.shape.heads % n == 0)
    enough = next((n for n in counts if n * size * share >= needed), None)
    if enough is None:
        wider = "It fits on no number of these devices"
    elif enough <= roofline.devices:
        wider = f"It fits with --kv-memory {share:g}"
    else:
        wider = f"It fits on {enough} of these devices: --tp {enough}"
    return (
        f"{wider}. Narrower --weights, fewer --max-num-batched-tokens or --max-num-seqs, or --hardware with more "
        "memory help as well"
    )


def _layout(model: ModelSpec, devices: int) -> KvLayout:
    """KV layouts count in elements of 16 bits: a head of other elements has as many as take the same bytes. More
    devices than KV heads keep copies. Raises `InvalidParameterError` for types of which a head is no whole number."""
    elements = model.shape.head_dim * model.kv_type.bytes / KV_ELEMENT_BYTES
    if elements % 1 or (elements % VECTOR_ELEMENTS and model.kv_type.bytes != KV_ELEMENT_BYTES):
        raise InvalidParameterError(
            f"--kv {model.kv_type.name}: only KV caches of 8, 16 and 32 bits can be simulated: fp8, int8, fp16, bf16, "
            "fp32",
            "kv",
        )
    return KvLayout(grouped(model.layer_windows), max(model.shape.kv_heads, devices), int(elements))


# --- words --------------------------------------------------------------------------------------------------------

ORIGINS = {
    "measured": "efficiency fitted to measured kernels of this device",
    "datasheet": "the datasheet's peaks, with the typical efficiency of other devices: not measured on this one",
    "peaks": "the datasheet's peaks, which no real kernel reaches",
}


def _kv_assumption(memory: MemoryPlan, settings: SchedulerSettings, origin: str) -> Assumption:
    lines = memory.arithmetic(settings.max_model_len)
    sized = next(line.removeprefix("KV cache: ") for line in lines if line.startswith("KV cache: "))
    used = "+".join(map(str, settings.blocks))
    fewer = f"; {used} blocks used, as the sequences fill no more" if settings.blocks[0] < memory.blocks else ""
    return Assumption("KV cache", f"{sized}{fewer} ({origin})")


def _host_assumptions(replica: ReplicaSpec, front_end: FrontEndCosts) -> Iterator[Assumption]:
    host_ms, request_ms = replica.host_ns / 1e6, front_end.request_ns / 1e6
    yield Assumption("host", f"{host_ms:g} ms between steps, {_origin(replica.host_ns == HOST_NS, 'scheduler')}")
    yield Assumption("front end", f"{request_ms:g} ms a request, {_origin(front_end == FRONT_END, 'front end')}")


def _origin(is_default: bool, part: str) -> str:
    return f"as measured of Twostep's own {part} on two cores of an EPYC" if is_default else "as given"
