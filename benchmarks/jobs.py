"""What engines are asked for, as tokens: prompts of random ids and fixed lengths of answers, the same in every run."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.prompts import prompt


@dataclass(frozen=True)
class Job:
    """A prompt of token ids and how many tokens the answer shall have, whatever they are."""

    prompt: Sequence[int]
    tokens: int


@dataclass(frozen=True)
class Stall:
    """Streams decode; when each has `after` tokens, a newcomer with a long prompt arrives."""

    streams: Sequence[Job]
    newcomer: Job
    after: int


def serving(run: int, count: int = 64) -> list[Job]:
    """Prompts of 32 to 512 tokens, answers of 16 to 256, both uniform. Only the ids depend on `run`, never lengths."""
    generator = random.Random(1234)
    sizes = [(generator.randint(32, 512), generator.randint(16, 256)) for _ in range(count)]
    return [Job(prompt(size, "serving", run, i), tokens) for i, (size, tokens) in enumerate(sizes)]


def stall(run: int, *, newcomer: int = 2048, tokens: int = 480, after: int = 48) -> Stall:
    """Four streams of 32 prompt tokens; `tokens` of each have to outlast the newcomer's prefill."""
    streams = [Job(prompt(32, "stream", run, i), tokens) for i in range(4)]
    return Stall(streams, Job(prompt(newcomer, "newcomer", run), 16), after)
