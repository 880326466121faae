"""The process that tries one form of structured output, apart from the engine so that the system can bound it.

A grammar comes from whoever sends a request. llguidance bounds most of what it costs, but a chain of some thousand
rules overflows the stack of the process that compiles it, and as many terminals that double each other take it half a
minute. So what is new is tried here first, where the kernel limits processor time, memory and stack, and dies alone.

Reads JSON with `kind` and `text` as `llguidance.grammar_from` takes them and the `limits` of `LLParserLimits`, and
writes what is wrong as a JSON string, empty if nothing is. Run as a file and free of imports from Twostep: it must
start quickly.
"""

import json
import resource
import sys
from typing import Any

CPU_S = 1
MEMORY_BYTES = 1 << 30
STACK_BYTES = 4 << 20
"""Half of what the engine's thread has."""


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, STACK_BYTES))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    json.dump(problem(json.load(sys.stdin)), sys.stdout)


def problem(asked: dict[str, Any]) -> str:
    """Over a vocabulary of bytes: what a grammar costs to compile does not depend on the model's."""
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

    try:
        grammar = grammar_from(asked["kind"], asked["text"])
    except ValueError as error:
        return str(error)
    limits = LLParserLimits(**asked["limits"], verbose_errors=False)
    matcher = LLMatcher(LLTokenizer("byte"), grammar, limits=limits, log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher.get_error()


if __name__ == "__main__":
    main()
