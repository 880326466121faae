"""`twostep serve` as a user meets it: a process that starts, says what it does, answers, and ends in order."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from support.calibrated import profile_for
from support.engines import STORIES

from twostep.config.configs import EngineConfig
from twostep.engine.profiles import identity_of
from twostep.model.loaded import open_model
from twostep.perf.machine_profile import write_profile

COMMAND = Path(sys.executable).parent / "twostep"
SMALL = ("smollm2-135m", "--port", "0", "--kv-memory", "64MiB", "--threads", "1")

pytestmark = pytest.mark.usefixtures("default_model_path")


NO_NETWORK = """
import os, pathlib, sys
(pathlib.Path(__file__).parent / f"watched-{os.getpid()}").touch()
def watch(event, arguments):
    if event in ("socket.connect", "socket.bind", "socket.getaddrinfo"):
        address = arguments[0] if event == "socket.getaddrinfo" else arguments[1]
        host = address[0] if isinstance(address, tuple) else address
        if host != "127.0.0.1":
            print(event, host, file=sys.stderr, flush=True)
            os._exit(97)
sys.addaudithook(watch)
"""
"""A `sitecustomize` that ends every Python process that would talk with another machine."""


@contextmanager
def serving(*arguments: str, **environment: str) -> Iterator[tuple["subprocess.Popen[str]", list[str]]]:
    """The process, and the lines that it has printed once it is ready."""
    env = {**os.environ, **environment}
    with subprocess.Popen([COMMAND, "serve", *arguments], stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout
        lines = []
        for line in process.stdout:
            lines.append(line.rstrip("\n"))
            if line.startswith("  curl "):
                break
        try:
            yield process, lines
        finally:
            process.kill()


def address_of(lines: list[str]) -> str:
    [address] = [found[1] for line in lines if (found := re.search(r" at (http://\S+), ready for requests", line))]
    return address


def ask(url: str, body: object = None, key: str | None = None) -> dict[str, Any]:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(url, data, headers), timeout=60) as response:
        answer = json.load(response)
    assert isinstance(answer, dict)
    return answer


def complaint(*arguments: str, code: int = 1) -> str:
    """The one line that a failing command writes, without `twostep: `."""
    result = subprocess.run([COMMAND, "serve", *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout) == (code, ""), result.stderr
    assert result.stderr.startswith("twostep: ")
    assert result.stderr.count("\n") == 1
    return result.stderr.removeprefix("twostep: ").rstrip()


def test_it_starts_answers_and_ends_with_status_0() -> None:
    with serving(*SMALL, "--max-num-seqs", "5") as (process, lines):
        address = address_of(lines)
        body = {"model": "smollm2-135m", "prompt": "Once upon a time", "max_tokens": 4, "temperature": 0}
        assert ask(f"{address}/v1/completions", body)["usage"]["completion_tokens"] == 4
        settings = ask(f"{address}/v1/config")["settings"]
        assert settings["max_num_seqs"] == {"value": 5, "set_by": "--max-num-seqs"}
        assert settings["port"] == {"value": int(address.rpartition(":")[2]), "set_by": "--port"}
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def test_uncut_prompts_need_no_other_setting() -> None:
    with serving(*SMALL, "--chunking", "none") as (_, lines):
        address = address_of(lines)
        width = ask(f"{address}/v1/config")["settings"]["max_num_batched_tokens"]
        assert width == {"value": 8192, "set_by": "preset chat, moved by --chunking"}
        usage = ask(f"{address}/v1/completions", {"prompt": [5] * 1500, "max_tokens": 2})["usage"]
        assert usage["prompt_tokens"] == 1500


def test_its_own_chat_talks_with_it() -> None:
    with serving(*SMALL, "--api-key", "open-sesame") as (_, lines):
        command = [COMMAND, "chat", "--url", address_of(lines), "--max-tokens", "6", "--api-key"]
        how = {"input": "Hi\n", "capture_output": True, "text": True, "timeout": 60}
        allowed, refused = (subprocess.run([*command, key], check=False, **how) for key in ("open-sesame", "guess"))
    assert re.search(r"\[TTFT \d+\.\d+ s, \d tokens, [\d.]+ tokens/s", allowed.stderr)
    assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (1, "", 1)


def test_it_says_what_is_in_effect_and_who_said_so() -> None:
    with serving(*SMALL, "--itl-budget", "20") as (_, lines):
        rows = [tuple(line.split(maxsplit=2)) for line in lines]
        assert ("chunking", "time=20", "--itl-budget") in rows
        assert ("max_num_seqs", "32", "preset chat") in rows
        assert ("model", "smollm2-135m", "MODEL") in rows
        assert any(re.match(r"  KV cache: 64.0 MiB stated = \d+ blocks of 16 tokens = ", line) for line in lines)


def test_the_command_to_try_works() -> None:
    with serving(*SMALL, "--served-model-name", "tiny tales") as (_, lines):
        command = shlex.split(lines[-1])
        assert command[:2] == ["curl", f"{address_of(lines)}/v1/chat/completions"]
        assert command[2:5] == ["-H", "Content-Type: application/json", "-d"]
        body = json.loads(command[5])
        assert body["model"] == "tiny tales"
        answer = ask(command[1], body | {"max_tokens": 2})
        assert (answer["model"], answer["usage"]["completion_tokens"]) == ("tiny tales", 2)


def test_a_key_is_wanted_but_not_shown() -> None:
    with serving(*SMALL, "--api-key", "open-sesame") as (_, lines):
        assert "sesame" not in "\n".join(lines)
        assert '-H "Authorization: Bearer $TWOSTEP_API_KEY"' in lines[-1]
        config = ask(f"{address_of(lines)}/v1/config", key="open-sesame")
        assert "sesame" not in json.dumps(config)


def test_an_open_door_is_mentioned() -> None:
    with serving(*SMALL, "--host", "0.0.0.0") as (_, lines):
        assert "note: no --api-key is set: anyone who can reach 0.0.0.0 can use the server" in lines
        assert address_of(lines).startswith("http://127.0.0.1:")


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this system has no IPv6")
def test_ipv4_and_ipv6_are_served_and_what_is_printed_answers() -> None:
    with serving(*SMALL, "--host", "::", "--served-model-name", "one,two") as (_, lines):
        address = address_of(lines)
        assert [model["id"] for model in ask(f"{address}/v1/models")["data"]] == ["one", "two"]
        port = address.rpartition(":")[2]
        for other in (f"http://127.0.0.1:{port}", f"http://[::1]:{port}"):
            answer = ask(f"{other}/v1/completions", {"model": "two", "prompt": "One", "max_tokens": 1})
            assert answer["model"] == "two"
        assert "note: no --api-key is set: anyone who can reach :: can use the server" in lines


def test_several_hosts_are_served_and_named() -> None:
    with serving(*SMALL, "--host", "127.0.0.1", "--host", "127.0.0.2") as (_, lines):
        [first, second] = re.findall(r"http://[\d.]+:\d+", next(line for line in lines if "ready for requests" in line))
        assert ask(f"{first}/v1/models") == ask(f"{second}/v1/models")
        assert not [line for line in lines if line.startswith("note:")]


def test_it_needs_no_network_and_listens_on_this_machine_alone(tmp_path: Path) -> None:
    """CASES 41, with a model that is here."""
    (tmp_path / "sitecustomize.py").write_text(NO_NETWORK)
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    with serving(*SMALL, PYTHONPATH=path) as (_, lines):
        assert ask(f"{address_of(lines)}/v1/completions", {"prompt": "One", "max_tokens": 1})["choices"]
        assert len(list(tmp_path.glob("watched-*"))) >= 2, "front and engine"


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        problem = complaint("--port", str(port))
    assert problem.startswith(f"cannot listen on 127.0.0.1, port {port}: Address already in use")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["no/such.gguf"], "no/such.gguf: no such file"),
        (["smollm2-135n"], "unknown model 'smollm2-135n'; known: "),
        ([__file__], f"{__file__}: "),
        ([str(STORIES), "--port", "0"], f"{STORIES}: key 'tokenizer.ggml.model' is 'llama'; supported: 'gpt2' "),
        ([*SMALL, "--max-model-len", "9000"], "max_model_len is 9000; it has to be from 2 to the context, 8192"),
        ([*SMALL, "--kv-memory", "1KiB"], "the KV cache does not hold "),
        ([*SMALL, "--record", "/no/such/file"], "No such file or directory: /no/such/file"),
        ([*SMALL, "--record-workload", "/no/such"], "record_workload: /no/such: No such file or directory"),
        (["--port", "x"], "--port is 'x'; it has to be an integer"),
        (["--itl-budget", "10", "--chunking", "none"], "--itl-budget and --chunking set the same thing"),
    ],
)
def test_what_cannot_be_served(arguments: list[str], problem: str) -> None:
    assert complaint(*arguments).startswith(problem)


def test_a_misspelt_option() -> None:
    problem = complaint("--max-num-sequences=3", code=2)
    assert problem.startswith("unrecognized arguments: --max-num-sequences=3; did you mean --max-num-seqs?")


def test_help_lists_every_setting_and_loads_nothing_heavy() -> None:
    code = "import sys\nfrom twostep.cli.main import main\ntry: main(['serve', '--help'])\nexcept SystemExit: pass\n"
    heavy = "print(sorted({'numpy', 'tokenizers', 'starlette', 'uvicorn', 'asyncio'} & sys.modules.keys()))"
    shown = subprocess.run([sys.executable, "-c", code + heavy], capture_output=True, text=True, check=True).stdout
    assert "--max-num-batched-tokens N" in shown
    assert "--no-enable-prefix-caching" in shown
    assert shown.endswith("\n[]\n")


def test_variables_that_kubernetes_sets_are_named_in_a_line() -> None:
    """The start goes on: here up to an address that nobody can listen on."""
    variables = {"TWOSTEP_CHAT_SERVICE_HOST": "10.0.0.7", "TWOSTEP_PORT": "tcp://10.0.0.7:80"}
    command = [COMMAND, "serve", "--host", "192.0.2.1"]
    ended = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=False)
    first, last = ended.stderr.splitlines()
    assert first == f"twostep: ignored environment variables that Kubernetes sets for services: {', '.join(variables)}"
    assert last.startswith("twostep: cannot listen on 192.0.2.1")


def test_it_says_which_profile_it_plans_by(default_model_path: Path, tmp_path: Path) -> None:
    own = identity_of(open_model(default_model_path), EngineConfig(threads=1))
    path, foreign = tmp_path / "own.json", tmp_path / "foreign.json"
    write_profile(profile_for(own), path)
    write_profile(profile_for(own, cpu="Other CPU"), foreign)
    for profile, used in ((path, str(path)), (foreign, None)):
        with serving(*SMALL, "--profile", str(profile)) as (_, lines):
            [said] = [line for line in lines if "step times: " in line]
            assert str(profile) in said
            assert ("not used: it is for CPU Other CPU" in said) == (used is None)
            config = ask(f"{address_of(lines)}/v1/config")
            assert config["profile"] == used
            assert config["settings"]["profile"] == {"value": str(profile), "set_by": "--profile"}


def test_a_profile_that_is_not_there_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "none.json"
    assert f"{path}: no such file; `twostep calibrate" in complaint(*SMALL, "--profile", str(path))


@pytest.mark.parametrize("words", [["no-such-model"], ["smollm2-135m", "--max-num-seqs", "0"], [__file__]])
def test_a_start_that_fails_is_one_line_and_leaves_no_process(words: list[str]) -> None:
    command = [COMMAND, "serve", "--port", "0", *words]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        said, complained = process.communicate()
    assert process.returncode == 1
    assert said == ""
    assert re.fullmatch(r"twostep: .+\n", complained)
    with pytest.raises(ProcessLookupError):  # the engine's process, begun early, belongs to the same group
        os.killpg(process.pid, 0)
