"""Writes the golden token ids of the tokenizer tests, by an implementation that shares nothing with the one under test.

    python tests/make_golden_tokenizer.py MODEL.gguf OUT.json    # needs `gguf` and `regex`

Byte-pair merging is done in plain Python, as its definition says: repeatedly join the neighbours whose merge was
learned first. Cuts are llama.cpp's lists of regular expressions for the same names, applied one after the other.
"""

import json
import random
import sys
import unicodedata
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import regex
from gguf import GGUFReader

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CUTS = {
    "smollm": [r"\p{N}", GPT2],
    "qwen2": [
        r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
}
COMPOSED = {"qwen2"}  # text is brought to Unicode's normal form C first

TEXTS = Path(__file__).parent / "data" / "tokenizer_texts.json"  # plain ones, and ones with special tokens in them
RANDOM_TEXTS = 150
RANDOM_RANGES = [
    (0x20, 0x7F), (0x20, 0x7F), (0x9, 0xE), (0xA0, 0x250), (0x370, 0x590), (0x3040, 0x3100), (0x4E00, 0x9FA0),
    (0x1F300, 0x1F640), (0x2000, 0x2070), (0xAC00, 0xD7A0),
]  # fmt: skip


class PlainTokenizer:
    def __init__(self, path: Path) -> None:
        fields = GGUFReader(path).fields
        self.pre: str = fields["tokenizer.ggml.pre"].contents()
        tokens = fields["tokenizer.ggml.tokens"].contents()
        kinds = fields["tokenizer.ggml.token_type"].contents()
        self.ids = {token: id_ for id_, token in enumerate(tokens)}
        self.special = {token for token, kind in zip(tokens, kinds, strict=True) if kind in (3, 4)}
        merges = fields["tokenizer.ggml.merges"].contents()
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}

    def encode(self, text: str, special: bool) -> list[int]:
        if not special:
            return self.encode_plain(text)
        pattern = "(" + "|".join(map(regex.escape, sorted(self.special, key=len, reverse=True))) + ")"
        ids = []
        for part in regex.split(pattern, text):
            ids += [self.ids[part]] if part in self.special else self.encode_plain(part)
        return ids

    def encode_plain(self, text: str) -> list[int]:
        words = [unicodedata.normalize("NFC", text) if self.pre in COMPOSED else text]
        for pattern in CUTS[self.pre]:
            words = [piece for word in words for piece in pieces(pattern, word)]
        return [self.ids[part] for word in words for part in self.merged(word) if part in self.ids]

    def merged(self, word: str) -> list[str]:
        parts = [STAND_IN[byte] for byte in word.encode()]
        never = len(self.ranks)
        while True:
            ranked = [(self.ranks.get(pair, never), at) for at, pair in enumerate(pairwise(parts))]
            rank, at = min(ranked, default=(never, 0))
            if rank == never:
                return parts
            parts[at : at + 2] = [parts[at] + parts[at + 1]]


def pieces(pattern: str, text: str) -> Iterator[str]:
    """The matches of `pattern` and what lies between them."""
    at = 0
    for match in regex.finditer(pattern, text):
        yield from filter(None, (text[at : match.start()], match.group()))
        at = match.end()
    yield from filter(None, (text[at:],))


def stand_ins() -> list[str]:
    """GPT-2's character for each byte: itself if it can be seen, else the next one from U+0100 on."""
    seen, hidden = [], 0
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174:
            seen.append(chr(byte))
        else:
            seen.append(chr(256 + hidden))
            hidden += 1
    return seen


STAND_IN = stand_ins()


def random_texts() -> Iterator[str]:
    rng = random.Random(0)
    for _ in range(RANDOM_TEXTS):
        ranges = rng.choices(RANDOM_RANGES, k=rng.randrange(1, 30))
        yield "".join(chr(rng.randrange(*bounds)) for bounds in ranges)


def main(model: Path, out: Path) -> None:
    tokenizer = PlainTokenizer(model)
    given = json.loads(TEXTS.read_text())
    texts = [(text, False) for text in [*given["plain"], *given["marked"], *random_texts()]]
    texts += [(text, True) for text in given["marked"]]
    cases = [{"text": text, "special": special, "ids": tokenizer.encode(text, special)} for text, special in texts]
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
    out.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
