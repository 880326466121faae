"""One weight file made ready: network, tokenizer, chat template and what the file suggests for generation."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from twostep.model.families import load_network
from twostep.model.gguf import GgufFile, read_gguf
from twostep.model.network import Network
from twostep.model.template import ChatTemplate, load_template
from twostep.model.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class LoadedModel:
    """`tokenizer` and `template` are made when first asked for, since not every use needs them.

    Both raise `ModelFileError` then if the file has none that can be used. Asking for `template` starts its process and
    returns at once: ask early, render late.
    """

    file: GgufFile
    network: Network

    def close(self) -> None:
        """Ends the template's process, if there is one. The template can no longer be used, all else can."""
        if (template := self.__dict__.get("template")) is not None:
            template.close()

    @property
    def path(self) -> Path:
        return self.file.path

    @cached_property
    def tokenizer(self) -> Tokenizer:
        tokenizer = load_tokenizer(self.file.metadata)
        if tokenizer.vocab_size > self.network.shape.vocab:
            problem = f"has {tokenizer.vocab_size} tokens, the embedding only {self.network.shape.vocab} rows"
            raise self.file.metadata.error("tokenizer.ggml.tokens", problem)
        return tokenizer

    @cached_property
    def template(self) -> ChatTemplate:
        return load_template(self.file.metadata)


def open_model(path: Path) -> LoadedModel:
    """Opens a weight file and checks its network; weights stay in the file. Raises `ModelFileError`."""
    file = read_gguf(path)
    return LoadedModel(file, load_network(file))
