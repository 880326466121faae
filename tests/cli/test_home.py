"""Users without a home folder, as containers have them, and those who keep caches elsewhere."""

import os
import pwd
from pathlib import Path
from typing import NoReturn

import pytest

from twostep.cli.main import main

COMMANDS = [
    ["models"],
    ["pull", "smollm2-135m"],
    ["inspect", "smollm2-135m"],
    ["generate", "x"],
    ["chat"],
    ["bench", "--offline"],
    ["serve"],
]


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(uid: int) -> NoReturn:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "TWOSTEP_MODELS", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("homeless")
@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_every_command_says_in_one_line_what_to_set(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 1
    *_, line = capsys.readouterr().err.splitlines()  # bench says before what it is about to measure
    assert line.startswith(f"twostep: HOME is not set and user {os.getuid()} has no account")
    assert "TWOSTEP_MODELS" in line


@pytest.mark.usefixtures("homeless")
def test_a_file_of_weights_needs_no_home(default_model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(default_model_path)]) == 0
    assert "SmolLM2" in capsys.readouterr().out


@pytest.mark.usefixtures("homeless")
@pytest.mark.parametrize("name", ["TWOSTEP_MODELS", "XDG_CACHE_HOME"])
def test_a_folder_that_was_named_needs_no_home(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, str(tmp_path))
    assert main(["models"]) == 0
    folder = tmp_path if name == "TWOSTEP_MODELS" else tmp_path / "twostep" / "models"
    assert f"cache: {folder}\n" in capsys.readouterr().out
