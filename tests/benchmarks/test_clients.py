"""The benchmark of load generators: what it asks of each, and its table."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import clients, results, serve_tables
from benchmarks.measurement import EngineError


def test_a_quick_measurement_of_ours_alone_yields_a_result_that_the_table_can_be_made_of(tmp_path: Path) -> None:
    assert clients.main(["--quick", "--out", str(tmp_path / "clients-x.json")]) == 0
    [result] = results.read("clients", tmp_path)
    [ours] = result["clients"]
    assert 0 < ours["tpot_ms"]["median"] < ours["e2e_ms"]["median"]
    assert 0 < ours["ttft_ms"]["median"] < ours["e2e_ms"]["median"]
    for key in ("ttft_ms", "tpot_ms", "e2e_ms"):
        assert 0 < ours["server"][key]["median"] <= ours[key]["median"] * 1.5, "of the same requests"
    table = serve_tables.clients(result)
    assert "| TTFT |" in table
    assert "2 streams, 3 completions of 16 prompt and 4 answer tokens" in table


def program(folder: Path, text: str) -> Path:
    """One that stands for another load generator: it is given the same words."""
    path = folder / "generator"
    path.write_text(f"#!{sys.executable}\nimport json, pathlib, sys\nwords = sys.argv[1:]\n{text}")
    path.chmod(0o755)
    return path


def test_guidellm_is_asked_for_the_same_load_and_read(tmp_path: Path) -> None:
    mean = "{'successful': {'mean': 2.0}}"
    text = f"""
assert 'kind=concurrent,streams=2' in words and 'kind=max_requests,count=3' in words, words
out = [word.partition('path=')[2] for word in words if 'path=' in word][0]
names = ('time_to_first_token_ms', 'inter_token_latency_ms', 'request_latency')
pathlib.Path(out).write_text(json.dumps({{'benchmarks': [{{'metrics': {{name: {mean} for name in names}}}}]}}))
"""
    found = clients.guidellm(program(tmp_path, text), tmp_path, "http://x", clients.QUICK, tmp_path / "run")
    assert found == clients.Figures(2.0, 2.0, 2000.0)


def test_aiperf_is_asked_for_the_same_load_and_read(tmp_path: Path) -> None:
    figures = {
        "time_to_first_token": {"avg": 1.0},
        "inter_token_latency": {"avg": 2.0},
        "request_latency": {"avg": 3.0},
    }
    text = f"""
assert words[words.index('--concurrency') + 1] == '2' and words[words.index('--request-count') + 1] == '3', words
folder = pathlib.Path(words[words.index('--artifact-dir') + 1], 'deep')
folder.mkdir(parents=True)
(folder / 'profile_export_aiperf.json').write_text({json.dumps(figures)!r})
"""
    found = clients.aiperf(program(tmp_path, text), tmp_path, "http://x", clients.QUICK, tmp_path / "run")
    assert found == clients.Figures(1.0, 2.0, 3.0)


def test_one_that_fails_is_named_with_its_last_words(tmp_path: Path) -> None:
    failing = program(tmp_path, "print('too\\nbad', file=sys.stderr); sys.exit(3)")
    with pytest.raises(EngineError, match=r"^generator: exit code 3: bad$"):
        clients.aiperf(failing, tmp_path, "http://x", clients.QUICK, tmp_path / "run")
