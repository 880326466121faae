"""What engines are asked for: prompts of random token ids and fixed answer lengths, the same in every run."""

import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """A prompt of token ids, and the number of tokens to generate."""

    prompt: Sequence[int]
    tokens: int


@dataclass(frozen=True)
class Stall:
    """Streams that decode; when each has `after` tokens, a request with a long prompt arrives (the newcomer)."""

    streams: Sequence[Job]
    newcomer: Job
    after: int


def serving(run: int, count: int = 64) -> list[Job]:
    """Prompts of 32 to 512 tokens, answers of 16 to 256, both uniform. `run` changes the ids, but not the lengths."""
    generator = random.Random(1234)
    sizes = [(generator.randint(32, 512), generator.randint(16, 256)) for _ in range(count)]
    return [Job(prompt(size, "serving", run, i), tokens) for i, (size, tokens) in enumerate(sizes)]


def stall(run: int, *, newcomer: int = 2048, tokens: int = 480, after: int = 48) -> Stall:
    """Four streams with prompts of 32 tokens. Their `tokens` must outlast the prefill of the newcomer."""
    streams = [Job(prompt(32, "stream", run, i), tokens) for i in range(4)]
    return Stall(streams, Job(prompt(newcomer, "newcomer", run), 16), after)


FIRST_TOKEN, LAST_TOKEN = 1000, 20000
"""Range of ordinary words in the vocabularies of the measured models, without special or unused tokens."""


def prompt(tokens: int, *key: object) -> list[int]:
    """`tokens` random token ids that depend only on `tokens` and `key`; prompts have no common prefix."""
    generator = random.Random(f"{tokens} {key}")
    return [generator.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(tokens)]
