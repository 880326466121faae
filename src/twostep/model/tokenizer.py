"""Text to token ids and back, for byte-level BPE: the vocabulary from a weight file, the merging by `tokenizers`."""

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import chain
from typing import NamedTuple, Self

from tokenizers import AddedToken
from tokenizers import Tokenizer as Merger
from tokenizers.models import BPE

from twostep.errors import TwostepError
from twostep.model.metadata import Metadata
from twostep.model.pretokenizers import CUTS
from twostep.model.vocabulary import Vocabulary, read_vocabulary


class Tokenizer:
    """One model's tokens. Safe to use from several threads."""

    def __init__(self, vocabulary: Vocabulary, make_bpe: Callable[[], BPE], pre: str) -> None:
        """`make_bpe` is called by `prepare`, or when text is encoded first."""
        self.vocabulary = vocabulary
        self._special = {**vocabulary.control, **vocabulary.user_defined}
        self._make_bpe, self._pre = make_bpe, pre
        self._made: _Mergers | None = None
        self._control_ids = {text: id_ for id_, text in vocabulary.control.items()}

    def prepare(self) -> None:
        """Makes what encodes text. Raises `ModelFileError` if the file's merges cannot be used."""
        _ = self._mergers

    @property
    def _mergers(self) -> "_Mergers":
        """Made once; by two threads at the same time perhaps twice, which does no harm."""
        if self._made is None:
            self._made = _Mergers.of(self._make_bpe(), self._pre, self.vocabulary)
        return self._made

    @property
    def vocab_size(self) -> int:
        return len(self.vocabulary.tokens)

    @property
    def bos_id(self) -> int | None:
        return self.vocabulary.bos_id

    @property
    def eos_ids(self) -> frozenset[int]:
        """All ids that end an answer."""
        return self.vocabulary.eos_ids

    @cached_property
    def longest_token_bytes(self) -> int:
        """No token stands for more bytes."""
        longest, tokens = 0, self.vocabulary.tokens
        for id_ in sorted(range(self.vocab_size), key=[*map(len, tokens)].__getitem__, reverse=True):
            if 4 * len(tokens[id_]) <= longest:  # UTF-8 has at most four bytes a character
                break
            longest = max(longest, len(self.token_bytes(id_)))
        return longest

    def encode(self, text: str, *, special: bool, add_bos: bool | None = None) -> list[int]:
        """Token ids of `text`.

        With `special`, the text of a control or user-defined token is that token; without, it is ordinary text.
        `add_bos` None does what the file says. Bytes that the vocabulary
        lacks leave no token, as when the model was trained (SmolLM2: some control characters).
        Raises `TwostepError` for text that is not Unicode (a lone surrogate), or if the model has no BOS to add.
        """
        _check_unicode(text)
        merger = self._mergers.marked if special else self._mergers.plain
        # Of the library's ways to encode the one that lets other threads run, and is three times as fast.
        return [*self._bos(add_bos), *merger.encode_batch_fast([text], add_special_tokens=False)[0].ids]

    @cached_property
    def missing_bytes(self) -> frozenset[int]:
        """Bytes that have no token. Tokens of several bytes are merged from those of one, so no text has them."""
        return frozenset(map(_BYTE_OF.__getitem__, _BYTE_OF.keys() - set(self.vocabulary.tokens)))

    def encode_exact(self, text: str) -> list[int]:
        """Token ids whose bytes are exactly those of `text`, up to the first character that has `missing_bytes`.

        `encode` gives those of the normalised text, as the model was trained. Special tokens are ordinary text here.
        Raises `TwostepError` for text that is not Unicode.
        """
        _check_unicode(text)
        missing = self.missing_bytes
        known = next((at for at, character in enumerate(text) if not missing.isdisjoint(character.encode())), len(text))
        return self._mergers.exact.encode_batch_fast([text[:known]], add_special_tokens=False)[0].ids

    def encode_raw(self, text: str, *, parse_special: bool = True, add_bos: bool | None = None) -> list[int]:
        """Token ids of a text without a chat template. Without `parse_special` it may hold no control tokens."""
        return self.encode_given(text, [] if parse_special else [(0, len(text))], add_bos=add_bos)

    def encode_given(self, text: str, given: Sequence[tuple[int, int]], *, add_bos: bool | None = None) -> list[int]:
        """Token ids of `text` of which some parts, from start to stop and in order, are not to be trusted.

        The text of a control token is that token only where no character of it is `given`; that of a user-defined
        token is always that token. So the ids are those of `encode` with `special` unless there is a control token in
        what is given. `add_bos` and errors are those of `encode`.
        """
        if not self._is_forged(text, given):
            return self.encode(text, special=True, add_bos=add_bos)
        _check_unicode(text)
        texts, control = self._apart(text, given)
        encoded = self._mergers.kept_whole.encode_batch_fast(texts, add_special_tokens=False)
        ids = [encoded[0].ids, *([id_, *after.ids] for id_, after in zip(control, encoded[1:], strict=True))]
        return [*self._bos(add_bos), *chain.from_iterable(ids)]

    def _is_forged(self, text: str, given: Sequence[tuple[int, int]]) -> bool:
        """Whether a control token's text has a character of what is given."""
        stops = [stop for _, stop in given]
        for token in self._control_ids:
            start = text.find(token)
            while start >= 0:
                after = bisect_right(stops, start)  # the first part that ends behind the token's begin
                if after < len(given) and given[after][0] < start + len(token):
                    return True
                start = text.find(token, start + 1)
        return False

    def _apart(self, text: str, given: Sequence[tuple[int, int]]) -> tuple[list[str], list[int]]:
        """The texts between control tokens that are not given, and the ids of these tokens."""
        edges = [0, *chain.from_iterable(given), len(text)]
        texts, control, end = [], [], 0
        for start, stop in zip(edges[::2], edges[1::2], strict=True):
            for match in self._control_pattern.finditer(text, start, stop):
                texts.append(text[end : match.start()])
                control.append(self._control_ids[match[0]])
                end = match.end()
        return [*texts, text[end:]], control

    @cached_property
    def _control_pattern(self) -> "re.Pattern[str]":
        """Of control tokens that begin at the same place the longest is found, as in the library."""
        return re.compile("|".join(map(re.escape, sorted(self._control_ids, key=len, reverse=True))))

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD. `skip_special` leaves control tokens out."""
        return b"".join(self.token_bytes(id_, skip_special=skip_special) for id_ in ids).decode(errors="replace")

    def token_bytes(self, id_: int, *, skip_special: bool = False) -> bytes:
        """The bytes a token stands for, perhaps part of a character. Raises `ValueError` for an unknown id."""
        if not 0 <= id_ < self.vocab_size:
            raise ValueError(f"token id {id_} is outside the vocabulary of {self.vocab_size}")
        if id_ in self._special:
            return b"" if skip_special and id_ in self.vocabulary.control else self._special[id_].encode()
        token = self.vocabulary.tokens[id_]
        try:
            return bytes([_BYTE_OF[character] for character in token])
        except KeyError:  # a token that was never written in the byte alphabet
            return token.encode()

    def _bos(self, add_bos: bool | None) -> list[int]:
        if not (self.vocabulary.adds_bos if add_bos is None else add_bos):
            return []
        if self.bos_id is None:
            raise TwostepError("the model has no beginning-of-sequence token to add")
        return [self.bos_id]


class _Mergers(NamedTuple):
    """The library's tokenizers; they share one model."""

    plain: Merger
    marked: Merger
    """Special tokens are kept whole; in `kept_whole` user-defined ones only."""
    kept_whole: Merger
    exact: Merger

    @classmethod
    def of(cls, bpe: BPE, pre: str, vocabulary: Vocabulary) -> Self:
        plain, user_defined = _merger(bpe, pre, []), vocabulary.user_defined.values()
        special = [*vocabulary.control.values(), *user_defined]
        kept_whole = _merger(bpe, pre, user_defined) if user_defined else plain
        return cls(plain, _merger(bpe, pre, special), kept_whole, _merger(bpe, pre, [], normalized=False))


