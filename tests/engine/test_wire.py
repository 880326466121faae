"""Messages between the engine's process and its owner."""

import pickle
import statistics
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from socket import socketpair
from threading import Thread
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.messages import FAKE_CAPABILITIES, snapshot, step, whole_output

from twostep.engine.backend import Submit
from twostep.engine.config import EngineConfig
from twostep.engine.params import SamplingParams
from twostep.engine.process import wire as wire_module
from twostep.engine.process.messages import (
    KINDS,
    Cancel,
    ErrorData,
    Failed,
    FromEngine,
    Load,
    Message,
    Ping,
    Ready,
    Refused,
    StepEnded,
    ToEngine,
)
from twostep.engine.process.wire import (
    FROM_ENGINE,
    MAX_MESSAGE_BYTES,
    TO_ENGINE,
    VERSION,
    Frames,
    MessageTooLargeError,
    Wire,
    WireError,
    framed,
)
from twostep.engine.text.packed_logprobs import PackedLogprobs, TokenLogprobs
from twostep.engine.text.structured_output import StructuredOutput
from twostep.errors import ContextLengthError, InvalidParameterError, TwostepError
from twostep.turns import take_short_turns

PARAMS = SamplingParams(
    n=3, stop=["a", "b"], stop_token_ids=[4], logit_bias={7: -1.5}, seed=-5, logprobs=2,
    structured=StructuredOutput("regex", "a+"),
)  # fmt: skip
CONFIG = EngineConfig(record=Path("run.rec"), threads=1, chunking="time=20", kv_share=0.25)
TO: list[ToEngine] = [
    Load.of(Path("/models/small.gguf"), CONFIG),
    Submit("a", [1, 2, 70_000], PARAMS, priority=-3, stream=True, cache_salt="é"),
    Cancel("a"),
    Ping(),
]
FROM: list[FromEngine] = [
    Ready(FAKE_CAPABILITIES),
    step(3, logprobs=2),
    StepEnded((Refused("a", ErrorData("context_length", "too long", "n")), whole_output("b", logprobs=3)), snapshot()),
    Failed(ErrorData("memory_plan", "no memory")),
]  # fmt: skip


def decoded(data: bytes | bytearray, decoder: Any) -> list[Any]:
    return list(Frames(decoder).feed(bytes(data)))


@pytest.mark.parametrize("message", TO)
def test_messages_to_the_engine_arrive_equal(message: ToEngine) -> None:
    assert decoded(framed(message), TO_ENGINE) == [message]


@pytest.mark.parametrize("message", FROM)
def test_messages_from_the_engine_arrive_equal(message: FromEngine) -> None:
    assert decoded(framed(message), FROM_ENGINE) == [message]


def test_values_keep_their_types() -> None:
    [load, submit] = decoded(framed(TO[0]) + framed(TO[1]), TO_ENGINE)
    assert load.config() == CONFIG
    assert submit.params.stop_strings == ("a", "b")
    [ended] = decoded(framed(FROM[2]), FROM_ENGINE)
    assert isinstance(ended.events[1].choices[0].logprobs, PackedLogprobs)


@given(st.lists(st.sampled_from(TO)), st.integers(1, 50))
def test_messages_arrive_whole_however_their_bytes_are_cut(messages: list[ToEngine], piece: int) -> None:
    data = b"".join(map(framed, messages))
    frames = Frames(TO_ENGINE)
    pieces = (data[at : at + piece] for at in range(0, len(data), piece))
    assert [message for part in pieces for message in frames.feed(part)] == messages


# --- what is refused ----------------------------------------------------------------------------------------------


def test_another_version_is_refused() -> None:
    data = framed(Ping())
    data[0] = VERSION + 1
    with pytest.raises(WireError, match=f"has version {VERSION + 1} .* reads version {VERSION}; run the same version"):
        decoded(data, TO_ENGINE)


def test_an_announced_length_is_bounded() -> None:
    with pytest.raises(WireError, match=f"a message of {MAX_MESSAGE_BYTES + 1} bytes is announced"):
        decoded(struct.pack("!BI", VERSION, MAX_MESSAGE_BYTES + 1), TO_ENGINE)


def test_a_message_that_is_too_large_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_module, "MAX_MESSAGE_BYTES", 100)
    with pytest.raises(MessageTooLargeError, match=r"has \d{3} bytes; at most 100 are sent"):
        framed(Submit("a", [9] * 200, SamplingParams()))


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", b"\x80", b"\x81\xa4type\xa5other", b"\x81\xa4type\xa4stop", b"\x81\xa4type\xa6submit"]
)
def test_bytes_that_are_no_message(body: bytes) -> None:
    with pytest.raises(WireError, match=f"a message of {len(body)} bytes cannot be read"):
        decoded(struct.pack("!BI", VERSION, len(body)) + body, TO_ENGINE)


def test_a_message_of_the_other_direction_is_refused() -> None:
    with pytest.raises(WireError, match="cannot be read"):
        decoded(framed(FROM[0]), TO_ENGINE)


@given(st.binary(max_size=200))
def test_any_bytes_are_messages_or_refused(body: bytes) -> None:
    for decoder in (TO_ENGINE, FROM_ENGINE):
        with suppress(WireError):
            decoded(struct.pack("!BI", VERSION, len(body)) + body, decoder)


