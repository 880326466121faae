"""Two versions of the server side by side."""

import random
from dataclasses import asdict

import pytest

from benchmarks import serve_tables
from benchmarks.tables import TIMES
from benchmarks.versions import BURSTS, point


def test_a_machine_that_changes_its_speed_does_not_change_the_ratio() -> None:
    draw = random.Random(1)
    rounds = [[base, 0.9 * base, base] for base in (draw.uniform(50, 200) for _ in range(60))]
    found = point(BURSTS[0], [rounds[:20], rounds[20:]])
    assert (found.pairs, found.this.n) == (60, 2)
    assert (found.this.min, found.this.max) == pytest.approx((0.9, 0.9))
    assert (found.base_again.min, found.base_again.max) == (1, 1)


def test_starts_that_differ_show_in_the_spread() -> None:
    found = point(BURSTS[0], [[[100, 90, 100]] * 9, [[100, 120, 100]] * 3, [[100, 100, 110]] * 3])
    assert (found.this.median, found.this.min, found.this.max) == (1.0, 0.9, 1.2)
    assert found.base_again.max == 1.1


def test_bursts_have_prompts_that_no_cache_has() -> None:
    prompts = [tuple(job.prompt) for burst in BURSTS for key in range(3) for job in burst.jobs(key)]
    assert len({prompt[:16] for prompt in prompts}) == len(prompts)


def test_the_table_names_both_versions_and_shows_the_noise() -> None:
    about = {"cpu": "a CPU", "cores": 2, "flags": [], "kernel": "6", "date": "2026-12-01T00:00", "commit": "abcdef0123",
             "modified": False, "busy": 0.0}  # fmt: skip
    found = asdict(point(BURSTS[1], [[[200, 220, 198]] * 5, [[150, 150, 150]] * 5]))
    result = {"command": "c", "machine": about, "model": "m", "base": "commit 60df331", "points": [found]}
    text = serve_tables.versions(result)
    assert "commit abcdef0 beside commit 60df331" in text
    assert "2 starts" in text
    assert f"| 175 (150 to 200) | **1.05 {TIMES} (1.00 to 1.10)** | 0.99 {TIMES} (0.99 to 1.00) |" in text
