"""The benchmark of inter-token latency: what it counts in a recording, how parts are merged, tables and plots."""

import argparse
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks import itl, itl_steps, itl_tables, machine, results
from benchmarks.itl import AUTO, OURS, Point, Result
from benchmarks.itl_steps import Steps
from benchmarks.measurement import EngineError
from benchmarks.peers_contenders import Place
from benchmarks.traces import Trace, during_ms
from twostep.config.configs import SchedulerSettings
from twostep.core.loop import EngineLoop
from twostep.core.request import Request
from twostep.core.scheduler import Scheduler
from twostep.perf.linear import LinearCostModel
from twostep.recording.reader import Recording
from twostep.recording.writer import RecordedSurroundings, Recorder
from twostep.sim.events import EventQueue, LoopHost
from twostep.sim.modelled import Arrival, ModelledExecutor, SimulatedClient, VirtualClock
from twostep.sim.noise import Noise, Sample, recorded_noise

MS = 1_000_000


def recorded(path: Path, budget: str, factor: float = 1.0, starved: float = 0.0) -> Path:
    """Four streams, and a prompt of 512 tokens that arrives; half of the steps take `factor` times what is expected."""
    settings = SchedulerSettings(blocks=(500,), max_model_len=4096, chunking=budget)
    clock, cost = VirtualClock(), LinearCostModel((3e6, 6e5, 20.0, 2e5))
    scheduler = Scheduler(settings.config(), LinearCostModel((3e6, 6e5, 20.0, 2e5), doubt=0.0))
    executor = ModelledExecutor(cost, clock, 200_000, Noise([Sample(1.0), Sample(factor, starved)]).draws(1))
    client = SimulatedClient(executor)
    with Recorder(path, settings, {}) as recorder:
        around = RecordedSurroundings(clock, client, client, recorder)
        loop = EngineLoop(scheduler, executor, clock=around, inbox=around, observer=around)
        queue = EventQueue(clock)
        arrivals = [Arrival(0, Request(f"s{i}", 32, 400)) for i in range(4)]
        arrivals.append(Arrival(500 * MS, Request("n", 512, 2)))
        LoopHost(queue, loop, executor, client).expect(arrivals)
        queue.run()
    return path


def test_steps_with_a_prompt_are_counted_by_streams_and_length(tmp_path: Path) -> None:
    found = itl_steps.read(recorded(tmp_path / "a.rec", "time=40"))
    assert found.keys() == {(4, 512)}
    steps = found[4, 512]
    assert 10 < steps.steps < 100
    assert (steps.late, steps.impossible, steps.disturbed) == (0, 0, 0)
    assert steps.budget_ms == 40
    assert steps.host_ms == pytest.approx(0.2)


@pytest.mark.parametrize(("starved", "disturbed"), [(0.1, False), (0.3, True)])
def test_late_steps_are_counted_and_marked_if_they_were_disturbed(
    tmp_path: Path, starved: float, disturbed: bool
) -> None:
    steps = itl_steps.read(recorded(tmp_path / "a.rec", "time=40", 4.0, starved))[4, 512]
    assert steps.late > 0
    assert steps.late_disturbed == (steps.late if disturbed else 0)
    assert (0 < steps.disturbed < steps.steps) == disturbed


def test_without_a_budget_nothing_is_late(tmp_path: Path) -> None:
    steps = itl_steps.read(recorded(tmp_path / "a.rec", "tokens=128", 3.0))[4, 512]
    assert (steps.late, steps.budget_ms) == (0, None)


def test_the_noise_of_a_recorded_run_is_that_of_its_machine(tmp_path: Path) -> None:
    still = recorded_noise(Recording(recorded(tmp_path / "still.rec", "time=40")))
    assert {round(sample.factor, 2) for sample in still.samples} == {1.0}
    noisy = recorded_noise(Recording(recorded(tmp_path / "noisy.rec", "time=40", 2.0, 0.3)))
    slow = [sample.factor for sample in noisy.samples if sample.starved > 0.25]
    assert 0.4 < len(slow) / len(noisy.samples) < 0.6
    assert min(slow) > max(sample.factor for sample in noisy.samples if not sample.starved)
    assert noisy.longest == max(slow)


def test_a_recording_that_is_too_short_has_no_noise(tmp_path: Path) -> None:
    path = tmp_path / "short.rec"
    with Recorder(path, SchedulerSettings(blocks=(5,), max_model_len=64), {}):
        pass
    with pytest.raises(ValueError, match="no more than 64 steps"):
        recorded_noise(Recording(path))


# --- gaps -------------------------------------------------------------------------------------------------------------


def test_gaps_that_overlap_the_wait_of_a_newcomer() -> None:
    stream = Trace(0, 6, [1.0, 1.1, 1.3, 1.6, 2.0, 2.5])
    newcomers = [Trace(1.05, 1, [1.2]), Trace(2.1, 1, [2.2])]
    assert during_ms(stream, newcomers) == pytest.approx([100, 200, 500])
    assert stream.gaps_until_ms(1.5) == pytest.approx([100, 200])