@pytest.mark.parametrize("name", ["max_tokens", "min_tokens"])
def test_a_number_beyond_64_bits_is_named(name: str) -> None:
    params = SamplingParams(**{"max_tokens": 10**400, name: 10**400})
    with pytest.raises(InvalidParameterError, match="is a number of 1329 bits; it has to fit into 64") as caught:
        framed(Submit("a", [1], params))
    assert caught.value.param == "max_tokens"


# --- errors as data -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_errors_keep_kind_and_message(kind: str) -> None:
    error = ErrorData(kind, "wrong", "n" if issubclass(KINDS[kind], InvalidParameterError) else None).error()
    assert (type(error), str(error)) == (KINDS[kind], "wrong")
    assert ErrorData.of(error).error().args == error.args


def test_an_error_keeps_its_parameter() -> None:
    error = ErrorData.of(ContextLengthError("too long", "max_tokens")).error()
    assert isinstance(error, ContextLengthError)
    assert error.param == "max_tokens"


def test_other_errors_travel_as_the_nearest_kind() -> None:
    class SpecialError(InvalidParameterError):
        pass

    assert ErrorData.of(SpecialError("odd", "n")) == ErrorData("invalid_parameter", "odd", "n")
    assert type(ErrorData("of the future", "odd").error()) is TwostepError


# --- packed log-probabilities -------------------------------------------------------------------------------------

ENTRIES = st.builds(
    TokenLogprobs,
    st.integers(0, 300_000),
    st.floats(allow_nan=False),
    st.integers(1, 300_000),
    st.lists(st.tuples(st.integers(0, 300_000), st.floats(allow_nan=False)), max_size=4).map(tuple),
)


@given(st.lists(ENTRIES, max_size=8), st.integers(0, 9), st.integers(0, 9))
def test_packed_log_probabilities_survive_as_bytes(entries: list[TokenLogprobs], first: int, count: int) -> None:
    first = min(first, len(entries))
    packed = PackedLogprobs(entries)
    assert PackedLogprobs.from_bytes(packed.to_bytes()) == entries
    assert PackedLogprobs.from_bytes(packed.to_bytes(first, first + count)) == entries[first : first + count]


@pytest.mark.parametrize("data", [b"", b"\1", b"\1" + bytes(15), PackedLogprobs().to_bytes() + b"\0"])
def test_bytes_that_are_no_log_probabilities(data: bytes) -> None:
    with pytest.raises(ValueError, match="log-probabilities have"):
        PackedLogprobs.from_bytes(data)


# --- speed --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("streams", "logprobs"), [(16, None), (64, None), (64, 5)])
def test_a_step_takes_no_longer_than_as_a_pickle(streams: int, logprobs: int | None) -> None:
    """In CPU time, to encode and to decode; the best of several rounds, as others use the cores meanwhile. Objects of
    this message pickle faster than the dataclasses that were sent before."""
    message = step(streams, logprobs=logprobs)

    def packed() -> None:
        assert len(decoded(framed(message), FROM_ENGINE)[0].events) == streams

    def pickled() -> None:
        assert len(pickle.loads(pickle.dumps(message, pickle.HIGHEST_PROTOCOL)).events) == streams

    assert best_s(packed) < best_s(pickled)


def best_s(call: Any, rounds: int = 15, calls: int = 20) -> float:
    seconds = []
    for _ in range(rounds):
        began_s = time.thread_time()
        for _ in range(calls):
            call()
        seconds.append(time.thread_time() - began_s)
    return statistics.mean(sorted(seconds)[:3]) / calls


# --- sockets ------------------------------------------------------------------------------------------------------


@pytest.fixture
def wires() -> Iterator[tuple[Wire[Message, FromEngine], Wire[Message, ToEngine]]]:
    ours, theirs = socketpair()
    with ours, theirs:
        yield Wire(ours, FROM_ENGINE), Wire(theirs, TO_ENGINE)


def test_polling_sees_what_has_been_read_ahead(
    wires: tuple[Wire[Message, FromEngine], Wire[Message, ToEngine]],
) -> None:
    ours, theirs = wires
    assert not ours.poll(0)
    theirs.send(step(1))
    theirs.send(step(2))
    assert [len(ours.recv().events), ours.poll(0), len(ours.recv().events), ours.poll(0)] == [1, True, 2, False]  # type: ignore[union-attr]


def test_a_message_longer_than_the_socket_holds(
    wires: tuple[Wire[Message, FromEngine], Wire[Message, ToEngine]],
) -> None:
    ours, theirs = wires
    long = Submit("a", list(range(1_000_000)), SamplingParams())
    sender = Thread(target=ours.send, args=(long,))
    sender.start()
    assert theirs.recv() == long
    sender.join()


def test_the_other_end_gone() -> None:
    ours, theirs = socketpair()
    with ours:
        wire = Wire[Message, ToEngine](ours, TO_ENGINE)
        theirs.sendall(framed(Ping())[:5])
        theirs.close()
        assert wire.poll(None)
        with pytest.raises(EOFError):
            wire.recv()


def test_short_turns_are_for_one_thread_and_harmless() -> None:
    """Whether the system grants them is up to it; a thread that asks again gets the same answer."""
    said: list[bool] = []
    thread = Thread(target=lambda: said.extend(take_short_turns() for _ in range(2)))
    thread.start()
    thread.join()
    assert said[0] == said[1]
