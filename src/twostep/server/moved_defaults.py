"""Moves a preset's defaults out of the way of what the user said: the two never contradict each other."""

import re
from typing import Any

from twostep.server.sources import Given, Layer
from twostep.settings import Settings


def moved(preset: Layer, said: Layer) -> Layer:
    """The preset's settings, changed where those that the user said need it, and by whose wish.

    What the user said stays as it is: if that contradicts itself, it is for others to refuse. A value of None for
    `max_num_batched_tokens` means as many as the longest request has, which only the model tells.
    """
    return _Moving(preset, said).result()


class _Moving:
    def __init__(self, preset: Layer, said: Layer) -> None:
        self._preset, self._said, self._moved = preset, said, dict(preset)

    def result(self) -> Layer:
        self._fit_chunking()
        self._fit_decoding()
        return self._moved

    def _value(self, name: str) -> Any:
        return self._said.get(name, self._moved[name]).value

    def _move(self, name: str, value: object, because: str) -> None:
        by = f"{self._preset[name].by}, moved by {self._said[because].by}"
        self._moved[name] = Given(value, by)

    def _fit_chunking(self) -> None:
        """A step has to hold a chunk; where prompts are not cut, it has to hold the longest."""
        chunk, widest = _chunk_tokens(self._value("chunking")), self._value("max_num_batched_tokens")
        if "max_num_batched_tokens" in self._said:
            if "chunking" not in self._said and chunk is not None and chunk > widest:
                self._move("chunking", f"tokens={widest}", "max_num_batched_tokens")
        elif self._value("chunking") == "none":
            longest = self._said.get("max_model_len", Given(None, ""))
            self._move("max_num_batched_tokens", longest.value, "chunking")
        elif chunk is not None and chunk > widest:
            self._move("max_num_batched_tokens", chunk, "chunking")

    def _fit_decoding(self) -> None:
        """A step has to hold a token of each sequence, beside what prompts need."""
        seats, widest = self._value("max_num_seqs"), self._value("max_num_batched_tokens")
        try:
            least = Settings((1,), seats=seats, chunking=self._value("chunking")).least_step_tokens
        except ValueError:  # no chunking at all, which is refused where all settings are looked at
            return
        if widest is None or widest >= least:
            return
        if "max_num_batched_tokens" not in self._said:
            because = "max_num_seqs" if "max_num_seqs" in self._said else "chunking"
            self._move("max_num_batched_tokens", least, because)
        elif "max_num_seqs" not in self._said:
            self._move("max_num_seqs", max(1, widest - (least - seats)), "max_num_batched_tokens")


def _chunk_tokens(chunking: str) -> int | None:
    """None if it is not `tokens=N`."""
    found = re.fullmatch(r"tokens=(\d+)", chunking)
    return int(found[1]) if found else None
