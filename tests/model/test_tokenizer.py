"""Tokenising: golden ids of two models, special tokens, the vocabulary's rules, and refusals."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from support.gguf_writer import Value, write_gguf
from support.small_vocabulary import small_tokenizer_metadata

import twostep.model.tokenizer as tokenizer_module
from twostep.errors import ModelFileError, TwostepError
from twostep.model.gguf import read_gguf
from twostep.model.tokenizer import Tokenizer, load_tokenizer

DATA = Path(__file__).parents[1] / "data"

Loaded = Callable[[Mapping[str, Value | None]], Tokenizer]


@pytest.fixture
def loaded(tmp_path: Path) -> Loaded:
    """A tokenizer of a small vocabulary, after keys were changed, or left out where None."""

    def load(changes: Mapping[str, Value | None]) -> Tokenizer:
        named = {key if "." in key else f"tokenizer.ggml.{key}": value for key, value in changes.items()}
        values = small_tokenizer_metadata() | named
        path = tmp_path / "model.gguf"
        write_gguf(path, {key: value for key, value in values.items() if value is not None})
        return load_tokenizer(read_gguf(path).metadata)

    return load


@pytest.fixture(scope="module")
def default_tokenizer(default_model_path: Path) -> Tokenizer:
    return load_tokenizer(read_gguf(default_model_path).metadata)


def check_golden(tokenizer: Tokenizer, name: str) -> None:
    cases = json.loads((DATA / f"tokenizer_golden_{name}.json").read_text())
    assert len(cases) > 200
    wrong = [case for case in cases if tokenizer.encode(case["text"], special=case["special"]) != case["ids"]]
    assert wrong == []


def test_default_model_agrees_with_golden_ids(default_tokenizer: Tokenizer) -> None:
    check_golden(default_tokenizer, "smollm2")
    assert default_tokenizer.eos_ids == {0, 2}
    assert default_tokenizer.bos_id == 1


@pytest.mark.models
def test_qwen2_agrees_with_golden_ids(model_path: Callable[[str], Path]) -> None:
    tokenizer = load_tokenizer(read_gguf(model_path("qwen2.5-coder-0.5b")).metadata)
    check_golden(tokenizer, "qwen2")
    assert tokenizer.eos_ids == {151643, 151645}


@pytest.mark.parametrize("encodes", [True, False])
def test_what_encodes_text_is_made_once_at_loading_or_when_needed(
    default_model_path: Path, monkeypatch: pytest.MonkeyPatch, encodes: bool
) -> None:
    made: list[object] = []

    def counted(*arguments: object) -> object:
        made.append(arguments)
        return original(*arguments)

    original: Callable[..., object] = tokenizer_module._bpe
    monkeypatch.setattr(tokenizer_module, "_bpe", counted)
    tokenizer = load_tokenizer(read_gguf(default_model_path).metadata, encodes=encodes)
    assert len(made) == encodes
    assert tokenizer.longest_token_bytes > 1
    assert tokenizer.decode([40, 50, 60]) != ""
    assert len(made) == encodes, "token ids need no merges"
    check_golden(tokenizer, "smollm2")
    assert len(made) == 1


def test_longest_token_is_that_of_all_tokens(default_tokenizer: Tokenizer, loaded: Loaded) -> None:
    for tokenizer in (default_tokenizer, loaded({})):
        lengths = [len(tokenizer.token_bytes(id_)) for id_ in range(tokenizer.vocab_size)]
        assert tokenizer.longest_token_bytes == max(lengths)


def test_merges_that_cannot_be_used_are_refused_when_they_are_needed(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, small_tokenizer_metadata() | {"tokenizer.ggml.merges": ["nowhere tobefound"]})
    metadata = read_gguf(path).metadata
    with pytest.raises(ModelFileError, match="merges"):
        load_tokenizer(metadata)
    tokenizer = load_tokenizer(metadata, encodes=False)
    with pytest.raises(ModelFileError, match="merges"):
        tokenizer.encode("text", special=False)


def test_decoding_gives_the_text_back(default_tokenizer: Tokenizer) -> None:
    texts = json.loads((DATA / "tokenizer_texts.json").read_text())
    for text in [*texts["plain"], *texts["marked"]]:
        ids = default_tokenizer.encode(text, special=False)
        in_vocabulary = text.translate(dict.fromkeys([0x04, 0x06, 0x13, 0x14, 0x16, 0x1D]))
        assert default_tokenizer.decode(ids) == in_vocabulary


def test_special_tokens_are_seen_only_where_asked(loaded: Loaded) -> None:
    tokenizer = loaded({})
    end, tool = tokenizer.vocabulary.tokens.index("<|im_end|>"), tokenizer.vocabulary.tokens.index("<tool>")
    text = "hello<|im_end|><tool>"
    marked, plain = tokenizer.encode(text, special=True), tokenizer.encode(text, special=False)
    assert marked[-2:] == [end, tool]
    assert not {end, tool} & set(plain)
    assert tokenizer.decode(plain) == tokenizer.decode(marked, skip_special=False) == text
    assert tokenizer.decode(marked) == "hello<tool>"


def test_merges_are_applied(loaded: Loaded) -> None:
    tokenizer = loaded({})
    ids = tokenizer.encode("hello hello", special=False)
    assert [tokenizer.vocabulary.tokens[id_] for id_ in ids] == ["hello", "\u0120", "hello"]
    assert [tokenizer.token_bytes(id_) for id_ in ids] == [b"hello", b" ", b"hello"]


def test_every_byte_has_a_token(loaded: Loaded) -> None:
    tokenizer = loaded({})
    assert {tokenizer.token_bytes(id_) for id_ in range(256)} == {bytes([byte]) for byte in range(256)}


@pytest.mark.parametrize("id_", [-1, 10_000])
def test_id_outside_the_vocabulary_is_an_error(loaded: Loaded, id_: int) -> None:
    with pytest.raises(ValueError, match=rf"token id {id_} is outside the vocabulary of \d+"):
        loaded({}).decode([id_])


def test_token_outside_the_byte_alphabet_is_its_own_text(loaded: Loaded) -> None:
    tokens = small_tokenizer_metadata()["tokenizer.ggml.tokens"]
    tokenizer = loaded({"tokens": [*tokens, "漢字"], "token_type": None})
    assert tokenizer.token_bytes(tokenizer.vocab_size - 1) == "漢字".encode()


def test_beginning_of_sequence_is_added_as_the_file_says_or_as_asked(loaded: Loaded) -> None:
    for adds, default in ((True, [0]), (False, []), (None, [])):
        tokenizer = loaded({"add_bos_token": adds, "bos_token_id": 0})
        assert tokenizer.encode("", special=False) == default
        assert tokenizer.encode("", special=False, add_bos=True) == [0]
        assert tokenizer.encode("", special=False, add_bos=False) == []
    with pytest.raises(TwostepError, match="no beginning-of-sequence token"):
        loaded({}).encode("", special=False, add_bos=True)


def test_ends_are_all_that_the_file_or_custom_names(loaded: Loaded) -> None:
    tokenizer = loaded({"eos_token_id": 3, "eot_token_id": 4, "eom_token_id": 5})
    assert tokenizer.eos_ids == {3, 4, 5, tokenizer.vocabulary.tokens.index("<|im_end|>")}


@pytest.mark.parametrize("kinds", [None, 1, 4, 5])
def test_control_tokens_of_another_type_are_control_tokens(loaded: Loaded, kinds: int | None) -> None:
    count = len(small_tokenizer_metadata()["tokenizer.ggml.tokens"])  # type: ignore[arg-type]
    types = None if kinds is None else np.array([1] * (count - 3) + [kinds, kinds, 4], np.int32)
    wrong, sound = loaded({"token_type": types}), loaded({})
    assert wrong.vocabulary.control == sound.vocabulary.control
    assert wrong.eos_ids == sound.eos_ids == {261}
    text = "<|im_start|>user hello<|im_end|>"
    assert wrong.encode(text, special=True) == sound.encode(text, special=True)
    [note] = wrong.vocabulary.notes()
    assert note == (
        "read as control tokens, which the file says they are not: '<|im_start|>' (260), '<|im_end|>' (261)"
    )
    assert not [*sound.vocabulary.notes()]


def test_tokens_that_the_template_writes_are_special(loaded: Loaded) -> None:
    tokens = [*small_tokenizer_metadata()["tokenizer.ggml.tokens"][:-3], "<|turn|>", "<|other|>", "<tool>", "hell<"]  # type: ignore[index]
    template = "<|turn|>{{ messages }}<tool>hell<hello{{ '<|absent|>' }}"
    tokenizer = loaded({"tokens": tokens, "token_type": None, "tokenizer.chat_template": template})
    assert [*tokenizer.vocabulary.control.values()] == ["<|turn|>"]
    assert [*tokenizer.vocabulary.user_defined.values()] == ["<tool>"]
    assert [*tokenizer.vocabulary.notes()] == [
        "read as control tokens, which the file says they are not: '<|turn|>' (260)",
        "read as user-defined tokens, which the file says they are not: '<tool>' (262)",
    ]


def test_a_token_that_text_merges_into_is_text(loaded: Loaded) -> None:
    """`<s>` is struck-out text in a vocabulary that has learnt it; so is what a file wrongly names as the end."""
    tokens = [*small_tokenizer_metadata()["tokenizer.ggml.tokens"][:-3], "<s", "<s>", "</s>"]  # type: ignore[index]
    merges = ["h e", "l l", "he ll", "hell o", "< s", "<s >"]
    tokenizer = loaded({"tokens": tokens, "token_type": None, "merges": merges, "eos_token_id": 259})
    assert tokenizer.vocabulary.control == {262: "</s>"}
    assert tokenizer.eos_ids == {259, 262}


def test_the_end_that_a_file_names_is_a_control_token(loaded: Loaded) -> None:
    tokens = [*small_tokenizer_metadata()["tokenizer.ggml.tokens"], "(end)"]  # type: ignore[misc]
    tokenizer = loaded({"tokens": tokens, "token_type": None, "eos_token_id": 263})
    assert tokenizer.vocabulary.control[263] == "(end)"
    assert tokenizer.decode([263]) == ""


def test_harmony_goes_on_after_the_end_of_a_part(loaded: Loaded) -> None:
    tokens = [*small_tokenizer_metadata()["tokenizer.ggml.tokens"][:-3], "<|end|>", "<|return|>", "<|call|>"]  # type: ignore[index]
    assert loaded({"tokens": tokens, "token_type": None}).eos_ids == {261, 262}
    assert loaded({"tokens": tokens[:-2], "token_type": None}).eos_ids == {260}


def test_a_tokens_text_in_a_note_steers_no_terminal(loaded: Loaded) -> None:
    tokens = [*small_tokenizer_metadata()["tokenizer.ggml.tokens"], "<|\x1b[31m" + "x" * 50 + "|>"]  # type: ignore[misc]
    template = tokens[-1] + "{{ messages }}"
    [note, *_] = loaded({"tokens": tokens, "token_type": None, "tokenizer.chat_template": template}).vocabulary.notes()
    assert "\x1b" not in note
    assert "\\x1b[31mxxx" in note


def test_digits_are_cut_as_the_file_says(loaded: Loaded) -> None:
    tokens = [*small_tokenizer_metadata()["tokenizer.ggml.tokens"], "12"]
    changes = {"tokens": tokens, "token_type": None, "merges": ["1 2"]}
    assert len(loaded({**changes, "pre": "gpt-2"}).encode("12", special=False)) == 1
    assert len(loaded({**changes, "pre": "smollm"}).encode("12", special=False)) == 2
    assert len(loaded({**changes, "pre": "qwen2"}).encode("12", special=False)) == 2


def test_only_qwen2_composes_characters(loaded: Loaded) -> None:
    decomposed, composed = "e\u0301", "\u00e9"
    for pre, expected in (("gpt-2", decomposed), ("smollm", decomposed), ("qwen2", composed)):
        tokenizer = loaded({"pre": pre})
        assert tokenizer.decode(tokenizer.encode(decomposed, special=False)) == expected


def test_text_that_is_not_unicode_is_refused(loaded: Loaded) -> None:
    with pytest.raises(TwostepError, match="not Unicode: surrogates not allowed, at character 2"):
        loaded({}).encode("ab\ud800c", special=True)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": None}, "'tokenizer.ggml.model' is missing"),
        ({"model": "llama"}, "'tokenizer.ggml.model' is 'llama'; supported: 'gpt2'"),
        ({"pre": None}, "'tokenizer.ggml.pre' is missing"),
        ({"pre": "default"}, "'tokenizer.ggml.pre' is 'default'; supported: gpt-2, smollm, qwen2"),
        ({"tokens": None}, "'tokenizer.ggml.tokens' is missing"),
        ({"tokens": ["a", "b", "a"], "token_type": None}, "'tokenizer.ggml.tokens' has token 'a' twice"),
        ({"merges": None}, "'tokenizer.ggml.merges' is missing"),
        ({"merges": ["ab"]}, "'tokenizer.ggml.merges' has 'ab', which is not two tokens"),
        ({"merges": ["nowhere known"]}, "'tokenizer.ggml.merges' cannot be used"),
        ({"token_type": np.ones(3, np.int32)}, "'tokenizer.ggml.token_type' has 3 entries for"),
        ({"token_type": np.ones(3, np.float32)}, "'tokenizer.ggml.token_type' is an array of 3 float32"),
        ({"eos_token_id": 100_000}, "'tokenizer.ggml.eos_token_id' is 100000, outside the vocabulary"),
        ({"bos_token_id": np.int32(-1)}, "'tokenizer.ggml.bos_token_id' is -1"),
        ({"add_bos_token": True}, "'tokenizer.ggml.bos_token_id' is missing, though"),
        ({"add_bos_token": 1}, "'tokenizer.ggml.add_bos_token' is 1, needs true or false"),
    ],
)
def test_unsound_or_unsupported_tokenizer_is_refused(
    loaded: Loaded, changes: Mapping[str, Value | None], named: str
) -> None:
    with pytest.raises(ModelFileError) as caught:
        loaded(changes)
    assert named in str(caught.value)
