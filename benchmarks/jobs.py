"""What engines are asked for: prompts of random token ids and fixed answer lengths, the same in every run."""

import random
from collections.abc import Sequence
from dataclasses import dataclass


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


FIRST_TOKEN, LAST_TOKEN = 1000, 20000
"""Ordinary words in the vocabularies of the models measured: no special or unused tokens."""


def prompt(tokens: int, *key: object) -> list[int]:
    """`tokens` random token ids that depend on `key` and on nothing else."""
    generator = random.Random(f"{tokens} {key}")
    return [generator.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(tokens)]