def load_tokenizer(metadata: Metadata, *, encodes: bool = True) -> Tokenizer:
    """The tokenizer of a file. Raises `ModelFileError` if it is missing, damaged or of an unsupported kind.

    Without `encodes` it is for token ids only: what encodes text is made, and merges are checked, when they are needed.
    """
    pre = supported_pre(metadata)
    vocabulary = read_vocabulary(metadata)
    tokenizer = Tokenizer(vocabulary, lambda: _bpe(metadata, vocabulary.tokens), pre)
    if encodes:
        tokenizer.prepare()
    return tokenizer


def supported_pre(metadata: Metadata) -> str:
    """The name of the pre-tokenizer. Raises `ModelFileError` if it or the kind of tokenizer is not supported."""
    model = metadata.text("tokenizer.ggml.model")
    if model != "gpt2":
        raise metadata.error("tokenizer.ggml.model", f"is {model[:60]!r}; supported: 'gpt2' (byte-level BPE)")
    pre = metadata.text("tokenizer.ggml.pre")
    if pre not in CUTS:
        raise metadata.error("tokenizer.ggml.pre", f"is {pre[:60]!r}; supported: {', '.join(CUTS)}")
    return pre


def _bpe(metadata: Metadata, tokens: list[str]) -> BPE:
    ids = {token: id_ for id_, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        twice = next(token for id_, token in enumerate(tokens) if ids[token] != id_)
        raise metadata.error("tokenizer.ggml.tokens", f"has token {twice[:60]!r} twice")
    key = "tokenizer.ggml.merges"
    merges = [_pair(metadata, key, merge) for merge in metadata.strings(key).decoded()]
    try:
        return BPE(ids, merges)
    except Exception as error:  # the library raises no narrower type
        raise metadata.error(key, f"cannot be used: {error}") from None


def _pair(metadata: Metadata, key: str, merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not space:
        raise metadata.error(key, f"has {merge[:60]!r}, which is not two tokens")
    return left, right


def _merger(bpe: BPE, pre: str, special: Iterable[str], normalized: bool = True) -> Merger:
    """`bpe` is shared, not copied: a second merger costs only its special tokens."""
    merger = Merger(bpe)
    normalizer, merger.pre_tokenizer = CUTS[pre]()
    if normalized and normalizer is not None:
        merger.normalizer = normalizer
    merger.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    return merger


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TwostepError(f"the text is not Unicode: {error.reason}, at character {error.start}") from None


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's stand-ins for bytes: printable Latin-1 characters are themselves, the others follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
