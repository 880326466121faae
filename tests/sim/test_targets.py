"""What can be simulated: sizes, step times, and what is refused."""

from dataclasses import replace
from typing import Any

import pytest
from support.calibrated import COSTS

from twostep.config.configs import EngineConfig
from twostep.config.values import MemoryBlocks, MemoryShare
from twostep.core.cost import decode_shape
from twostep.errors import InvalidParameterError, MemoryPlanError
from twostep.metrics.load import Limits
from twostep.perf.hardware import hardware_named
from twostep.perf.model_table import model_named
from twostep.perf.roofline_model import RooflineModel
from twostep.perf.step_time_model import StepTimeModel
from twostep.sim.targets import DEVICE_SHARE, Target, check_limits, device_target
from twostep.spec.memory import kv_bytes_per_token, weights_bytes
from twostep.spec.number_types import number_type


def target(
    model: str = "llama-3.1-8b", hardware: str = "h100", kv: str | None = None, devices: int = 1, **more: Any
) -> Target:
    kv_memory = more.pop("memory", DEVICE_SHARE)
    spec = model_named(model).with_types(kv=kv and number_type(kv))
    roofline = RooflineModel(spec, hardware_named(hardware), tensor_parallel=devices)
    return device_target(roofline, EngineConfig(**more), kv_memory=kv_memory)


@pytest.mark.parametrize(("kv", "devices"), [("fp16", 1), ("fp8", 1), ("fp16", 2)])
def test_blocks_are_what_the_arithmetic_of_memory_leaves(kv: str, devices: int) -> None:
    """Within what activations take: less than 1 GiB."""
    model, hardware = model_named("llama-3.1-8b").with_types(kv=number_type(kv)), hardware_named("h100")
    room = 0.9 * hardware.memory_bytes * devices - weights_bytes(model)
    block_bytes = 16 * kv_bytes_per_token(model)
    [blocks] = target(kv=kv, devices=devices).replica.settings.blocks
    assert room - (1 << 30) < blocks * block_bytes <= room


def test_more_devices_than_kv_heads_keep_copies() -> None:
    """llama-3.1-8b has 8 KV heads."""
    [eight], [sixteen] = (target(devices=n, max_num_seqs=256).replica.settings.blocks for n in (8, 16))
    assert sixteen == pytest.approx(eight, rel=0.05)


def test_a_window_gets_blocks_of_its_own() -> None:
    settings = target("gpt-oss-20b").replica.settings
    assert settings.windows == (None, 128)
    assert settings.blocks[0] > settings.blocks[1]


def test_blocks_as_stated() -> None:
    assert target(memory=MemoryBlocks(777)).replica.settings.blocks == (777,)


def test_a_model_that_does_not_fit_is_refused_with_the_devices_that_hold_it() -> None:
    with pytest.raises(MemoryPlanError, match=r"131\.4 GiB weights.* --tp 8\. Narrower"):
        target("llama-3.1-70b", "a10")
    assert target("llama-3.1-70b", "a10", devices=8).replica.settings.blocks[0] > 0


def test_a_small_share_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(MemoryPlanError, match=r"10 % of 74.* It fits with --kv-memory 0\.9\."):
        target(memory=MemoryShare(0.1))


def test_odd_kv_types_are_refused() -> None:
    with pytest.raises(InvalidParameterError, match="--kv int4: only KV caches of 8, 16 and 32 bits"):
        target(kv="int4")


def test_a_context_that_the_model_lacks_is_refused() -> None:
    with pytest.raises(InvalidParameterError, match=r"from 2 to the context of .*, 131072"):
        target(max_model_len=200_000)


def test_limits_that_nothing_can_meet_are_refused_with_the_nearest() -> None:
    tight = target(chunking="time=3")
    least_ms = tight.least_step_ns / 1e6
    assert 6 < least_ms < 9, "16 GB of weights at 3.35 TB/s, and the host"
    with pytest.raises(InvalidParameterError, match=r"itl_budget is 3 ms; on h100-sxm .* nearest possible is [6-8]"):
        check_limits(tight, Limits())
    plain = target()
    check_limits(plain, Limits(itl_s=0.01, ttft_s=0.02, tpot_s=0.01, e2e_s=0.1))
    for limits in (Limits(itl_s=0.001), Limits(tpot_s=0.001), Limits(ttft_s=0.002), Limits(e2e_s=0.002)):
        with pytest.raises(InvalidParameterError, match=r"goodput: .* nearest possible"):
            check_limits(plain, limits)


def test_every_number_has_an_origin() -> None:
    origins = {one.name: one.words for one in target().assumptions}
    assert "fitted to measured kernels" in origins["step times"]
    assert "datasheet" in {one.name: one.words for one in target(hardware="a30").assumptions}["step times"]
    assert "0.9" not in origins["KV cache"]
    assert "90 % of" in origins["KV cache"]
    assert origins["host"].startswith("0.7 ms")
    assert origins["front end"].startswith("4 ms")


def test_a_recording_keeps_calibrated_costs_and_refuses_those_of_a_table() -> None:
    device = target(chunking="tokens=256")
    assert device.recorded_costs() is None
    with pytest.raises(InvalidParameterError, match="--chunking tokens=N, or --profile"):
        target(chunking="time=40").recorded_costs()
    known = replace(device, replica=replace(device.replica, cost=StepTimeModel(COSTS)))
    assert known.recorded_costs() == COSTS.to_json()
    assert known.least_step_ns == StepTimeModel(COSTS).estimate(decode_shape(1, 1)).expected_ns + 700_000
