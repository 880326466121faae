"""Children of ours import nothing from the working directory, and fail in words that blame nobody else."""

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from twostep import processes
from twostep.engine.text import form_worker
from twostep.engine.text.structured import StructuredOutput
from twostep.errors import InvalidParameterError, WorkerFailedError
from twostep.model.template import ChatTemplate
from twostep.processes import environment, python, twostep_module
from twostep.server.api.forms import FormCheck
from twostep.server.http.errors import api_error

COMMAND = str(Path(sys.executable).parent / "twostep")
SHADOWS = ("numpy", "queue", "pip", "jinja2", "json", "socket", "tokenizers", "llguidance", "sitecustomize")


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    """A folder whose modules leave a file `sprung` beside them when somebody imports them."""
    spring = f"open({str(tmp_path / 'sprung')!r}, 'a').write(__name__ + ' ')\nraise ImportError('a trap')\n"
    for name in SHADOWS:
        (tmp_path / f"{name}.py").write_text(spring)
    (tmp_path / "twostep").mkdir()
    (tmp_path / "twostep" / "__init__.py").write_text(spring)
    return tmp_path


@pytest.fixture(params=[None, "", ".", f"{os.pathsep}/nowhere", f"/nowhere{os.pathsep}./"])
def python_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of `PYTHONPATH` that say nothing, or say the working directory, mostly unintended."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if request.param is not None:
        monkeypatch.setenv("PYTHONPATH", request.param)


def run(command: list[str], folder: Path, said: str = "", **more: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command, cwd=folder, input=said, capture_output=True, text=True, timeout=240, check=False, env=os.environ | more
    )


def assert_not_sprung(trap: Path) -> None:
    sprung = trap / "sprung"
    assert not sprung.exists(), sprung.read_text()


