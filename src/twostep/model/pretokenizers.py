"""How text is cut before byte-pair merging, by the name a file gives in `tokenizer.ggml.pre`.

A wrong cut gives other tokens than the model was trained on: fluent, worse answers. So a name that is not listed is
refused, `default` with them: converters write it when they do not know the cut.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from tokenizers import Regex, normalizers, pre_tokenizers

# Both patterns are part of the models' definitions: GPT-2's is built into ByteLevel, Qwen2's comes with its tokenizer.
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

Cut = tuple[normalizers.Normalizer | None, pre_tokenizers.PreTokenizer]


def _gpt2() -> Cut:
    return None, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> Cut:
    """GPT-2's cut, after each digit was set apart."""
    digits = pre_tokenizers.Digits(individual_digits=True)
    return None, pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])


def _qwen2() -> Cut:
    split = pre_tokenizers.Split(Regex(_QWEN2), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return normalizers.NFC(), pre_tokenizers.Sequence([split, to_bytes])


CUTS: Mapping[str, Callable[[], Cut]] = MappingProxyType({"gpt-2": _gpt2, "smollm": _smollm, "qwen2": _qwen2})
