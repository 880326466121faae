"""`twostep roofline` as a user meets it: its output, its files, and one line for what it cannot answer."""

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.support.calibrated import profile_for
from twostep.cli.main import main
from twostep.config.configs import EngineConfig
from twostep.engine.profiles import identity_of
from twostep.model.loaded import open_model
from twostep.perf.machine_profile import write_profile

LLAMA = ("--model", "llama-2-7b")
STORIES = str(Path(__file__).parent.parent / "data" / "stories260k.gguf")


@pytest.fixture(autouse=True)
def profiles(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of profiles, whatever the user has calibrated."""
    folder = tmp_path_factory.mktemp("profiles")
    monkeypatch.setenv("TWOSTEP_PROFILES", str(folder))
    return folder


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["roofline", *arguments]) == 0
    return capsys.readouterr().out


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["roofline", *arguments]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("twostep: ")
    assert err.count("\n") == 1
    return err.removeprefix("twostep: ").rstrip()


def test_the_answer_has_both_phases_with_units(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, *LLAMA, "--hardware", "a10", "--prompt", "350", "--output", "150")
    lines = text.splitlines()
    assert lines[1] == "hardware  A10: 24.0 GB, 600 GB/s, 125 TFLOPS fp16, ridge point 208 op/B"
    assert lines[2].startswith("expected  datasheet (confidence high)")
    heads = [line.split() for line in lines if line.strip().startswith("operations")]
    assert heads == [["operations", "bytes", "intensity", "limit", "roofline", "expected", "share"]] * 2
    limits = [line.split()[-7] for line in lines if line.startswith("feed-forward")]
    assert limits == ["arithmetic", "bandwidth"]
    assert "512.0 KiB a token = 2 x 32 layers x 32 KV heads x 128 x 2 B" in text
    assert "40 requests of 500 tokens fit: (24.0 GB - 13.5 GB weights) / 250.0 MiB" in text
    assert "TTFT + 149 x ITL" in text


def test_the_answer_says_measured_where_kernels_were(capsys: pytest.CaptureFixture[str]) -> None:
    assert "expected  measured: kernels of this device" in shown(capsys, *LLAMA, "--hardware", "a100")


def test_json_has_the_numbers_of_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(shown(capsys, *LLAMA, "--hardware", "a10", "--json"))
    assert found["model"]["kv_bytes_per_token"] == 524288
    assert found["hardware"]["ridge_operations_per_byte"] == pytest.approx(208.3, abs=0.1)
    assert (found["expected_from"], found["sequences_that_fit"]) == ("datasheet", 40)
    for phase in found["phases"]:
        assert sum(kind["expected_s"] for kind in phase["kinds"]) == pytest.approx(phase["expected_s"])
        assert phase["roofline_s"] <= phase["expected_s"]
    assert json.loads(shown(capsys, *LLAMA, "--compare", "a10", "--json"))[0] == found


def test_a_comparison_has_a_line_for_each_device_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, *LLAMA, "--compare", "t4,a10,a100,h100").splitlines()
    assert [line.split()[0] for line in lines[-4:]] == ["t4", "a10", "a100-80-sxm", "h100-sxm"]
    assert [line.split()[-1] for line in lines[-4:]] == ["datasheet", "datasheet", "measured", "measured"]


def test_a_device_that_cannot_is_named_below_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (*LLAMA, "--compare", "a10,h100,here", "--weights", "fp8")
    lines = shown(capsys, *arguments).splitlines()
    assert lines[-3].startswith("h100-sxm ")
    assert lines[-2].startswith("a10: a10 (A10) has no FP8 arithmetic")
    assert lines[-1].startswith("here: ")
    assert "run `twostep calibrate`" in lines[-1]
    found = json.loads(shown(capsys, *arguments, "--json"))
    assert [("error" in one, one["hardware"]["id"]) for one in found] == [
        (True, "a10"), (False, "h100-sxm"), (True, "here"),
    ]  # fmt: skip


def test_types_batch_and_devices_change_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    def asked(*more: str) -> float:
        found = json.loads(shown(capsys, *LLAMA, "--hardware", "h100", "--json", *more))
        return float(found["expected"]["itl_s"])

    fp16 = asked()
    assert asked("--weights", "int4") < 0.5 * fp16
    assert asked("--tp", "4") < 0.6 * fp16
    assert fp16 < asked("--batch", "64")
    assert asked("--batch", "64", "--kv", "fp8") < asked("--batch", "64")


def test_what_does_not_fit_is_said_with_a_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "--model", "llama-2-70b", "--hardware", "a100")
    assert "DOES NOT FIT: weights of 138 GB in 80.0 GB; --tp 2 or narrower --weights" in text
    assert "DOES NOT FIT: a batch of 64" in shown(capsys, *LLAMA, "--hardware", "a10", "--batch", "64")


def test_a_weight_file_is_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "--model", STORIES, "--hardware", "desktop-ddr5", "--prompt", "99", "--compute", "fp32",
                 "--hardware-file", own_file)  # fmt: skip
    assert text.startswith("model     stories260k: 259328 parameters, weights fp32")


own_file = str(Path(__file__).parent.parent / "data" / "hardware.toml")


def test_here_has_the_roofs_of_the_latest_profile_of_this_machine(
    capsys: pytest.CaptureFixture[str], profiles: Path
) -> None:
    own = profile_for(identity_of(open_model(Path(STORIES)), EngineConfig()))
    roofs = own.roofs._replace(int8_ops_per_s=3e12)
    write_profile(replace(own, roofs=roofs, date="2026-03-04T00:00:00+00:00"), profiles / "b-latest.json")
    write_profile(own, profiles / "c-earlier.json")
    write_profile(profile_for(own.identity, cpu="Other"), profiles / "d-of-another-machine.json")
    (profiles / "e-damaged.json").write_text("{")
    found = json.loads(shown(capsys, *LLAMA, "--hardware", "here", "--weights", "int8", "--json"))
    assert found["hardware"]["name"] == own.identity.cpu
    assert found["hardware"]["peak_operations_per_s"] == 3e12
    assert found["hardware"]["bandwidth_bytes_per_s"] == 2e10  # weights of 7 GB are beyond the largest measured size
    assert "measured: the roofs are those of this machine" in shown(
        capsys, *LLAMA, "--hardware", "here", "--weights", "int8"
    )


def test_own_hardware_is_used_and_named_by_file(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(shown(capsys, *LLAMA, "--hardware", "desktop-ddr5", "--hardware-file", own_file, "--json"))
    assert found["hardware"]["bandwidth_bytes_per_s"] == 64e9
    assert found["hardware"]["source"].endswith("hardware.toml: line 2")


@pytest.mark.parametrize("where", [("--hardware", "a10"), ("--compare", "t4,a10,h100,b200,l4,a30,mi300x")])
def test_a_plot_is_an_svg_that_names_what_it_shows(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, where: tuple[str, str]
) -> None:
    path = tmp_path / "roof.svg"
    shown(capsys, *LLAMA, *where, "--plot", str(path))
    texts = [element.text or "" for element in ElementTree.parse(path).iter() if element.tag.endswith("text")]
    assert any("meta-llama/Llama-2-7b, fp16" in text for text in texts)
    assert {"prefill", "decode"} <= set(texts)
    wanted = ["ridge point 208 op/B"] if where[1] == "a10" else ["mi300x 1,310", "t4 65"]
    assert set(wanted) <= set(texts)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((*LLAMA, "--hardware", "here"), "run `twostep calibrate`"),
        ((*LLAMA, "--compare", "a10,a11"), "unknown hardware 'a11'; did you mean a10"),
        (("--model", "lama-2-7b", "--hardware", "a10"), "did you mean llama-2-7b"),
        (("--model", "none.gguf", "--hardware", "a10"), "none.gguf"),
        ((*LLAMA, "--hardware", "a10", "--weights", "fp8"), "A10) has no FP8 arithmetic"),
        ((*LLAMA, "--hardware", "a10", "--weights", "int9"), "--weights: unknown number type 'int9'"),
        ((*LLAMA, "--hardware", "a10", "--kv", "q4_0"), "--kv: unknown number type 'q4_0'"),
        ((*LLAMA, "--hardware", "a10", "--weights", "int4", "--kv", "int3"), "--kv: unknown number type 'int3'"),
        ((*LLAMA, "--hardware", "a10", "--compute", "int8"), "fp16 weights are wider"),
        ((*LLAMA, "--hardware", "a10", "--tp", "3"), "possible: 1, 2, 4"),
        ((*LLAMA, "--hardware", "a10", "--prompt", "4096"), "more than the context"),
        ((*LLAMA, "--hardware", "a10", "--plot", "x.png"), "twostep draws .svg"),
        ((*LLAMA, "--hardware", "a10", "--plot", "none/x.svg"), "no such folder"),
        ((*LLAMA, "--hardware", "a10", "--hardware-file", "none.toml"), "none.toml: cannot be read"),
    ],
)
def test_what_cannot_be_answered_is_said_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    assert words in complaint(capsys, *arguments)
