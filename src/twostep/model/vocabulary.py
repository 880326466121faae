"""A file's tokens: their text, which are special, which begin a sequence and which end an answer."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from twostep.model.metadata import Metadata

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # token types of GGUF

# Control tokens that end an answer, for models whose file names only one of several.
_END_TOKENS = frozenset(
    ["<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|end_of_text|>", "<end_of_turn>", "</s>"]
)
_BOS_KEY = "tokenizer.ggml.bos_token_id"
_END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


@dataclass(frozen=True)
class Vocabulary:
    """`control` tokens mark structure and are left out of text; `user_defined` ones are text kept whole.

    Both map id to text. `eos_ids` are all ids that end an answer; `adds_bos`: a prompt begins with `bos_id`.
    """

    tokens: list[str]
    control: Mapping[int, str]
    user_defined: Mapping[int, str]
    bos_id: int | None
    eos_ids: frozenset[int]
    adds_bos: bool


def read_vocabulary(metadata: Metadata) -> Vocabulary:
    """The vocabulary of any kind of tokenizer. Raises `ModelFileError` if it is missing or contradicts itself."""
    tokens = metadata.strings("tokenizer.ggml.tokens").decoded()
    kinds = _kinds(metadata, len(tokens))
    control = {id_: tokens[id_] for id_, kind in kinds.items() if kind == _CONTROL}
    user_defined = {id_: tokens[id_] for id_, kind in kinds.items() if kind == _USER_DEFINED}
    bos_id = _token_id(metadata, _BOS_KEY, len(tokens))
    adds_bos = metadata.flag("tokenizer.ggml.add_bos_token", False)
    if adds_bos and bos_id is None:
        raise metadata.error(_BOS_KEY, "is missing, though tokenizer.ggml.add_bos_token is true")
    return Vocabulary(tokens, control, user_defined, bos_id, _eos_ids(metadata, len(tokens), control), adds_bos)


def _kinds(metadata: Metadata, count: int) -> dict[int, int]:
    """Types of the tokens that are not normal, by id. Files may leave the types out."""
    key = "tokenizer.ggml.token_type"
    if key not in metadata:
        return {}
    kinds = metadata.integers(key)
    if len(kinds) != count:
        raise metadata.error(key, f"has {len(kinds)} entries for {count} tokens")
    return {int(id_): int(kinds[id_]) for id_ in np.flatnonzero(kinds != _NORMAL)}


def _token_id(metadata: Metadata, key: str, count: int) -> int | None:
    if key not in metadata:
        return None
    id_ = metadata.count(key)
    if id_ >= count:
        raise metadata.error(key, f"is {id_}, outside the vocabulary of {count}")
    return id_


def _eos_ids(metadata: Metadata, count: int, control: Mapping[int, str]) -> frozenset[int]:
    named = (_token_id(metadata, key, count) for key in _END_KEYS)
    known = (id_ for id_, text in control.items() if text in _END_TOKENS)
    return frozenset(id_ for id_ in (*named, *known) if id_ is not None)
