"""Twostep: serve, explain and measure large language models on the machine you have.

    from twostep import LLM, SamplingParams

What is exported is loaded when it is asked for: the command starts without the engine, `core` and `sim` run without
numpy. Its types are in `__init__.pyi`.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "Delta": "twostep.engine.outputs",
    "EngineConfig": "twostep.config.configs",
    "LLM": "twostep.llm",
    "RequestOutput": "twostep.engine.outputs",
    "SamplingParams": "twostep.engine.params",
    "StructuredOutput": "twostep.engine.text.structured_output",
}
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("twostep")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES, "__version__"])
