"""Twostep: serve, explain and foretell large language models on the machine you have.

    from twostep import LLM, SamplingParams
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twostep.engine.llm import LLM
    from twostep.engine.params import SamplingParams

__all__ = ["LLM", "SamplingParams"]

_HOMES = {"LLM": "twostep.engine.llm", "SamplingParams": "twostep.engine.params"}


def __getattr__(name: str) -> Any:
    """Loads what is asked for when it is: the command starts without the engine, `core` and `sim` run without numpy."""
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
