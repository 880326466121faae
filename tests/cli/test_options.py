"""Engine options: every command that runs an engine for many requests has the same ones, from the table of settings."""

import argparse
from typing import Any

import pytest

from twostep.cli import bench, generate, serve
from twostep.cli.options import ENGINE_SETTINGS, default_text, engine_keywords
from twostep.config.configs import EngineConfig, serve_settings
from twostep.config.settings import BY_NAME, PRESETS
from twostep.errors import InvalidParameterError

COMMANDS = {"serve": serve, "bench": bench, "generate": generate}
BASE = {"serve": [], "bench": ["--offline"], "generate": ["--file", "a", "--out", "b"]}


def parser(command: str) -> argparse.ArgumentParser:
    whole = argparse.ArgumentParser(allow_abbrev=False)
    commands = whole.add_subparsers()
    COMMANDS[command].add_to(commands)  # type: ignore[attr-defined]
    made: argparse.ArgumentParser = commands.choices[command]
    return made


def config(command: str, *words: str) -> EngineConfig:
    """What the command makes of these words."""
    options = parser(command).parse_args([*BASE[command], *words])
    if command == "serve":
        given = {name: value for name, value in vars(options).items() if name in BY_NAME and value is not None}
        return serve_settings(given, {}).engine
    return EngineConfig(**engine_keywords(options))


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_every_engine_option(command: str) -> None:
    options = {flag for action in parser(command)._actions for flag in action.option_strings}
    assert {setting.flag for setting in ENGINE_SETTINGS} <= options


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("preset", PRESETS)
def test_the_same_options_make_the_same_engine_everywhere(command: str, preset: str) -> None:
    words = ["--preset", preset, "--admission", "fcfs", "--kv-memory", "500 blocks", "--no-enable-prefix-caching"]
    keywords: dict[str, Any] = {"admission": "fcfs", "kv_memory": "500 blocks", "enable_prefix_caching": False}
    assert config(command, *words) == EngineConfig(preset=preset, **keywords)


def test_only_the_server_has_a_preset_by_default() -> None:
    assert config("serve") == EngineConfig(preset="chat")
    assert config("bench") == config("generate") == EngineConfig()


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--max-num-seqs", "0"], "--max-num-seqs is '0'; it has to be an integer from 1"),
        (["--itl-budget", "5", "--chunking", "none"], "--itl-budget and --chunking set the same thing"),
        (
            ["--admission", "fcfs", "--priority-preempts"],
            "--priority-preempts needs an order by priority, but --admission is fcfs",
        ),
    ],
)
def test_errors_are_the_same_everywhere(command: str, words: list[str], problem: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        config(command, *words)
    assert str(caught.value).startswith(problem)


@pytest.mark.parametrize("words", [["--preset", "rag"], ["--no-enable-prefix-caching"], ["--block-size", "16"]])
def test_engine_options_without_an_engine_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Also a switch that is turned off."""
    made = parser("bench")
    with pytest.raises(SystemExit):
        bench.run(made.parse_args(words), made)
    flag = words[0].replace("--no-", "--")
    assert f"{flag} needs --offline" in capsys.readouterr().err
    made = parser("generate")
    with pytest.raises(SystemExit):
        generate.run(made.parse_args(["Why?", *words]), made)
    assert f"{flag} needs --file" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_defaults(command: str) -> None:
    shown = " ".join(parser(command).format_help().split())
    for name in ("kv_memory", "admission", "block_size"):
        assert f"(default: {default_text(BY_NAME[name])})" in shown
    seqs = "chat: 32, rag: 16, batch: 256"
    assert (f"({seqs})" if command == "serve" else f"(default: 64; {seqs})") in shown
