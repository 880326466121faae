"""Tells a person on standard error what is being measured; results belong to standard output and files."""

import sys
from time import perf_counter

_STARTED_S = perf_counter()


def say(line: str) -> None:
    print(f"{perf_counter() - _STARTED_S:6.1f} s  {line}", file=sys.stderr, flush=True)
