"""One weight file made ready: network, tokenizer, chat template and what the file suggests for generation."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from threading import RLock
from typing import Any, TypeVar

from twostep.model.families import load_network
from twostep.model.gguf import GgufFile, read_gguf
from twostep.model.network import Network
from twostep.model.template import ChatTemplate, load_template
from twostep.model.tokenizer import Tokenizer, load_tokenizer
from twostep.processes import Owner

Made = TypeVar("Made")


@dataclass(frozen=True)
class LoadedModel:
    """`tokenizer` and `template` are made when first asked for, since not every use needs them.

    Both raise `ModelFileError` then if the file has none that can be used. Asking for `template` starts its process and
    returns at once: ask early, render late. In a forked child `template` raises `ForkedError`.
    """

    file: GgufFile
    network: Network
    encodes: bool = True
    """False in an engine's process, which seldom encodes text: then that part of the tokenizer is made when needed."""
    _owner: Owner = field(default_factory=lambda: Owner("this model"), compare=False, repr=False)
    _lock: Any = field(default_factory=RLock, compare=False, repr=False)
    _made: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def close(self) -> None:
        """Ends the template's process, if there is one. The template can no longer be used, all else can."""
        if (template := self._made.get("template")) is not None:
            template.close()

    @property
    def path(self) -> Path:
        return self.file.path

    @property
    def tokenizer(self) -> Tokenizer:
        return self._once("tokenizer", self._load_tokenizer)

    @property
    def template(self) -> ChatTemplate:
        self._owner.check()
        return self._once("template", lambda: load_template(self.file.metadata))

    def _once(self, name: str, make: Callable[[], Made]) -> Made:
        """What `make` returns, made once. A forked child takes no lock: a thread of the parent may have held it
        at the fork, and then it stays locked (so does that of `functools.cached_property`)."""
        with self._lock if self._owner.here else nullcontext():
            if name not in self._made:
                self._made[name] = make()
            made: Made = self._made[name]
            return made

    def _load_tokenizer(self) -> Tokenizer:
        tokenizer = load_tokenizer(self.file.metadata, encodes=self.encodes)
        if tokenizer.vocab_size > self.network.shape.vocab:
            problem = f"has {tokenizer.vocab_size} tokens, the embedding only {self.network.shape.vocab} rows"
            raise self.file.metadata.error("tokenizer.ggml.tokens", problem)
        return tokenizer


def open_model(path: Path, *, encodes: bool = True) -> LoadedModel:
    """Opens a weight file and checks its network; weights stay in the file. Raises `ModelFileError`."""
    file = read_gguf(path)
    return LoadedModel(file, load_network(file), encodes)
