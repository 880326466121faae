"""Two versions of the server side by side."""

import random

from benchmarks import serve_tables
from benchmarks.tables import TIMES
from benchmarks.versions import BURSTS, Ratio, ratio


def test_a_machine_that_changes_its_speed_does_not_change_the_ratio() -> None:
    draw = random.Random(1)
    base = [draw.uniform(50, 200) for _ in range(60)]
    found = ratio([value * 0.9 for value in base], base)
    assert all(abs(value - 0.9) < 1e-9 for value in (found.median, found.low, found.high))


def test_the_interval_contains_the_ratio_and_narrows_with_the_number_of_pairs() -> None:
    draw = random.Random(2)
    base = [100.0] * 400
    values = [100 * draw.gauss(1.1, 0.1) for _ in base]
    few, many = ratio(values[:20], base[:20]), ratio(values, base)
    assert many.low < 1.1 < many.high
    assert many.high - many.low < few.high - few.low


def test_bursts_have_prompts_that_no_cache_has() -> None:
    prompts = [tuple(job.prompt) for burst in BURSTS for key in range(3) for job in burst.jobs(key)]
    assert len({prompt[:16] for prompt in prompts}) == len(prompts)


def test_the_table_names_both_versions_and_shows_the_noise() -> None:
    about = {"cpu": "a CPU", "cores": 2, "flags": [], "kernel": "6", "date": "2026-12-01T00:00", "commit": "abcdef0123",
             "modified": False, "busy": 0.0}  # fmt: skip
    point = {
        "burst": {"streams": 3, "prompt": 32, "tokens": 60}, "rounds": 40,
        "base_tokens_per_s": {"median": 200.0, "min": 150.0, "max": 260.0, "n": 40},
        "this": vars(Ratio(1.1, 1.05, 1.15)), "base_again": vars(Ratio(0.99, 0.95, 1.02)),
    }  # fmt: skip
    result = {"command": "c", "machine": about, "model": "m", "base": "commit 60df331", "points": [point]}
    text = serve_tables.versions(result)
    assert "commit abcdef0 beside commit 60df331" in text
    assert f"| 200 (150 to 260) | **1.10 {TIMES} (1.05 to 1.15)** | 0.99 {TIMES} (0.95 to 1.02) |" in text
