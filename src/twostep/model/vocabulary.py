"""A file's tokens: their text, which are special, which begin a sequence and which end an answer.

Files have wrong token types, or none: then control tokens would be text, prompts twice as long and answers without end.
So tokens that are control tokens by their text are taken for such. Only a token that no merge makes can be one: text
never becomes it, so that it has to have been added on purpose.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from twostep.model.metadata import Metadata

TEMPLATE_KEY = "tokenizer.chat_template"

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # token types of GGUF

_END_TOKENS = frozenset({
    "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|end_of_text|>", "<end_of_turn>", "</s>",
    "<|return|>", "<|call|>", "<EOT>", "_<EOT>", "<end_of_utterance>", "<|eot|>", "<|endofturn|>",
    "<|END_OF_TURN_TOKEN|>", "<\uff5cend\u2581of\u2581sentence\uff5c>",
})  # fmt: skip
"""Control tokens that end an answer, for files that name only one of several. Those that end a file in models of code
are not among them: they may stand in the middle of an answer."""

_CONTROL_TOKENS = _END_TOKENS | {
    "<|im_start|>", "<|im_sep|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>",
    "<start_of_turn>", "<bos>", "<eos>", "<pad>", "<s>", "[INST]", "[/INST]", "<|system|>", "<|user|>", "<|assistant|>",
    "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>",
    "<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>",
}  # fmt: skip
"""Texts that are control tokens in every model which has them as tokens of their own."""

_MARKED = re.compile("<[|\uff5c][^<>\\s]{1,62}[|\uff5c]>")
"""Texts that are control tokens where a chat template writes them."""
_TAG = re.compile(r"</?[A-Za-z][^<>\s]{0,62}>|\[/?[A-Z][A-Z_]{0,62}\]")
"""Texts that a chat template may write as tokens of their own, and users and models too."""

_MOST_SHOWN = 40
"""Characters of a token in a message."""

_BOS_KEY = "tokenizer.ggml.bos_token_id"
_END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


@dataclass(frozen=True)
class Vocabulary:
    """`control` tokens mark structure and are left out of text; `user_defined` ones are text kept whole.

    Both map id to text. `eos_ids` are all ids that end an answer; `adds_bos`: a prompt begins with `bos_id`.
    `retyped` are those of the special tokens which the file has with another type.
    """

    tokens: list[str]
    control: Mapping[int, str]
    user_defined: Mapping[int, str]
    bos_id: int | None
    eos_ids: frozenset[int]
    adds_bos: bool
    retyped: tuple[int, ...] = ()

    def notes(self) -> Iterator[str]:
        """What is wrong with the file and was put right, in words."""
        for what, kind in (("control", self.control), ("user-defined", self.user_defined)):
            if named := ", ".join(f"{_shown(kind[id_])} ({id_})" for id_ in self.retyped if id_ in kind):
                yield f"read as {what} tokens, which the file says they are not: {named}"


def read_vocabulary(metadata: Metadata) -> Vocabulary:
    """The vocabulary of any kind of tokenizer. Raises `ModelFileError` if it is missing or contradicts itself."""
    tokens = metadata.strings("tokenizer.ggml.tokens").decoded()
    kinds = _kinds(metadata, len(tokens))
    retyped = _retyped(metadata, tokens, kinds)
    kinds |= retyped
    control = {id_: tokens[id_] for id_, kind in kinds.items() if kind == _CONTROL}
    user_defined = {id_: tokens[id_] for id_, kind in kinds.items() if kind == _USER_DEFINED}
    bos_id = _token_id(metadata, _BOS_KEY, len(tokens))
    adds_bos = metadata.flag("tokenizer.ggml.add_bos_token", False)
    if adds_bos and bos_id is None:
        raise metadata.error(_BOS_KEY, "is missing, though tokenizer.ggml.add_bos_token is true")
    eos_ids = _eos_ids(metadata, len(tokens), control)
    return Vocabulary(tokens, control, user_defined, bos_id, eos_ids, adds_bos, tuple(retyped))


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


def _retyped(metadata: Metadata, tokens: list[str], kinds: Mapping[int, int]) -> dict[int, int]:
    """Types of the tokens whose type in the file, `kinds` or normal, is wrong."""
    template = metadata.text(TEMPLATE_KEY, "")
    control, kept_whole = _CONTROL_TOKENS.union(_MARKED.findall(template)), frozenset(_TAG.findall(template))
    named = {id_ for key in (_BOS_KEY, *_END_KEYS) if (id_ := _token_id(metadata, key, len(tokens))) is not None}
    wrong = {}
    for id_, text in enumerate(tokens):
        kind = kinds.get(id_, _NORMAL)
        if (text in control or id_ in named) and kind in (_NORMAL, _USER_DEFINED, _UNUSED):
            wrong[id_] = _CONTROL
        elif text in kept_whole and kind == _NORMAL:
            wrong[id_] = _USER_DEFINED
    merged = _merged(metadata, {tokens[id_] for id_ in wrong}) if wrong else ()
    return {id_: kind for id_, kind in wrong.items() if len(tokens[id_]) > 1 and tokens[id_] not in merged}


def _merged(metadata: Metadata, texts: Collection[str]) -> Collection[str]:
    """Those of `texts` that merging makes."""
    key = "tokenizer.ggml.merges"
    merges = metadata.strings(key).decoded() if key in metadata else []
    return {text for merge in merges if (text := merge.replace(" ", "", 1)) in texts}


def _shown(token: str) -> str:
    """Any token, in a line of moderate length without what would steer a terminal."""
    return ascii(token if len(token) <= _MOST_SHOWN else token[:_MOST_SHOWN] + "...")


def _eos_ids(metadata: Metadata, count: int, control: Mapping[int, str]) -> frozenset[int]:
    """Harmony's models end a part of an answer with `<|end|>`, and the answer with `<|return|>` or `<|call|>`."""
    named = (_token_id(metadata, key, count) for key in _END_KEYS)
    ends = _END_TOKENS & frozenset(control.values())
    if {"<|return|>", "<|call|>"} <= ends:
        ends -= {"<|end|>"}
    known = (id_ for id_, text in control.items() if text in ends)
    return frozenset(id_ for id_ in (*named, *known) if id_ is not None)
