"""vLLM's CPU build: the model as it takes it, and how its server is started with what measured fastest."""

import os
import subprocess
from collections.abc import Sequence
from ctypes.util import find_library
from pathlib import Path

from benchmarks.errors import EngineError
from benchmarks.http_engine import Launch
from benchmarks.llama_server import SLOT_TOKENS, SLOTS

MAKE_MODEL = Path(__file__).with_name("hf_model.py")
KV_GIB = 1
"""Whole GiB: the least with room for all slots of the default model, for which they need 0.8."""


def hf_folder(python: Path, model: Path, folder: Path) -> Path:
    """The model in `folder`, made if it is not there. Raises `EngineError`."""
    target = folder / f"{model.stem}-as-bf16"
    if not target.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        command = [str(python), "-I", str(MAKE_MODEL), str(model), str(target)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise EngineError(f"{MAKE_MODEL.name}: exit code {done.returncode}: {last}")
    return target


def launch(python: Path, version: str, threads: int, model: Path, arguments: Sequence[str] = ()) -> Launch:
    """`model` is a folder; `arguments`: further ones of the server, part of its name here."""
    return Launch(
        name=" ".join(("vLLM bf16", *arguments)),
        version=version,
        file=model.name,
        command=[
            str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name",
            "default", "--dtype", "bfloat16", "--max-num-seqs", str(SLOTS), "--max-model-len", str(SLOT_TOKENS),
            "--no-enable-prefix-caching", "--disable-uvicorn-access-log", *arguments,
        ],
        environment=_environment(python, threads),
        further={"model": "default"},
    )  # fmt: skip


def _environment(python: Path, threads: int) -> dict[str, str | None]:
    """As vLLM's documents for CPUs say, as far as the libraries are there: its own OpenMP, and tcmalloc."""
    tcmalloc, openmp = find_library("tcmalloc_minimal"), python.parent.parent / "lib" / "libiomp5.so"
    preload = [*([tcmalloc] if tcmalloc else []), *([str(openmp)] if openmp.is_file() else [])]
    return {
        "LD_PRELOAD": ":".join(preload) or None,
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads])),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
