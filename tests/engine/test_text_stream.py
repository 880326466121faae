"""Text as tokens come: nothing of a stop string or behind it leaks, nothing else waits, characters stay whole."""

from collections.abc import Sequence
from pathlib import Path
from time import process_time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.gguf_writer import write_gguf
from support.small_vocabulary import small_tokenizer_metadata

from twostep.engine.params import SamplingParams
from twostep.engine.text.text_stream import StopSearch, TextDelta, TextStream
from twostep.model.gguf import read_gguf
from twostep.model.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = write_gguf(tmp_path_factory.mktemp("model") / "small.gguf", small_tokenizer_metadata())
    return load_tokenizer(read_gguf(path).metadata)


def naive(pieces: Sequence[str], stops: Sequence[str], unheeded: int = 0) -> tuple[str, str | None]:
    """Text and stop of all pieces, the first `unheeded` of which end no stop: look through everything, each time."""
    text = ""
    for number, piece in enumerate(pieces):
        before, text = len(text), text + piece
        ends = [(start, stop) for stop in stops for start in range(len(text)) if text.startswith(stop, start)]
        new = sorted((start, len(stop), stop) for start, stop in ends if start + len(stop) > before)
        if new and number >= unheeded:
            return text[: new[0][0]], new[0][2]
    return text, None


def held_back(text: str, stops: Sequence[str]) -> str:
    """The longest end of the text that is a proper prefix of a stop."""
    ends = (text[start:] for start in range(len(text) + 1))
    return next(end for end in ends if not end or any(stop != end and stop.startswith(end) for stop in stops))


PIECES = st.lists(st.text("abc", max_size=4), max_size=12)
STOPS = st.lists(st.text("abc", min_size=1, max_size=6), min_size=1, max_size=4)


@given(pieces=PIECES, stops=STOPS, unheeded=st.integers(0, 4))
def test_search_finds_what_looking_through_everything_finds(pieces: list[str], stops: list[str], unheeded: int) -> None:
    search = StopSearch(stops)
    shown, stop = "", None
    for number, piece in enumerate(pieces):
        text, stop = search.push(piece, armed=number >= unheeded)
        shown += text
        if stop is not None:
            break
        assert shown + held_back("".join(pieces[: number + 1]), stops) == "".join(pieces[: number + 1])
    if stop is None:
        shown += search.flush()
    assert (shown, stop) == naive(pieces, stops, unheeded)


def test_of_stops_that_end_together_the_first_to_start_wins() -> None:
    assert StopSearch(["b", "abc"]).push("xabc") == ("x", "abc")
    assert StopSearch(["abcd", "ab"]).push("xabcd") == ("x", "ab")
    assert StopSearch(["abc", "b"]).push("ab") == ("a", "b")


def test_a_text_that_nearly_matches_all_the_time_is_searched_in_linear_time() -> None:
    """A search that compared every end of the text with the stop would need a minute for this."""
    search = StopSearch(["a" * 1000 + "b"])
    started = process_time()
    assert sum(len(search.push(character).text) for character in "a" * 200_000) == 199_000
    assert process_time() - started < 2


def ids_of(tokenizer: Tokenizer, *texts: str) -> list[int]:
    return [id_ for text in texts for id_ in tokenizer.encode(text, special=True)]


def streamed(tokenizer: Tokenizer, params: SamplingParams, ids: list[int]) -> list[str]:
    stream = TextStream(tokenizer, params)
    deltas = [stream.push([id_]) for id_ in ids]
    return [*(delta.text for delta in deltas), stream.flush()]


def test_the_head_of_a_stop_never_leaks(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, SamplingParams(stop=["END.", "hello!"]))
    deltas = [stream.push([id_]) for id_ in ids_of(tokenizer, "a", "E", "N", "x", "hello", "?", "E", "N", "D", ".")]
    given = [delta.text for delta in deltas]
    assert given == ["a", "", "", "ENx", "", "hello?", "", "", "", ""]
    assert deltas[-1] == TextDelta("", "END.", 1)


def test_nothing_comes_after_a_stop(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, SamplingParams(stop="l"))
    assert stream.push(ids_of(tokenizer, "a", "hello", "b")) == TextDelta("ahe", "l", 2)
    assert stream.push(ids_of(tokenizer, "c")) == TextDelta("", None, 0)
    assert stream.flush() == ""


def test_a_stop_is_shown_if_asked_for_and_what_follows_is_not(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, SamplingParams(stop="ell", include_stop_str_in_output=True))
    assert stream.push(ids_of(tokenizer, "a", "hello")) == TextDelta("ahell", "ell", 2)


