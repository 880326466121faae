"""`twostep calibrate` as a user meets it: what it prints and writes, and that `serve --calibrate` goes on with that."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.calibrated import SyntheticMachine, profile_for
from support.engines import STORIES

from twostep.cli import calibrate as command
from twostep.cli.main import main
from twostep.config.configs import EngineConfig
from twostep.engine.calibration import calibrate as module
from twostep.engine.profiles import find_profile, identity_of, profile_path
from twostep.errors import CalibrationError, InvalidParameterError
from twostep.model.loaded import LoadedModel
from twostep.perf.machine_profile import MachineProfile, read_profile
from twostep.perf.typical_steps import SHAPES


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOSTEP_PROFILES", str(tmp_path / "profiles"))


def synthetic(**machine: Any) -> Callable[..., MachineProfile]:
    """A calibration of a machine with a known law, in no time."""

    def made(model: LoadedModel, *, threads: int | None, quick: bool, progress: Any) -> MachineProfile:
        learned = SyntheticMachine(**machine).learned(quick=quick)
        profile = profile_for(identity_of(model, EngineConfig(threads=threads)))
        return replace(
            profile, model_name=model.path.name, costs=learned.costs, grid=learned.grid, held_out=learned.held_out,
            runs=learned.runs, starved_runs=learned.starved_runs, left_out=learned.left_out,
        )  # fmt: skip

    return made


@pytest.fixture(autouse=True)
def _synthetic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "calibrate", synthetic(noise=0.02))


def test_it_says_what_it_learned_and_how_well_and_engines_find_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["calibrate", str(STORIES), "--threads", "1"]) == 0
    printed = capsys.readouterr()
    for expected in (
        "int8 1000 Gop/s",
        "decode, 1 stream",
        "8 streams and 64 of a prompt",
        "weight traffic",
        "not seen",
    ):
        assert expected in printed.out
    assert f"next: twostep serve {STORIES} --itl-budget " in printed.out
    assert "noisy" not in printed.out
    model = open_stories()
    config = EngineConfig(threads=1)
    path = profile_path(identity_of(model, config), model.path.name)
    assert f"wrote {path}" in printed.err
    assert find_profile(config.profile, identity_of(model, config), model.path.name).profile == read_profile(path)


def open_stories() -> LoadedModel:
    from support.engines import stories

    return stories()


def test_shares_of_a_decode_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    """Of the known machine: 2 ms of weights, 0.8 of the head with 0.07 for its rows, of 3.9 ms with 500 positions."""
    main(["calibrate", str(STORIES), "--threads", "1"])
    [line] = [line for line in capsys.readouterr().out.splitlines() if "weight traffic" in line]
    share = int(line.split("stream: ")[1].split("%")[0])
    machine, shape = SyntheticMachine(), SHAPES["decode, 1 stream"]
    law = machine.law(shape)
    assert share == pytest.approx(100 * (law["linear"] + law["head"] + 7e4) / machine.time_ns(shape), abs=3)


def test_json_is_the_profile(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "mine.json"
    assert main(["calibrate", str(STORIES), "--threads", "1", "--quick", "--json", "--out", str(out)]) == 0
    assert MachineProfile.from_json(json.loads(capsys.readouterr().out)) == read_profile(out)
    assert not (tmp_path / "profiles").exists()


def test_a_profile_of_ones_own_is_named_in_the_next_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "mine.json"
    main(["calibrate", str(STORIES), "--threads", "1", "--out", str(out)])
    assert capsys.readouterr().out.rstrip().endswith(f"--profile {out}")


@pytest.mark.parametrize(
    ("machine", "note"),
    [({"noise": 0.15}, "this machine is noisy"), ({"starves": 0.4}, "other programs use this machine")],
)
def test_a_disturbed_machine_is_said_to_be(
    machine: dict[str, float], note: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "calibrate", synthetic(**machine))
    main(["calibrate", str(STORIES), "--threads", "1"])
    assert f"note: {note}" in capsys.readouterr().out


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (CalibrationError("no cores"), 1)])
def test_an_interrupted_calibration_writes_nothing(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(*_: object, **__: object) -> MachineProfile:
        raise error

    monkeypatch.setattr(module, "calibrate", fails)
    assert main(["calibrate", str(STORIES), "--out", str(tmp_path / "mine.json")]) == code
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_refused_before_the_minute_passes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["calibrate", str(STORIES), "--out", str(tmp_path / "none" / "p.json")]) == 1
    assert "there is no folder" in capsys.readouterr().err


# --- serve --calibrate --------------------------------------------------------------------------------------------


def test_a_server_goes_on_with_the_new_profile() -> None:
    config = command.calibrate_for(STORIES, EngineConfig(threads=1, max_num_seqs=3))
    assert isinstance(config.profile, Path)
    assert read_profile(config.profile).model_name == STORIES.name
    assert config == EngineConfig(threads=1, max_num_seqs=3, profile=config.profile)


def test_a_named_profile_is_written_there(tmp_path: Path) -> None:
    config = command.calibrate_for(STORIES, EngineConfig(threads=1, profile=tmp_path / "p.json"))
    assert config.profile == tmp_path / "p.json"
    assert read_profile(tmp_path / "p.json").model_name == STORIES.name


def test_calibrating_for_nothing_is_refused() -> None:
    with pytest.raises(InvalidParameterError, match="--calibrate makes a profile, but --profile is none"):
        command.calibrate_for(STORIES, EngineConfig(profile="none"))
