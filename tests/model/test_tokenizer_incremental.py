"""Detokenising as tokens come: characters stay whole, and all pieces together are what decoding at once gives."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.gguf_writer import write_gguf
from support.small_vocabulary import small_tokenizer_metadata

from twostep.model.detokenizer import IncrementalDetokenizer
from twostep.model.gguf import read_gguf
from twostep.model.tokenizer import Tokenizer, load_tokenizer

FAMILY = "\N{WOMAN}\u200d\N{WOMAN}\u200d\N{GIRL}\u200d\N{BOY}"
FLAGS = "\U0001f1e9\U0001f1ea\U0001f1ef\U0001f1f5"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = write_gguf(tmp_path_factory.mktemp("model") / "small.gguf", small_tokenizer_metadata())
    return load_tokenizer(read_gguf(path).metadata)


def pushed(tokenizer: Tokenizer, ids: list[int], skip_special: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special)
    return [*(detokenizer.push(id_) for id_ in ids), detokenizer.flush()]


def byte_ids(tokenizer: Tokenizer, raw: bytes) -> list[int]:
    ids = {tokenizer.token_bytes(id_): id_ for id_ in range(256)}
    return [ids[bytes([byte])] for byte in raw]


@pytest.mark.parametrize(
    "text", ["hello", "grüße", "漢字かな", FAMILY, FLAGS, "a\N{COMBINING ACUTE ACCENT}", "\U0010ffff"]
)
def test_each_character_comes_whole_with_its_last_byte(tokenizer: Tokenizer, text: str) -> None:
    pieces = pushed(tokenizer, byte_ids(tokenizer, text.encode()))
    expected = [piece for character in text for piece in ["", "", "", character][-len(character.encode()) :]]
    assert pieces == [*expected, ""]


def test_unfinished_character_is_held_back_until_the_end(tokenizer: Tokenizer) -> None:
    assert pushed(tokenizer, byte_ids(tokenizer, "ok 漢".encode()[:-1])) == ["o", "k", " ", "", "", "\ufffd"]


def test_bytes_that_cannot_become_a_character_do_not_wait(tokenizer: Tokenizer) -> None:
    assert pushed(tokenizer, byte_ids(tokenizer, b"\xff\xe6a\x80")) == ["\ufffd", "", "\ufffda", "\ufffd", ""]


def test_flush_is_ready_for_a_new_stream(tokenizer: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer)
    first, second = byte_ids(tokenizer, b"\xe6A")
    assert [detokenizer.push(first), detokenizer.flush(), detokenizer.push(second)] == ["", "\ufffd", "A"]


@given(data=st.data(), skip_special=st.booleans())
def test_all_pieces_are_the_text_decoded_at_once(tokenizer: Tokenizer, data: st.DataObject, skip_special: bool) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    whole = tokenizer.decode(ids, skip_special=skip_special)
    raw = b"".join(tokenizer.token_bytes(id_, skip_special=skip_special) for id_ in ids)
    assert "".join(pushed(tokenizer, ids, skip_special)) == whole == raw.decode(errors="replace")


@given(text=st.text(), raw=st.binary(max_size=8))
def test_text_with_damage_comes_out_as_python_decodes_it(tokenizer: Tokenizer, text: str, raw: bytes) -> None:
    damaged = text.encode() + raw + text.encode()[::-1]
    assert "".join(pushed(tokenizer, byte_ids(tokenizer, damaged))) == damaged.decode(errors="replace")


def test_default_model_streams_what_it_encodes(default_model_path: Path) -> None:
    tokenizer = load_tokenizer(read_gguf(default_model_path).metadata)
    text = f"Hello, wörld! {FAMILY} {FLAGS} 漢字"
    pieces = pushed(tokenizer, tokenizer.encode(text, special=False))
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)