def test_what_was_held_back_comes_at_the_end(tokenizer: Tokenizer) -> None:
    assert streamed(tokenizer, SamplingParams(stop="abc"), ids_of(tokenizer, "x", "a", "b")) == ["x", "", "", "ab"]


def test_a_character_cut_short_comes_at_the_end(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, SamplingParams(stop="a漢"))
    stream.push([id_ for id_ in range(256) if tokenizer.token_bytes(id_) == b"a"])
    stream.push([id_ for id_ in range(256) if tokenizer.token_bytes(id_) == "漢".encode()[:1]])
    assert stream.flush() == "a\ufffd"


def test_a_stop_token_leaves_no_text(tokenizer: Tokenizer) -> None:
    [tool] = ids_of(tokenizer, "<tool>")
    ids = [*ids_of(tokenizer, "a"), tool]
    assert "".join(streamed(tokenizer, SamplingParams(), ids)) == "a<tool>"
    assert "".join(streamed(tokenizer, SamplingParams(stop_token_ids=[tool]), ids)) == "a"
    shown = SamplingParams(stop_token_ids=[tool], include_stop_str_in_output=True)
    assert "".join(streamed(tokenizer, shown, ids)) == "a<tool>"


@pytest.mark.parametrize(("skip", "text"), [(True, "a"), (False, "a<|im_start|>")])
def test_special_tokens_are_text_only_if_asked_for(tokenizer: Tokenizer, skip: bool, text: str) -> None:
    ids = ids_of(tokenizer, "a", "<|im_start|>")
    assert "".join(streamed(tokenizer, SamplingParams(skip_special_tokens=skip), ids)) == text


def test_stops_count_once_min_tokens_are_out(tokenizer: Tokenizer) -> None:
    """One that completes earlier is ordinary text; one that began earlier counts when it completes."""
    params = SamplingParams(stop="ab", min_tokens=3)
    assert "".join(streamed(tokenizer, params, ids_of(tokenizer, *"abcabd"))) == "abc"
    assert "".join(streamed(tokenizer, params, ids_of(tokenizer, *"xxabd"))) == "xx"
    assert "".join(streamed(tokenizer, params, ids_of(tokenizer, *"xabd"))) == "xabd"


@given(data=st.data())
def test_streamed_text_is_the_whole_text_cut_at_the_first_stop(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Any tokens, halves of characters among them, in pushes of any size; stops are cut out of the text itself."""
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    whole = tokenizer.decode(ids)
    spans = st.tuples(st.integers(0, max(0, len(whole) - 1)), st.integers(1, 5))
    cut = st.lists(spans.map(lambda span: whole[span[0] : sum(span)] or "x"), max_size=3)
    params = SamplingParams(stop=data.draw(cut), min_tokens=data.draw(st.integers(0, 5)))
    expected, stop = naive_tokens(tokenizer, ids, params)
    stream = TextStream(tokenizer, params)
    text, found = "", None
    for size in data.draw(st.lists(st.integers(1, 4), min_size=len(ids), max_size=len(ids))):
        delta = stream.push(ids[:size])
        text, found, ids = text + delta.text, found or delta.stop, ids[size:]
    assert (text + stream.flush(), found) == (expected, stop)


def naive_tokens(tokenizer: Tokenizer, ids: list[int], params: SamplingParams) -> tuple[str, str | None]:
    """As `naive`, from tokens; each gives what decoding finally says of it, the last ones' rest comes at the end."""
    pieces, shown = [], ""
    for count in range(1, len(ids) + 1):
        raw = b"".join(tokenizer.token_bytes(id_, skip_special=True) for id_ in ids[:count])
        text = settled(raw)
        pieces.append(text[len(shown) :])
        shown = text
    text, stop = naive(pieces, params.stop_strings, params.min_tokens)
    return (text, stop) if stop is not None else (tokenizer.decode(ids), None)


def settled(raw: bytes) -> str:
    """The text of bytes that no further ones can change: a last character cut short is left out."""
    unfinished = next((cut for cut in (1, 2, 3) if is_head(raw[max(0, len(raw) - cut) :])), 0)
    return raw[: len(raw) - unfinished].decode(errors="replace")


def is_head(end: bytes) -> bool:
    """Whether these bytes are the unfinished head of a character."""
    try:
        end.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data" and error.start == 0
    return False


def test_default_model_s_end_token_leaves_no_text(default_model_path: Path) -> None:
    tokenizer = load_tokenizer(read_gguf(default_model_path).metadata)
    ids = [*tokenizer.encode("Fine.", special=False), *sorted(tokenizer.eos_ids)]
    params = SamplingParams(skip_special_tokens=False)
    assert "".join(streamed(tokenizer, params, ids)) == "Fine."
