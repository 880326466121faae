"""`twostep serve`: how it is started to be compared."""

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.http_engine import Launch
from benchmarks.llama_server import SLOT_TOKENS, SLOTS
from benchmarks.loading import COMMAND
from twostep.config.settings import SETTINGS


def launch(version: str, threads: int, model: Path, kv_bytes_per_token: int, arguments: Sequence[str] = ()) -> Launch:
    """On defaults but for the room; with `arguments`, which are part of its name here."""
    return Launch(
        name=" ".join(("Twostep", *arguments)),
        version=version,
        file=model.name,
        command=[
            sys.executable, "-c", COMMAND, "serve", str(model), "--threads", str(threads), "--max-num-seqs", str(SLOTS),
            "--max-model-len", str(SLOT_TOKENS), "--kv-memory", f"{SLOTS * SLOT_TOKENS * kv_bytes_per_token}B",
            *arguments,
        ],
        environment={setting.variable: None for setting in SETTINGS},
    )  # fmt: skip
