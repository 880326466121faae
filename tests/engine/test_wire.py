"""Messages between the engine's process and its owner."""

from collections.abc import Iterator
from socket import socketpair
from threading import Thread

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostep.engine.process.wire import Frames, Wire, framed
from twostep.turns import take_short_turns

MESSAGES = st.lists(st.binary(max_size=300) | st.lists(st.integers()))


@given(MESSAGES, st.integers(1, 50))
def test_messages_come_whole_however_their_bytes_come(messages: list[object], piece: int) -> None:
    data = b"".join(map(framed, messages))
    frames = Frames()
    pieces = (data[at : at + piece] for at in range(0, len(data), piece))
    assert [message for part in pieces for message in frames.feed(part)] == messages


@pytest.fixture
def wires() -> Iterator[tuple[Wire[object, object], Wire[object, object]]]:
    ours, theirs = socketpair()
    with ours, theirs:
        yield Wire(ours), Wire(theirs)


def test_polling_sees_what_has_been_read_ahead(wires: tuple[Wire[object, object], Wire[object, object]]) -> None:
    ours, theirs = wires
    assert not ours.poll(0)
    theirs.send("a")
    theirs.send("b")
    assert [ours.recv(), ours.poll(0), ours.recv(), ours.poll(0)] == ["a", True, "b", False]


def test_a_message_longer_than_the_socket_holds(wires: tuple[Wire[object, object], Wire[object, object]]) -> None:
    ours, theirs = wires
    long = list(range(1_000_000))
    sender = Thread(target=theirs.send, args=(long,))
    sender.start()
    assert ours.recv() == long
    sender.join()


def test_the_other_end_gone() -> None:
    ours, theirs = socketpair()
    with ours:
        wire = Wire[object, object](ours)
        theirs.sendall(framed("a")[:5])
        theirs.close()
        assert wire.poll(None)
        with pytest.raises(EOFError):
            wire.recv()


def test_short_turns_are_for_one_thread_and_harmless() -> None:
    """Whether the system takes them is its own affair; a thread that asked again gets the same answer."""
    said: list[bool] = []
    thread = Thread(target=lambda: said.extend(take_short_turns() for _ in range(2)))
    thread.start()
    thread.join()
    assert said[0] == said[1]
