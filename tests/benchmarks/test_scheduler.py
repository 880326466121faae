"""The scheduler's benchmark: its rig keeps the scheduler's books, its costs are what was timed, its events happen."""

from pathlib import Path

import pytest

from benchmarks import host_share, report, results, scheduler, scheduler_costs
from benchmarks.host_share import Elapsed, share_outside
from benchmarks.measurement import Spread
from benchmarks.scheduler_rig import Rig, Turn
from twostep.config.configs import SchedulerSettings
from twostep.core.plan import Plan, Resolved
from twostep.core.request import BLOCK_TOKENS
from twostep.metrics.summary import percentile

SETTINGS = SchedulerSettings(blocks=(200,), max_num_seqs=8, max_num_batched_tokens=1024, chunking="tokens=512")


def test_a_request_whose_kv_arrives_decodes_after_one_step() -> None:
    rig = Rig(SETTINGS)
    for _ in range(4):
        rig.arrive(100, 50, arrived=True)
    assert [chunk.tokens for chunk in rig.turn().plan.chunks] == [1] * 4
    assert len(rig.scheduler.decode_batch) == 4
    assert not rig.turn().plan.chunks


@pytest.mark.parametrize("hashing", [True, False])
def test_the_rig_names_each_block_that_fills(hashing: bool) -> None:
    rig = Rig(SETTINGS, hashing=hashing)
    rig.arrive(20, 60)
    for _ in range(40):
        rig.turn()
        rig.scheduler.check()
    [seq] = rig.scheduler.live.values()
    assert rig.scheduler.computed(seq) == 59
    assert seq.published == (59 // BLOCK_TOKENS if hashing else 0)


def test_requests_of_the_rig_finish_and_leave_nothing() -> None:
    rig = Rig(SETTINGS)
    rig.arrive(20, 5)
    finished = [end for _ in range(6) for end in rig.turn().resolved.finished]
    assert [end.known for end in finished] == [25]
    assert rig.scheduler.idle
    rig.scheduler.check()


def turn(plan_ns: int, advance_ns: int = 0, resolve_ns: int = 0) -> Turn:
    return Turn(Plan(1, 0, 0), Resolved(), plan_ns, advance_ns, resolve_ns)


def test_a_step_costs_the_mean_over_the_steps_in_which_all_begin_a_block() -> None:
    quick = [turn(1000, 2000, 3000)] * 15
    rounds = [[*quick, turn(1000, 2000, 19_000)] * 2, [*quick, turn(1000, 2000, 51_000)] * 2]
    cost = scheduler_costs.decode_batch_cost(256, "tokens", rounds)
    assert cost.us == Spread(8, 7, 9, 2)
    assert cost.p99_us == Spread(38, 22, 54, 2)
    assert cost.parts_us == {"plan": 1, "advance": 2, "resolve": 5}


def test_percentiles_lie_between_values() -> None:
    assert [percentile([4.0, 1.0, 3.0], percent) for percent in (0, 50, 75, 100)] == [1, 3, 3.5, 4]
    assert percentile([7.0], 99) == 7


@pytest.mark.parametrize("chunking", scheduler_costs.CHUNKINGS)
@pytest.mark.parametrize("event", scheduler_costs.EVENTS)
def test_every_event_can_be_timed_with_either_budget(event: str, chunking: str) -> None:
    costs = scheduler_costs.EVENTS[event](chunking, 16, 3)
    assert len(costs) == 3


def test_what_is_not_kernels_is_a_share_of_the_wall_time() -> None:
    assert share_outside(Elapsed(wall_ns=200, kernels_ns=150, steps_ns=180)) == pytest.approx((0.25, 0.1))


def test_a_quick_measurement_yields_a_result_that_all_tables_can_be_made_of(
    default_model_path: Path, tmp_path: Path
) -> None:
    assert scheduler.main(["--quick", "--out", str(tmp_path / "scheduler-x.json")]) == 0
    [result] = results.read("scheduler", tmp_path)
    assert {point["standing"] for point in result["standing"]} == set(scheduler_costs.QUICK.standing)
    for share in result["host"]:
        assert share["batch"] == host_share.QUICK.batch
        assert 0 < share["outside_steps"]["median"] < share["outside_kernels"]["median"] < 1
    text = report.scheduler(tmp_path)
    assert result["machine"]["cpu"] in text
    assert f"| {default_model_path.stem}, batch" in text


def test_a_folder_that_is_not_there_is_found_before_measuring(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert scheduler.main(["--quick", "--out", str(tmp_path / "none" / "x.json")]) == 1
    assert capsys.readouterr().err.startswith("benchmarks.scheduler: --out ")