# --- parts ------------------------------------------------------------------------------------------------------------


def point(
    name: str, budget_ms: float | None, p99_ms: float, streams: int = 4, engine: str = OURS, **more: Any
) -> Point:
    steps = Steps(100, 3, 2, 5, 1, budget_ms, 0.4) if engine == OURS else None
    return replace(
        Point(engine, name, budget_ms, streams, 2048, 8.0, 400, p99_ms, 2 * p99_ms, 900.0, steps), **more
    )  # fmt: skip


def test_a_budget_in_milliseconds_is_the_same_setting_as_before() -> None:
    before = asdict(point("budget 2 decode steps, 18.4 ms", 18.4, 17))
    assert itl._again(before, [point("budget 2 decode steps, 19.0 ms", 19.0, 18)])
    assert not itl._again(before, [point("budget 3 decode steps, 19.0 ms", 19.0, 18)])
    assert not itl._again(before, [point("budget auto", None, 18)])
    assert not itl._again(before, [point("budget 2 decode steps, 19.0 ms", 19.0, 18, streams=16)])
    assert itl._again(asdict(point("budget auto", None, 5)), [point("budget auto", None, 18)])


def result(points: list[Point], **more: Any) -> dict[str, Any]:
    about = {
        "cpu": "X", "cores": 2, "flags": ["avx2"], "kernel": "6.1", "busy": 0.0, "commit": "abcdefghi",
        "modified": False, "date": "2026-11-30T00:00:00",
    }  # fmt: skip
    return {
        "command": "make bench-itl", "machine": about, "threads": 2, "model": "m", "versions": {}, "missing": [],
        "points": [asdict(one) for one in points], **more,
    }  # fmt: skip


POINTS = [
    point("budget 2 decode steps, 20 ms", 20.0, 18.0),
    point("budget 3 decode steps, 30 ms", 30.0, 33.0),
    point("budget auto", None, 24.0, steps=Steps(100, 0, 0, 0, 0, 25.0, 0.4)),
    point("chunks: none", None, 900.0),
    point("llama-server Q4_1", None, 120.0, engine="llama.cpp"),
]


def test_the_table_marks_what_is_kept_and_says_what_disturbed() -> None:
    text = itl_tables.itl(result(POINTS, missing=[{"name": "OpenVINO", "reason": "not installed"}]))
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert rows[2] == "| budget 2 decode steps, 20 ms | 8 | 20 | **18** | 36 | 900 | 100 | 3 | 2 | 1 |"
    assert "| 30 | 33 |" in rows[3]
    assert "| 25 | **24** |" in rows[4]
    assert rows[6].endswith("| 900 |  |  |  |  |")
    assert text.endswith("* OpenVINO: not installed")


def test_the_plot_has_every_setting_and_is_the_same_again() -> None:
    [(path, svg)] = itl_tables.plots(result(POINTS))
    assert path == "plots/itl-4-2048-x.svg"
    ElementTree.fromstring(svg)
    assert all(f"{number}  {one.name}" in svg for number, one in enumerate(POINTS, 1))
    assert list(itl_tables.plots(result(POINTS))) == [(path, svg)]


def test_parts_are_merged_into_the_file(tmp_path: Path) -> None:
    path = tmp_path / "itl.json"
    made = Result("c", machine.watched(), 2, "m", POINTS, {"chunks: none": "1"}, [])
    results.write(made, "itl", path, quick=False)
    options = argparse.Namespace(out=path)
    new = replace(made, points=[point("budget 2 decode steps, 21 ms", 21.0, 20.0)], versions={"b": "2"})
    both = itl.merged(new, options)
    assert [one.name for one in both.points] == [*(one.name for one in POINTS[1:]), "budget 2 decode steps, 21 ms"]
    assert both.versions == {"chunks: none": "1", "b": "2"}


def test_only_the_asked_budgets_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(itl, "_decode_step_ms", lambda *asked: 10.04)
    monkeypatch.setattr(itl, "_twostep", lambda place, name, more, budget_ms=None: (name, tuple(more), budget_ms))
    place: Any = argparse.Namespace(options=argparse.Namespace(budget=["1.5", AUTO]))
    made: list[Any] = list(itl._budgets(4, place, itl.FULL))
    assert made == [
        ("budget 1.5 decode steps, 15.1 ms", ("--itl-budget", "15.1"), 15.1),
        ("budget auto", ("--itl-budget", "auto"), None),
    ]


def test_an_engine_that_is_not_installed_is_missing(tmp_path: Path) -> None:
    options = argparse.Namespace(peers_dir=tmp_path, llama_dir=None, openvino_python=None)
    place = Place(tmp_path / "m.gguf", 2, tmp_path, options)
    for part in ("openvino", "llama"):
        with pytest.raises(EngineError, match="not installed"):
            list(itl._settings(part, place, itl.QUICK))
