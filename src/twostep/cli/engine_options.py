"""Options of the engine, for every command that has one serve many requests."""

import argparse
import re
from pathlib import Path
from typing import Any

from twostep.errors import InvalidParameterError

UNITS = {"B": 1} | {
    f"{prefix}{ending}": base**power
    for ending, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate(("K", "M", "G", "T"), 1)
}

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
        given |= kv_memory(memory)
    return given


def kv_memory(text: str) -> dict[str, Any]:
    """A share above 0 and at most 1, or bytes with a unit. Raises `InvalidParameterError`."""
    if match := re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)", text.strip()):
        number, unit = float(match[1]), match[2]
        if unit in UNITS and number > 0:
            return {"kv_bytes": int(number * UNITS[unit])}
        if not unit and 0 < number <= 1:
            return {"kv_share": number}
    allowed = f"a share above 0 and at most 1, such as 0.5, or a size in {', '.join(UNITS)}, such as 2GiB"
    raise InvalidParameterError(f"--kv-memory is {text!r}; it has to be {allowed}")
