"""Defaults for three kinds of traffic, and how defaults change where the user's settings need it."""

from collections.abc import Mapping
from typing import Any

from twostep.config.sources import Given, Layer
from twostep.config.values import NS_PER_MS
from twostep.core.policies import TimeBudget, TokenBudget, Unchunked
from twostep.core.scheduler import least_step_tokens

SERVER_PRESET = "chat"
"""What `twostep serve` takes if the user names none. Other commands and `LLM` then use the table's defaults."""

PRESETS: Mapping[str, Mapping[str, Any]] = {
    # Short prompts, many turns, users watch the stream: steady latency for a moderate number of people.
    "chat": {
        "enable_prefix_caching": True,
        "chunking": TimeBudget(50 * NS_PER_MS),
        "max_num_seqs": 32,
        "max_num_batched_tokens": 512,
    },
    # Long prompts over shared documents, short answers. With no decodes to delay, the time budget gives way to its
    # ceiling, and a step may be wide.
    "rag": {
        "enable_prefix_caching": True,
        "chunking": TimeBudget(100 * NS_PER_MS),
        "max_num_seqs": 16,
        "max_num_batched_tokens": 1024,
    },
    # Throughput only. Kernels reach full speed at a few hundred tokens a step; wider steps than these would only delay
    # cancellations and pings.
    "batch": {
        "enable_prefix_caching": True,
        "chunking": TokenBudget(1024),
        "max_num_seqs": 256,
        "max_num_batched_tokens": 1024,
    },
}


def from_preset(name: str) -> Layer:
    """The preset's settings; `name` has been checked."""
    by = f"preset {name}"
    return {setting: Given(value, by, f"{setting} ({by})") for setting, value in PRESETS[name].items()}


def adjusted(defaults: Layer, said: Layer) -> Layer:
    """The defaults, changed where what the user said needs it; each changed one names its cause.

    The user's own settings stay as they are: if they contradict each other, `resolution` refuses them. None for
    `max_num_batched_tokens` means as many as the longest request has, which is known when the model is loaded.
    """
    adjusting = _Adjusting(defaults, said)
    adjusting.fit_chunks()
    adjusting.fit_decodes()
    return adjusting.defaults


class _Adjusting:
    def __init__(self, defaults: Layer, said: Layer) -> None:
        self.defaults, self._said = dict(defaults), said
        self._by = {name: given.by for name, given in defaults.items()}

    def _value(self, name: str) -> Any:
        return self._said.get(name, self.defaults[name]).value

    def _move(self, name: str, value: object, because: str) -> None:
        by = f"{self._by[name]}, moved by {self._said[because].called}"
        self.defaults[name] = Given(value, by, f"{name} ({by})")

    def fit_chunks(self) -> None:
        """A step has to hold a chunk; if prompts are not cut, it has to hold the longest prompt."""
        chunking, widest = self._value("chunking"), self._value("max_num_batched_tokens")
        chunk_tokens = chunking.budget_tokens if isinstance(chunking, TokenBudget) else None
        if "max_num_batched_tokens" in self._said:
            if "chunking" not in self._said and chunk_tokens and widest and chunk_tokens > widest:
                self._move("chunking", TokenBudget(widest), "max_num_batched_tokens")
        elif isinstance(chunking, Unchunked):
            longest = self._value("max_model_len")
            self._move("max_num_batched_tokens", longest, "chunking")
        elif chunk_tokens and chunk_tokens > widest:
            self._move("max_num_batched_tokens", chunk_tokens, "chunking")

    def fit_decodes(self) -> None:
        """A step has to hold a token of each sequence, beside what prompts need."""
        max_num_seqs, widest = self._value("max_num_seqs"), self._value("max_num_batched_tokens")
        least = least_step_tokens(max_num_seqs, self._value("chunking"))
        if widest is None or widest >= least:
            return
        if "max_num_batched_tokens" not in self._said:
            because = "max_num_seqs" if "max_num_seqs" in self._said else "chunking"
            self._move("max_num_batched_tokens", least, because)
        elif "max_num_seqs" not in self._said:
            self._move("max_num_seqs", max(1, widest - (least - max_num_seqs)), "max_num_batched_tokens")
