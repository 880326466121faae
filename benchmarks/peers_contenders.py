"""The servers that are compared: each engine with each of its settings, how it is started, its installed size."""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks import http_engine
from benchmarks.engines import programs_version, requantise
from benchmarks.http_engine import FIRST, SLOT_TOKENS, SLOTS, HttpEngine, Launch
from benchmarks.measurement import EngineError
from benchmarks.openvino import OpenVinoServing, Tuning
from benchmarks.peers_install import LLAMA, OPENVINO, VLLM, Missing, Peer, find, llama_programs, peers_folder
from benchmarks.peers_model import LLAMA_BEST
from benchmarks.serving_engines import ServingEngine
from twostep.model.loaded import open_model

OURS = "Twostep"
OUR_SETTINGS = ((), ("--preset", "batch"))
"""Defaults, with an ITL budget of 50 ms; and the preset for throughput."""
LLAMA_SETTINGS = ((), ("-b", "128", "-ub", "128"))
"""Defaults, and the step size that delays other requests least during a long prompt."""
OPENVINO_CHUNKS = (256, 128)
VLLM_SETTINGS = ("--max-num-batched-tokens", "256")
"""Also the best step size for throughput. Only one setting, as a start takes two minutes."""
INSTALLED = Path(__file__).with_name("installed.py")


@dataclass(frozen=True)
class Started:
    """A running engine. `start_s`: from the start of its process to its first answer."""

    engine: ServingEngine
    pid: int
    start_s: float


@dataclass(frozen=True)
class Contender:
    """One column of the table: an engine with weights and settings."""

    engine: str
    name: str
    version: str
    file: str
    command: str
    """Without paths of this machine."""
    installed_bytes: int | None
    """None if not installed as a package, as in a source tree."""
    start: Callable[[], Started]


@dataclass(frozen=True)
class Place:
    """Model, threads and options for all engines. `scratch` is a temporary folder for converted weights."""

    model: Path
    threads: int
    scratch: Path
    options: argparse.Namespace
    """`peers_dir`, `llama_dir`, `llama_version`, `openvino_python`, `vllm_python`."""

    @property
    def folder(self) -> Path:
        return peers_folder(self.options.peers_dir)


def ours(place: Place, version: str) -> list[Contender]:
    kv = open_model(place.model).network.shape.kv_bytes_per_token()
    size = _installed(Path(sys.executable), "twostep", needed=False)["bytes"]
    launches = [http_engine.launch_twostep(version, place.threads, place.model, kv, more) for more in OUR_SETTINGS]
    return [over_http(OURS, launch, size) for launch in launches]


def peers(place: Place) -> Iterator[Contender | Missing]:
    """All engines that can be started, and why the others cannot."""
    for peer, contenders in ((LLAMA, _llama), (OPENVINO, _openvino), (VLLM, _vllm)):
        try:
            yield from contenders(place)
        except NotThereError as error:
            yield error.missing
        except EngineError as error:
            yield Missing(peer.name, f"failed: {error}")


class NotThereError(EngineError):
    """An engine is not installed."""

    def __init__(self, missing: Missing) -> None:
        super().__init__(missing.reason)
        self.missing = missing


def _llama(place: Place) -> list[Contender]:
    """Its fastest weight format with defaults and with short steps, then our weight format."""
    options = place.options
    folder = options.llama_dir or llama_programs(_python(LLAMA, None, place))
    version = options.llama_version or (programs_version(folder) if options.llama_dir else LLAMA.packages[0])
    best = requantise(folder, place.model, LLAMA_BEST, place.scratch)
    chosen = [*((best, settings) for settings in LLAMA_SETTINGS), (place.model, LLAMA_SETTINGS[0])]
    launches = [http_engine.launch_llama_server(folder, version, place.threads, model, more) for model, more in chosen]
    return [over_http(LLAMA.name, launch, _llama_bytes(folder)) for launch in launches]


def _llama_bytes(folder: Path) -> int:
    """Size of its server and the libraries beside it, without links and other programs."""
    files = [folder / "llama-server", *folder.glob("*.so*")]
    return sum(path.stat().st_size for path in files if path.is_file() and not path.is_symlink())


def _openvino(place: Place) -> list[Contender]:
    python = _python(OPENVINO, place.options.openvino_python, place)
    found = _installed(python, OPENVINO.distribution)
    return [_openvino_with(place, python, found, chunk) for chunk in OPENVINO_CHUNKS]


def _openvino_with(place: Place, python: Path, found: dict[str, Any], chunk: int) -> Contender:
    kind = f"{place.model.stem.rpartition('.')[2]}, steps of {chunk}"
    tuning = Tuning(chunk_tokens=chunk, cache_tokens=SLOTS * SLOT_TOKENS)
    return Contender(
        engine=OPENVINO.name,
        name=f"{OPENVINO.name} {kind}",
        version=f"{OPENVINO.distribution} {found['version']}",
        file=place.model.name,
        command=f"openvino_driver.py {place.model.name} {place.threads} {' '.join(tuning.arguments)}",
        installed_bytes=found["bytes"],
        start=partial(_start_openvino, python, place, kind, tuning),
    )


def _start_openvino(python: Path, place: Place, kind: str, tuning: Tuning) -> Started:
    begun_s = perf_counter()
    engine = OpenVinoServing(python, place.threads, place.model, kind, tuning)
    engine.closed([FIRST], 1)
    return Started(engine, engine.pid, perf_counter() - begun_s)


def _vllm(place: Place) -> list[Contender]:
    python = _python(VLLM, place.options.vllm_python, place)
    found = _installed(python, VLLM.distribution)
    model = http_engine.hf_folder(python, place.model, place.folder / "models")
    version = f"{VLLM.distribution} {found['version']}"
    launch = http_engine.launch_vllm(python, version, place.threads, model, VLLM_SETTINGS)
    return [over_http(VLLM.name, launch, found["bytes"])]


def over_http(engine: str, launch: Launch, installed_bytes: int | None) -> Contender:
    return Contender(
        engine,
        launch.name,
        launch.version,
        launch.file,
        shown_command(launch),
        installed_bytes,
        partial(_start_http, launch),
    )


def _start_http(launch: Launch) -> Started:
    engine = HttpEngine(launch)
    return Started(engine, engine.pid, engine.start_s)


def shown_command(launch: Launch) -> str:
    """The command for the result: file names without folders, `python -c ...` as the program it runs."""
    words = [Path(word).name if word.startswith("/") else word for word in launch.command]
    if "-c" in words[:2]:
        words[:3] = ["twostep"]
    set_here = [f"{name}={_names(value)}" for name, value in launch.environment.items() if value is not None]
    return " ".join([*set_here, *words])


def _names(value: str) -> str:
    return ":".join(Path(part).name for part in value.split(":"))


def _python(peer: Peer, given: Path | None, place: Place) -> Path:
    """Raises `NotThereError`."""
    found = given or find(peer, place.folder)
    if isinstance(found, Missing):
        raise NotThereError(found)
    return found


def _installed(python: Path, *packages: str, needed: bool = True) -> dict[str, Any]:
    """`version` and `bytes` of a package. Raises `EngineError` if it is `needed` and not installed."""
    command: Sequence[str] = [str(python), "-I", str(INSTALLED), *packages]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise EngineError(f"{python}: {error.strerror}") from error
    if done.returncode == 0:
        found: dict[str, Any] = json.loads(done.stdout)
        return found
    if needed:
        raise EngineError(f"{packages[0]} is not installed in the environment of {python.name}")
    return {"version": None, "bytes": None}
