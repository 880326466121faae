"""`twostep simulate` from its command line to what it prints and writes."""

import sys
from pathlib import Path

import pytest
from support.calibrated import profile_for
from support.recorded_run import replays

from twostep.bench.load.run_record import End
from twostep.bench.report.result import Result, read_result
from twostep.cli.main import main
from twostep.config.configs import EngineConfig
from twostep.engine.profiles import identity_of
from twostep.model.loaded import open_model
from twostep.perf.machine_profile import write_profile
from twostep.store.resolve import resolve
from twostep.store.wheel_download import FetchProgress

DEVICE = ("--model", "llama-3.1-8b", "--hardware", "h100")
SHORT = (*DEVICE, "--workload", "azure-conv", "--requests", "40")


def run(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    """What is printed, with errors."""
    sys.argv[1:] = ["simulate", *words]
    try:
        ended = main(sys.argv[1:])
    except SystemExit as exit_:
        ended = int(str(exit_.code))
    out, err = capsys.readouterr()
    assert ended == code, err
    return out if code == 0 else out + err


@pytest.fixture(autouse=True)
def own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the command line, which results repeat: pytest's own are put back."""
    monkeypatch.setattr(sys, "argv", ["twostep"])


def simulated(capsys: pytest.CaptureFixture[str], folder: Path, *words: str) -> Result:
    run(capsys, *words, "--out", str(folder / "result.json"))
    return read_result(folder / "result.json")


def test_a_report_as_that_of_bench_which_says_what_it_rests_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    words = (*SHORT, "--rate", "4", "--itl-budget", "40", "--goodput", "ttft:500", "--html", str(page))
    printed = run(capsys, *words, "--out", str(tmp_path / "result.json"))
    [one] = read_result(tmp_path / "result.json").runs
    assert one.summary.served == 40
    assert one.record.simulated is not None
    assert one.steps
    for part in ("simulated   llama-3.1-8b on h100-sxm", "step times", "KV cache", "TTFT", "goodput", "KV blocks"):
        assert part in printed
    assert "started" not in printed
    html = page.read_text()
    assert "Simulation of llama-3.1-8b" in html
    assert "Duration of engine steps" in html


def test_bench_reads_a_simulation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    simulated(capsys, tmp_path, *SHORT, "--rate", "4")
    assert main(["bench", "--read", str(tmp_path / "result.json")]) == 0
    assert "nothing was measured" in capsys.readouterr().out


def test_the_same_command_writes_the_same_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        words = ("--workload", "chat", "--requests", "40", "--rate", "8", "--replicas", "2", "--seed", seed)
        run(capsys, *DEVICE, *words, "--out", "r.json", "--html", "r.html")
        written.append(((tmp_path / name / "r.json").read_bytes(), (tmp_path / name / "r.html").read_bytes()))
    assert written[0] == written[1] != written[2]


def test_several_loads_and_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = simulated(capsys, tmp_path, *SHORT, "--rate", "1,8")
    assert [one.level for one in result.runs] == [1.0, 8.0]
    swept = simulated(capsys, tmp_path, *SHORT, "--rate", "4", "--sweep", "--goodput", "ttft:300", "--sweep-s", "5")
    assert swept.sweep is not None
    assert len(swept.runs) > 2


def test_a_time_limit_cuts_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [one] = simulated(capsys, tmp_path, *SHORT, "--rate", "4", "--time-limit-s", "3").runs
    assert one.record.end is End.LIMIT
    assert 0 < one.summary.served < 40
    assert one.summary.cut > 0


def test_policies_differ_as_they_should(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whole prompts hurt the gaps between tokens, static batches the first token."""
    words = (*SHORT, "--rate", "8", "--max-model-len", "8192")
    policies = {
        "time": ("--itl-budget", "15"),
        "whole": ("--chunking", "none"),
        "static": ("--batching", "static=8", "--chunking", "none"),
    }
    found = {name: simulated(capsys, tmp_path, *words, *more).runs[0].summary for name, more in policies.items()}
    itl, ttft = ({name: getattr(one, what) for name, one in found.items()} for what in ("itl", "ttft"))
    assert itl["time"].max < itl["whole"].max / 2
    assert ttft["static"].p50 > 3 * ttft["whole"].p50


def test_a_recording_replays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, *SHORT, "--rate", "4", "--chunking", "tokens=256", "--record", str(tmp_path / "run"))
    assert replays(tmp_path / "run").requests == 40


def calibrated(folder: Path, **changed: object) -> Path:
    """A profile of the default model, of some machine."""
    model = open_model(resolve("smollm2-135m", FetchProgress()))
    identity = identity_of(model, EngineConfig())
    write_profile(profile_for(identity, cpu="some machine", **changed), folder / "profile.json")
    return folder / "profile.json"


def test_a_calibrated_machine_with_noise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("smollm2-135m", "--profile", str(calibrated(tmp_path)), "--workload", "batch", "--requests", "10")
    plain, noisy = (simulated(capsys, tmp_path, *words, "--concurrency", "2", *more) for more in ((), ("--noise",)))
    assert plain.runs[0].record.server.url.startswith("some machine")
    assert plain.runs[0].summary.served == 10
    assert plain.runs[0].summary.e2e != noisy.runs[0].summary.e2e
    assert noisy.runs[0].record.simulated is not None
    assert "drawn from 1 residuals" in noisy.runs[0].record.simulated.assumed[0].words


def test_a_profile_of_another_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = calibrated(tmp_path, model="other")
    assert "was made with another model" in run(capsys, "smollm2-135m", "--profile", str(path), code=1)


def test_a_machine_that_is_not_calibrated_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWOSTEP_PROFILES", str(tmp_path))
    said = run(capsys, "smollm2-135m", "--profile", "here", code=1)
    assert "not calibrated for smollm2-135m" in said
    assert "twostep calibrate" in said


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--hardware", "h100"), "which model?"),
        (("--model", "llama-3.1-8b"), "--hardware --profile"),
        ((*DEVICE, "smollm2-135m"), "which model?"),
        (("--model", "llama-3.1-8x", "--hardware", "h100"), "did you mean llama-3.1-8b"),
        (("--model", "llama-3.1-8b", "--hardware", "h1000"), "did you mean h100"),
        ((*DEVICE, "--noise"), "--noise needs --profile"),
        ((*DEVICE, "--record", "x", "--rate", "1,2"), "--record needs one load"),
        ((*DEVICE, "--itl-budget", "1"), "--itl-budget is 1 ms; on h100-sxm not even one request"),
        ((*DEVICE, "--goodput", "itl:1"), "nearest possible"),
        ((*DEVICE, "--workload", "azure-conv", "--max-model-len", "500"), "requests do not fit"),
        ((*DEVICE, "--tp", "3"), "possible: 1, 2, 4"),
        (("smollm2-135m", "--profile", "here", "--tp", "2"), "--tp needs --hardware"),
        (("smollm2-135m", "--profile", "nothing.json"), "nothing.json: no such file"),
    ],
)
def test_what_cannot_be_simulated_is_said(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], problem: str
) -> None:
    with_load = () if {"--workload", "--record"} & {*words} else ("--workload", "azure-conv", "--requests", "5")
    code = 2 if problem.startswith(("which", "--hardware --profile", "--noise", "--record", "--tp needs")) else 1
    assert problem in run(capsys, *words, *with_load, code=code)
