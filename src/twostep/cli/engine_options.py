"""Options of the engine, for every command that has one serve many requests."""

import argparse
from pathlib import Path
from typing import Any

from twostep.engine.kv_memory import kv_memory

NAMES = ("max_num_seqs", "max_model_len", "chunking", "kv_memory", "record")


def add_to(group: "argparse._ArgumentGroup") -> None:
    """None stands for the engine's default, which `EngineConfig` has."""
    group.add_argument("--max-num-seqs", type=int, metavar="N", help="sequences that run at a time")
    group.add_argument("--max-model-len", type=int, metavar="N", help="most tokens of prompt and answer together")
    group.add_argument("--chunking", metavar="HOW", help="how prompts are cut: none, tokens=N or time=MS a step")
    group.add_argument(
        "--kv-memory", metavar="SIZE",
        help="share of free memory for the model and its KV cache, such as 0.5, or size of the cache, such as 2GiB",
    )  # fmt: skip
    group.add_argument("--record", type=Path, metavar="FILE", help="write every plan and step time, for twostep replay")


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """Keywords for `EngineConfig`, of what was given. Raises `InvalidParameterError` for a size that is none."""
    given = {name: getattr(options, name) for name in NAMES if getattr(options, name) is not None}
    if (memory := given.pop("kv_memory", None)) is not None:
        given |= kv_memory(memory, "--kv-memory")
    return given
