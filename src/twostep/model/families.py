"""Which architectures are supported, and the way from an open file to its network."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

from twostep.errors import ModelFileError
from twostep.model.gguf import GgufFile
from twostep.model.llama import LLAMA, QWEN2, build
from twostep.model.network import Network

FAMILIES: Mapping[str, Callable[[GgufFile], Network]] = MappingProxyType(
    {variant.family: partial(build, variant=variant) for variant in (LLAMA, QWEN2)}
)
"""What builds the network of a file, by its `general.architecture`."""


def load_network(file: GgufFile) -> Network:
    """The network of `file`, by its `general.architecture`. Raises `ModelFileError` if part of it is unsupported."""
    family = file.metadata.text("general.architecture")
    if family not in FAMILIES:
        supported = ", ".join(FAMILIES)
        raise ModelFileError(f"{file.path}: architecture {family[:60]!r} is not supported; supported: {supported}")
    return FAMILIES[family](file)
