"""`twostep workload` as a user meets it."""

import json
from pathlib import Path

import pytest

from twostep.cli.main import main
from twostep.workload.format import read_workload

ROW = {"arrival_s": 1, "input_tokens": 32, "output_tokens": 4}


def run(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> tuple[list[str], list[str]]:
    """Lines on standard output and on standard error."""
    try:
        assert main(["workload", *arguments]) == code
    except SystemExit as error:
        assert error.code == code  # noqa: PT017
    captured = capsys.readouterr()
    return captured.out.splitlines(), captured.err.splitlines()


def silent(line: str) -> None:
    raise AssertionError(line)


@pytest.mark.parametrize("kind", ["chat", "rag", "batch", "fixed"])
def test_make_writes_the_same_for_the_same_seed(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for path in (one, other):
        shown, told = run(capsys, "make", kind, "--requests", "40", "--rate", "2", "--seed", "3", "--out", str(path))
        assert shown[0] == f"name      {kind}"
        assert shown[2].startswith("requests  40")
        assert told == []
    assert one.read_bytes() == other.read_bytes()
    assert len(read_workload(one, silent).requests) == 40


def test_parameters_of_a_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "w"
    run(capsys, "make", "fixed", "--input-tokens", "100-200", "--output-tokens", "7", "--out", str(path))
    read = read_workload(path, silent)
    assert len({request.input_tokens for request in read.requests}) > 20
    assert {(request.output_tokens, request.arrival_s) for request in read.requests} == {(7, 0.0)}


@pytest.mark.parametrize(
    ("flags", "arrivals"),
    [
        ([], "AtOnce()"),
        (["--rate", "2"], "Renewal(rate=2.0, cv=1.0)"),
        (["--rate", "2", "--cv", "0"], "Renewal(rate=2.0, cv=0.0)"),
        (["--rate", "2", "--to-rate", "4"], "Ramp(first_rate=2.0, last_rate=4.0, requests=200)"),
    ],
)
def test_arrivals(flags: list[str], arrivals: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "make", "batch", *flags, "--out", str(tmp_path / "w"))
    assert arrivals in read_workload(tmp_path / "w", silent).source


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["make", "batch", "--cv", "2", "--out", "w"], 2, "--cv and --to-rate need --rate"),
        (["make", "batch", "--rate", "1", "--cv", "2", "--to-rate", "2", "--out", "w"], 2, "exclude each other"),
        (["make", "fixed", "--input-tokens", "5-", "--out", "w"], 2, "'5-' is not a length"),
        (
            ["make", "fixed", "--input-tokens", "0", "--out", "w"],
            1,
            "--input-tokens is 0; it must be from 1 to 1e+07",
        ),
        (
            ["make", "fixed", "--output-tokens", "5-3", "--out", "w"],
            1,
            "--output-tokens is 5-3; the smaller number must come",
        ),
        (["make", "batch", "--rate", "2", "--to-rate", "0", "--out", "w"], 1, "twostep: --to-rate is 0; it must be"),
        (
            ["make", "batch", "--requests", "9" * 400, "--out", "w"],
            1,
            "--requests is 999999999999999999...9999999999999999999; it must",
        ),
        (
            ["make", "chat", "--context-tokens", "9", "--system-tokens", "0", "--user-tokens", "2", "--out", "w"],
            1,
            "--answer-tokens is 90; it must be from 1 to 9",
        ),
        (
            ["make", "batch", "--context-tokens", "500", "--out", "w"],
            1,
            "8 times --input-tokens 300 and --answer-tokens",
        ),
        (
            ["import", "azure-code", "--rate", "1", "--rate-scale", "2", "--out", "w"],
            1,
            "--rate and --rate-scale both set the rate",
        ),
        (["import", "azure-code", "--max-input", "0", "--out", "w"], 1, "--max-input is 0; it must be from 1"),
        (["import", "azure-code", "--from-s", "1e6", "--out", "w"], 1, "requests is left: those from 1e+06 s"),
        (["make", "batch"], 2, "the following arguments are required: --out"),
        (
            ["make", "fixed", "--input-tokens", "few", "--out", "w"],
            2,
            "--input-tokens: 'few' is not a length, such as 100, or a range",
        ),
        (["make", "chat", "--turns", "0", "--out", "w"], 1, "twostep: --turns is 0; it must be from 1 to 1000"),
        (
            ["import", "none.csv", "--out", "w"],
            1,
            "none.csv: No such file or directory; give a file, or one of",
        ),
        (
            ["import", "azure-code", "--rate", "0", "--out", "w"],
            1,
            "twostep: --rate is 0; it must be from 1e-06 to 1e+06",
        ),
        (["show", "."], 1, ".: Is a directory; give a file, or one of azure-code"),
    ],
)
def test_one_line_says_what_is_wrong(
    arguments: list[str],
    code: int,
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    shown, [line] = run(capsys, *arguments, code=code)
    assert shown == []
    assert told in line
    assert list(tmp_path.iterdir()) == []


def test_import_says_what_it_clipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "w"
    flags = ["--first", "100", "--max-input", "1000", "--rate", "2", "--out", str(path)]
    shown, told = run(capsys, "import", "azure-code", *flags)
    assert told[0].endswith("requests kept, the first")
    assert "of 100 prompts clipped to 1000 tokens" in told[1]
    assert any("max 1000 tokens" in line for line in shown)
    assert max(request.input_tokens for request in read_workload(path, silent).requests) == 1000


def test_show_as_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"twostep_workload": 1, "block_tokens": 16},
        {"arrival_s": 1, "input_tokens": 32, "output_tokens": 4, "blocks": [0, 1]},
        {"arrival_s": 2, "input_tokens": 48, "output_tokens": 8, "blocks": [0, 1, 2]},
        {"arrival_s": 5, "input_tokens": 16, "output_tokens": 3, "blocks": [0]},
        {"arrival_s": 9, "input_tokens": 64, "output_tokens": 5, "blocks": [0, 1, 2, 3], "after": 1},
    ]
    path = tmp_path / "w"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    figures = json.loads("\n".join(run(capsys, "show", str(path), "--json")[0]))
    assert figures["requests"] == 4
    assert figures["starts"] == 3
    assert figures["duration_s"] == 4
    assert figures["rate"] == pytest.approx(2 / 4 * 4 / 3)
    assert figures["cv"] == 0.5
    assert figures["input_tokens"] == {"mean": 40, "p50": 40, "p90": 59.2, "p99": 63.52, "max": 64, "n": 4}
    assert figures["shared_share"] == (0 + 32 + 16 + 48) / 160
    lines, told = run(capsys, "show", str(path))
    assert lines == [
        "name      -",
        "source    -",
        "requests  4, 1 of them sent after another has ended",
        "arrivals  0.6667 requests/s over 4.0 s, cv of the gaps 0.50",
        "prompts   mean 40, p50 40, p90 59, p99 64, max 64 tokens",
        "answers   mean 5, p50 4, p90 7, p99 8, max 8 tokens",
        "shared    up to 60.0% of the prompt tokens can be found in a prefix cache (blocks of 16)",
    ]
    assert told == []


def test_names_in_a_file_move_no_cursor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header = {"twostep_workload": 1, "block_tokens": 16, "name": "a\x1b[2J", "source": "b\nc"}
    (tmp_path / "w").write_text("".join(json.dumps(row) + "\n" for row in (header, ROW)))
    shown, told = run(capsys, "import", str(tmp_path / "w"), "--rate", "2", "--out", str(tmp_path / "v"), code=1)
    assert (shown, told) == ([], ["twostep: 'a\\x1b[2J' has no rate to change: all its requests arrive at once"])
    assert run(capsys, "show", str(tmp_path / "w"))[0][:2] == ["name      a\ufffd[2J", "source    b\ufffdc"]


def test_show_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "w").write_text('{"twostep_workload": 1, "block_tokens": 16}\n')
    assert run(capsys, "show", str(tmp_path / "w"))[0] == [
        "name      -", "source    -", "requests  0", "arrivals  none",
    ]  # fmt: skip