@pytest.mark.usefixtures("python_path")
class TestChildren:
    def test_a_command_of_python(self, trap: Path) -> None:
        said = subprocess.run(
            python("-c", "import json, sys; print(json.dumps(sys.path))"),
            cwd=trap,
            env=environment(),
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert not {"", ".", str(trap)} & set(json.loads(said))
        assert_not_sprung(trap)

    def test_a_module_is_of_the_package_that_runs(self, trap: Path) -> None:
        command = twostep_module("twostep.engine.process.host", "1000")
        ended = subprocess.run(command, cwd=trap, env=environment(), capture_output=True, text=True, check=False)
        assert "Bad file descriptor" in ended.stderr, "it has to reach its own main, which wants a socket"
        assert_not_sprung(trap)


def test_paths_that_are_absolute_stay() -> None:
    fixed = {"PYTHONPATH": os.pathsep.join(["/opt/a", "", "lib", "/opt/b"])}
    assert environment(fixed)["PYTHONPATH"] == os.pathsep.join(["/opt/a", "/opt/b"])
    assert "PYTHONPATH" not in environment({"PYTHONPATH": ""})
    assert environment({"MORE": "1"})["MORE"] == "1"


def test_a_command_forgets_relative_paths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", "/opt/a", "lib"]))
    monkeypatch.setattr(sys, "path", ["/bin", str(tmp_path), "/opt/a", str(tmp_path / "lib"), "/usr/lib/python", ""])
    processes.forget_relative_paths()
    assert sys.path == ["/bin", "/opt/a", "/usr/lib/python"]


@pytest.mark.usefixtures("default_model_path")
@pytest.mark.parametrize("path", [None, os.pathsep.join(["/nowhere", ""])], ids=["", "PYTHONPATH"])
class TestCommandsInAFolderOfTraps:
    """With an empty entry in `PYTHONPATH`, Python itself imports from the folder while it starts: a `sitecustomize`,
    and what comes before the first line of ours."""

    @pytest.fixture(autouse=True)
    def prepared(self, trap: Path, path: str | None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.delenv("PYTHONPATH", raising=False)
        if path is not None:
            monkeypatch.setenv("PYTHONPATH", path)
            for name in ("sitecustomize.py", "twostep/__init__.py", "json.py"):
                (trap / name).unlink()
            (trap / "twostep").rmdir()
        yield
        assert_not_sprung(trap)

    def test_generate(self, trap: Path) -> None:
        ended = run([COMMAND, "generate", "Say hello.", "--max-tokens", "2"], trap)
        assert (ended.returncode, ended.stderr) == (0, "")
        assert ended.stdout.strip()

    def test_chat(self, trap: Path) -> None:
        ended = run([COMMAND, "chat", "--max-tokens", "2"], trap, "Hi\n")
        assert ended.returncode == 0, ended.stderr

    def test_pull(self, trap: Path) -> None:
        """Of an index that is not there: what matters is whose pip says so."""
        ended = run(
            [COMMAND, "pull", "smollm2-135m"],
            trap,
            TWOSTEP_MODELS=str(trap / "models"),
            PIP_INDEX_URL="http://127.0.0.1:9/",
        )
        assert "No module named pip" not in ended.stderr
        assert ended.returncode == 0 or "twostep: smollm2-135m" in ended.stderr

    def test_serve(self, trap: Path) -> None:
        command = [COMMAND, "serve", "--port", "0", "--max-num-seqs", "2", "--kv-memory", "32MiB"]
        with subprocess.Popen(command, cwd=trap, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as served:
            assert served.stdout is not None
            said = []
            for line in served.stdout:
                said.append(line)
                if "http://" in line:
                    break
            served.send_signal(signal.SIGTERM)
            said.append(served.stdout.read())
        assert any("http://" in line for line in said), said
        assert "Traceback" not in "".join(said)


# --- workers: limits, and who is to blame -------------------------------------------------------------------------


def check(form: StructuredOutput) -> None:
    asyncio.run(FormCheck().check(form, "response_format"))


NAME = StructuredOutput("regex", "[a-z]+")


@pytest.mark.parametrize(
    ("limit", "hard"),
    [
        (resource.RLIMIT_STACK, form_worker.STACK_BYTES // 2),
        (resource.RLIMIT_AS, form_worker.MEMORY_BYTES // 2),
        (resource.RLIMIT_CPU, 60),
        (resource.RLIMIT_CORE, 0),
    ],
)
def test_hard_limits_below_the_worker_s_own_are_kept(limit: int, hard: int) -> None:
    code = f"import resource, runpy, sys; resource.setrlimit({limit}, ({hard}, {hard}))\n"
    code += f"runpy.run_path({form_worker.__file__!r}, run_name='__main__')"
    asked = {"kind": "regex", "text": "a+", "limits": {}}
    ended = subprocess.run([sys.executable, "-c", code], input=json.dumps(asked), capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, 'ready\n""', "")


def test_a_template_s_worker_keeps_hard_limits_too() -> None:
    """Also one of processor time that leaves it less than a rendering may take."""
    code = "import resource; resource.setrlimit(resource.RLIMIT_CPU, (1, 1))\n"
    code += "from twostep.model.template import ChatTemplate\nprint(ChatTemplate('{{ 6 * 7 }}', 'it').render([]).text)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.stdout, ended.stderr) == ("42\n", "")


def broken(folder: Path, text: str) -> str:
    """A stand-in for the interpreter that runs workers."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("interpreter", "message"),
    [
        ("cat > /dev/null; echo 'ValueError: cannot start' >&2; exit 1", "ValueError: cannot start"),
        ("cat > /dev/null; kill -KILL $$", "it ended with status -9"),
        ("cat > /dev/null; kill -SEGV $$", "it ended with status -11"),
        ("cat > /dev/null; echo ready; kill -KILL $$", "it ended with status -9"),
        ("cat > /dev/null; echo ready; exit 1", "it ended with status 1"),
        ("cat > /dev/null", "it ended with status 0"),
    ],
)
def test_a_worker_that_breaks_is_not_the_client_s_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interpreter: str, message: str
) -> None:
    monkeypatch.setattr(sys, "executable", broken(tmp_path, interpreter))
    with pytest.raises(WorkerFailedError, match=f"could not be checked, its worker failed: {message}") as failed:
        check(NAME)
    assert (api_error(failed.value).status, api_error(failed.value).code) == (500, "worker_failed")


def test_a_worker_that_cannot_start_is_not_the_client_s_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    with pytest.raises(WorkerFailedError, match="its worker failed: No such file"):
        check(NAME)


@pytest.mark.parametrize(
    ("interpreter", "message"),
    [
        ("cat > /dev/null; echo ready; kill -XCPU $$", "it takes more than 1 s to compile"),
        ("cat > /dev/null; echo ready; kill -ABRT $$", "it is too deep or too large to compile"),
        (f"cat > /dev/null; echo ready; exit {form_worker.NO_MEMORY}", "it is too deep or too large to compile"),
    ],
)
def test_what_a_form_does_to_the_worker_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interpreter: str, message: str
) -> None:
    monkeypatch.setattr(sys, "executable", broken(tmp_path, interpreter))
    with pytest.raises(InvalidParameterError, match=f"response_format: the regex cannot be used: {message}"):
        check(NAME)


def test_a_template_s_worker_that_breaks_is_not_the_client_s_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", broken(tmp_path, "exit 1"))
    template = ChatTemplate("{{ messages }}", "the template")
    with pytest.raises(WorkerFailedError, match=r"the template: the process that renders it failed: .*status 1"):
        template.render([])
    template.close()
