"""The files in `deploy`: what they say of the server is so."""

import configparser
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.http_server import Served

from twostep.config.configs import serve_settings
from twostep.config.settings import BY_NAME, SETTINGS
from twostep.config.sources import OTHER_VARIABLES

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
TEXTS = [*sorted(path for path in DEPLOY.iterdir() if path.is_file()), ROOT / "docs" / "deploy.md"]


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_variables_are_settings(path: Path) -> None:
    known = {setting.variable for setting in SETTINGS} | set(OTHER_VARIABLES)
    assert set(re.findall(r"\bTWOSTEP_[A-Z_]+\b", path.read_text())) <= known


def test_the_image_s_settings_are_taken() -> None:
    [line] = re.findall(r"^ENV (.*)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    server = serve_settings({}, dict(word.split("=", 1) for word in line.split())).server
    assert (server.host, server.port) == (("0.0.0.0",), 8000)


def health_check() -> list[str]:
    [words] = re.findall(r"^HEALTHCHECK .*\n +CMD (\[.*\])$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    python, *arguments = json.loads(words)
    assert python == "python"
    return [sys.executable, *arguments]


def test_the_health_check_finds_a_server_and_misses_none(server: Served) -> None:
    port = server.url.rpartition(":")[2]
    for asked, code in ((port, 0), ("9", 1)):
        environ = {**os.environ, "TWOSTEP_PORT": asked}
        assert subprocess.run(health_check(), env=environ, capture_output=True, check=False).returncode == code


def test_times_of_the_unit_are_longer_than_those_of_the_server() -> None:
    unit = configparser.RawConfigParser(strict=False)
    unit.read(DEPLOY / "twostep@.service")
    service = unit["Service"]
    assert service["Type"] == "notify"
    assert service["ExecStart"].split()[1:] == ["serve"]
    assert float(service["TimeoutStopSec"]) > BY_NAME["drain_s"].default + 5
    assert float(service["WatchdogSec"]) >= 5


def test_what_the_image_is_built_from_is_there() -> None:
    lines = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    kept = [line[1:] for line in lines if line.startswith("!")]
    assert [name for name in kept if not (ROOT / name).exists()] == []
    assert {"src", "native", "CMakeLists.txt", "pyproject.toml"} <= set(kept)


def test_the_longest_body_is_that_of_the_server() -> None:
    [megabytes] = re.findall(r"client_max_body_size (\d+)m;", (DEPLOY / "nginx.conf").read_text())
    assert int(megabytes) << 20 == BY_NAME["max_body_bytes"].default
