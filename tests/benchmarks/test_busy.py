"""The benchmark beside busy loops: the loops, the fair share, and the table."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import busy, busy_tables, machine, report, results
from benchmarks.busy import ALL_THREADS, ONE_THREAD, busy_loops, fair_share
from benchmarks.measurement import spread
from benchmarks.tables import TIMES

LLAMA = "llama.cpp Q4_0"
MACHINE = {
    "cpu": "X", "cores": 2, "flags": ["avx2"], "kernel": "6.1", "busy": 0.0, "commit": "abcdefghi", "modified": False,
    "date": "2026-11-30T00:00:00",
}  # fmt: skip


def result(points: dict[int, dict[str, float]], threads: int = 2) -> dict[str, Any]:
    names = list(dict.fromkeys(name for rates in points.values() for name in rates))
    return {
        "command": "python -m benchmarks.busy",
        "machine": MACHINE,
        "threads": threads,
        "context": 128,
        "tokens": 128,
        "runs": 5,
        "contenders": [{"name": name, "version": "1", "file": "m.gguf"} for name in names],
        "points": [
            {
                "loops": loops,
                "fair_share": fair_share(2, threads, loops),
                "tokens_per_s": {name: vars(spread([rate])) for name, rate in rates.items()},
            }
            for loops, rates in points.items()
        ],
    }


@pytest.mark.parametrize(
    ("cpus", "threads", "loops", "share"),
    [(2, 2, 0, 1), (2, 2, 2, 1 / 2), (2, 2, 4, 1 / 3), (4, 2, 1, 1), (4, 2, 6, 1 / 2), (1, 1, 1, 1 / 2)],
    ids=["alone", "two", "four", "threads on a part of the CPUs", "and many loops", "one CPU"],
)
def test_fair_share(cpus: int, threads: int, loops: int, share: float) -> None:
    assert fair_share(cpus, threads, loops) == share


def test_loops_run_while_measured_and_are_gone_afterwards() -> None:
    with busy_loops(2) as loops:
        pids = [loop.pid for loop in loops]
        assert len(set(pids)) == 2
        assert [loop.poll() for loop in loops] == [None, None]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_loops_are_gone_after_an_error_too() -> None:
    with pytest.raises(KeyError), busy_loops(1) as loops:
        raise KeyError
    assert loops[0].returncode is not None


def test_a_loop_ends_when_its_parent_is_gone() -> None:
    """It runs only as long as its parent is the process named."""
    orphan = subprocess.run([sys.executable, "-S", "-c", busy.LOOP, "0"], timeout=60, check=False)
    assert orphan.returncode == 0


def test_ratios_are_to_the_better_number_of_threads_and_to_the_fair_share() -> None:
    points = {0: {ALL_THREADS: 200.0, ONE_THREAD: 120.0}, 2: {ALL_THREADS: 80.0, ONE_THREAD: 100.0}}
    table = busy_tables.busy(result(points))
    assert f"| 0 | 200 (200 to 200) | 120 (120 to 120) | **1.00 {TIMES}** | 200 | **1.00 {TIMES}** |" in table
    assert f"| 2 | 80 (80 to 80) | 100 (100 to 100) | **0.80 {TIMES}** | 100 | **0.80 {TIMES}** |" in table
    assert "| busy loops | Twostep, 2 threads | Twostep, 1 thread |" in table
    assert "llama.cpp was not measured in this run" in table


def test_llama_cpp_has_a_column_and_no_part_in_our_ratios() -> None:
    table = busy_tables.busy(result({0: {ALL_THREADS: 200.0, ONE_THREAD: 100.0, LLAMA: 300.0}}))
    assert f"| 200 (200 to 200) | 100 (100 to 100) | 300 (300 to 300) | **1.00 {TIMES}** |" in table
    assert "was not measured" not in table


def test_what_was_not_measured_is_a_gap() -> None:
    """One core: no other number of threads. No point without loops: no fair share."""
    table = busy_tables.busy(result({1: {ALL_THREADS: 80.0}}, threads=1))
    assert "| 1 | 80 (80 to 80) | — | — | — |" in table
    assert "Twostep, 1 thread |" in table


def test_without_results_the_page_says_so(tmp_path: Path) -> None:
    assert report.busy(tmp_path) == report.NOT_MEASURED


def test_a_version_of_llama_cpp_without_its_folder_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        busy.main(["--llama-version", "b1"])
    assert "--llama-version needs --llama-dir" in capsys.readouterr().err


def test_the_result_file_is_named_for_the_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = machine.watched()
    measured = busy.Result("python -m benchmarks.busy", here, 2, 128, 128, 5, [], [])
    monkeypatch.setattr(busy, "measure", lambda options: measured)
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    assert busy.main([]) == 0
    assert [path.name for path in tmp_path.iterdir()] == [f"busy-{machine.slug(here.cpu)}.json"]


def test_a_quick_measurement_yields_a_result_that_the_table_can_be_made_of(tmp_path: Path) -> None:
    assert busy.main(["--quick", "--out", str(tmp_path / "busy-x.json")]) == 0
    [found] = results.read("busy", tmp_path)
    assert [point["loops"] for point in found["points"]] == [0, 1]
    assert all(point["tokens_per_s"][ALL_THREADS]["n"] == 2 for point in found["points"])
    assert "| busy loops |" in report.busy(tmp_path)
