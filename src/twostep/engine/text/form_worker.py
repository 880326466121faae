"""Compiles one form of structured output in a separate process, where the system limits time, memory and stack.

Grammars come from clients. llguidance bounds most of their cost, but a chain of some thousand rules overflows the stack
of the compiling process, and as many terminals that double each other take half a minute. So a new form is compiled
here first, where a failure affects nothing else.

Reads JSON with `kind` and `text` as `llguidance.grammar_from` takes them and the `limits` of `LLParserLimits`. Writes a
line `ready` when it begins to compile: earlier errors are not the form's fault. Then it writes the error as a JSON
string, empty if there is none, or exits with `NO_MEMORY`. Run as a file and free of imports from Twostep: it must
start quickly.
"""

import json
import resource
import sys
from typing import Any

READY = "ready"
NO_MEMORY = 3
"""The exit status where the form needs more memory than `MEMORY_BYTES`."""
CPU_S = 1
MEMORY_BYTES = 1 << 30
STACK_BYTES = 4 << 20
"""Half of what the engine's thread has."""


def main() -> None:
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_STACK, STACK_BYTES)
    limit(resource.RLIMIT_AS, MEMORY_BYTES)
    limit(resource.RLIMIT_CPU, CPU_S, grace=1)  # at the first limit comes SIGXCPU, which only the form can cause
    asked = json.load(sys.stdin)
    import llguidance  # noqa: F401 - what is missing or does not fit is said before the form is blamed

    print(READY, flush=True)
    try:
        json.dump(problem(asked), sys.stdout)
    except MemoryError:
        sys.exit(NO_MEMORY)


def limit(what: int, wanted: int, grace: int = 0) -> None:
    """Sets a limit of this process, and `grace` above it one that it cannot raise; a lower hard limit stays."""
    _, hard = resource.getrlimit(what)
    soft, above = (wanted + more if hard == resource.RLIM_INFINITY else min(wanted + more, hard) for more in (0, grace))
    resource.setrlimit(what, (soft, above))


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
