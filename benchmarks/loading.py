"""Time to the first token: in this process, and of `twostep generate` from its start."""

import os
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from time import perf_counter

from benchmarks.jobs import prompt
from benchmarks.measurement import Spread, spread
from benchmarks.model_driver import Driver
from twostep.model.loaded import open_model

PROMPT_TOKENS = 32
COMMAND = "import sys; from twostep.cli.main import main; sys.exit(main())"
"""Equivalent of the installed `twostep` script."""


@dataclass(frozen=True)
class Loading:
    """Seconds, with the file in the page cache."""

    open_s: Spread
    """Reading the header and checking the tensors."""
    tokenizer_s: Spread
    executor_s: Spread
    """Repacking weights and starting threads."""
    first_token_s: Spread
    """Prefill of 32 tokens and sampling of the first token, on untouched memory."""
    total_s: Spread
    command_s: Spread
    """From the start of `twostep generate --max-tokens 1` to its first byte of output, chat template included."""


def measure(model: str, path: Path, runs: int, threads: int | None) -> Loading:
    laps = [_load(path, run, threads) for run in range(runs)]
    opened, tokenizer, executor, first_token = (spread(part) for part in zip(*laps, strict=True))
    total = spread([sum(lap) for lap in laps])
    command = spread([first_byte_s(model) for _ in range(runs)])
    return Loading(opened, tokenizer, executor, first_token, total, command)


def _load(path: Path, run: int, threads: int | None) -> list[float]:
    """Seconds of each part, in the order of `Loading`."""
    tokens = prompt(PROMPT_TOKENS, "load", run)
    times = [perf_counter()]
    model = open_model(path)
    times.append(perf_counter())
    _ = model.tokenizer
    times.append(perf_counter())
    driver = Driver(model.network, prompt=PROMPT_TOKENS, threads=threads)
    times.append(perf_counter())
    driver.prefill(tokens)
    times.append(perf_counter())
    return [after - before for before, after in pairwise(times)]


def first_byte_s(model: str) -> float:
    """Raises `CalledProcessError` if the command fails."""
    command = [sys.executable, "-c", COMMAND, "generate", "--model", model, "--max-tokens", "1", "Why is the sky blue?"]
    started = perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        os.read(process.stdout.fileno(), 1)
        elapsed = perf_counter() - started
        process.stdout.read()
    if process.returncode != 0:
        raise subprocess.CalledProcessError(process.returncode, command)
    return elapsed
