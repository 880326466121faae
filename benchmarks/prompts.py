"""Prompts of token ids, the same in every run of a benchmark and never with a common prefix."""

import random

FIRST_TOKEN, LAST_TOKEN = 1000, 20000
"""Ordinary words in the vocabularies of the models measured: no special or unused tokens."""


def prompt(tokens: int, *key: object) -> list[int]:
    """`tokens` random token ids that depend on `key` and on nothing else."""
    generator = random.Random(f"{tokens} {key}")
    return [generator.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(tokens)]
