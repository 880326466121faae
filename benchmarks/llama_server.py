"""llama.cpp's `llama-server`: how it is started. Its batching lies in the server, not in the library."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.http_engine import Launch

SLOTS, SLOT_TOKENS = 16, 2304
"""Requests at a time, and the context of each: what the longest job needs."""


def launch(folder: Path, version: str, threads: int, model: Path, arguments: Sequence[str] = ()) -> Launch:
    """`folder` holds llama.cpp's programs. `arguments`: further ones of the server, part of its name here."""
    kind = model.stem.rpartition("-as-")[2].rpartition(".")[2]
    return Launch(
        name=" ".join(("llama-server", kind, *arguments)),
        version=version,
        file=model.name,
        command=[
            str(folder / "llama-server"), "-m", str(model), "-t", str(threads), "-tb", str(threads),
            "-np", str(SLOTS), "-c", str(SLOTS * SLOT_TOKENS), "-cb", "--cache-ram", "0", "--no-webui", *arguments,
        ],
        further={"cache_prompt": False},
    )  # fmt: skip
