"""Runs an engine in its own process: `python -m twostep.engine.process.engine_host FD`, FD being its end of a socket.

It reads messages between steps, never waits while there is work, and ends when its owner has closed the socket.
"""

import faulthandler
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from socket import socket
from threading import Timer
from time import sleep
from traceback import print_exc

from twostep.engine.backend import Accepted, Capabilities, Snapshot, Submit
from twostep.engine.engine import Engine
from twostep.engine.outputs import Event
from twostep.engine.process.messages import (
    Cancel,
    ErrorData,
    Failed,
    FromEngine,
    Load,
    Ping,
    Ready,
    Refused,
    StepEnded,
    ToEngine,
)
from twostep.engine.process.wire import TO_ENGINE, MessageTooLargeError, Wire
from twostep.errors import RecordingError, TwostepError
from twostep.model.loaded import open_model
from twostep.turns import take_short_turns

HEAD_START_S = 0.001
"""How long the engine pauses after a request's first token, so that the front end gets a core to send it before the
next step takes all cores. It costs about 2 % of a step that computes a prompt, and saves half of the next step's time
for the first token."""

GRAMMARS_AFTER_S = 1.0
"""How long after the model is loaded the tables for structured output are made, unless a request needs them earlier.
They take two tenths of a second of CPU time, for which the first request would wait."""


class EngineHost:
    """Serves its owner's requests. Sends one message for each step that had an event."""

    def __init__(self, engine: Engine, wire: Wire[FromEngine, ToEngine]) -> None:
        self._engine, self._wire = engine, wire
        self._replies: list[Refused | Accepted] = []
        self._pinged = False

    def run(self) -> None:
        """Until the owner closes its end: then sending or receiving raises."""
        while True:
            try:
                self._turn()
            except RecordingError as error:  # raised once; the loop continues the turn that it interrupted
                _print(error)

    def _turn(self) -> None:
        self._receive()
        self._engine.end()
        for note in self._engine.take_notes():
            _say(note)
        if self._engine.first_tokens:
            self._send(self._engine.drain_events())
            sleep(HEAD_START_S)
        self._send(self._engine.begin())

    def _send(self, new: Sequence[Event]) -> None:
        events = (*self._replies, *new)
        if events or self._pinged:
            self._send_all(events, self.snapshot())
        self._replies.clear()
        self._pinged = False

    def _send_all(self, events: tuple[Event | Refused | Accepted, ...], snapshot: Snapshot) -> None:
        """In one message if they fit. An event that is too large alone fails its request, not the engine."""
        try:
            self._wire.send(StepEnded(events, snapshot))
        except MessageTooLargeError as error:
            if len(events) > 1:
                for event in events:
                    self._send_all((event,), snapshot)
            else:
                problem = TwostepError(f"the answer cannot be sent: {error}")
                self._wire.send(StepEnded((Refused(events[0].id, ErrorData.of(problem)),), snapshot))

    def snapshot(self) -> Snapshot:
        """The state between two steps."""
        scheduler = self._engine.scheduler
        counters = scheduler.counters
        return Snapshot(
            steps=counters.steps,
            running=scheduler.running,
            waiting=len(scheduler.waiting),
            kv_blocks=self._engine.settings.blocks[0],
            kv_blocks_free=scheduler.cache.free[0],
            prefix_queried_tokens=counters.prefix_queried_tokens,
            prefix_hit_tokens=counters.prefix_hit_tokens,
            preemptions=counters.preemptions,
            preempted_tokens=counters.preempted_tokens,
            finished=dict(counters.finished),
            measured=self._engine.measured(),
        )

    def _receive(self) -> None:
        """Takes in all messages that have arrived; waits only as long as there is nothing else to do."""
        while self._wire.poll(0 if self._replies or self._pinged else self._engine.idle_s()):
            self._handle(self._wire.recv())

    def _handle(self, message: ToEngine) -> None:
        match message:
            case Submit():
                self._submit(message)
            case Cancel(id):
                self._engine.abort(id)
            case Ping():
                self._pinged = True

    def _submit(self, request: Submit) -> None:
        id_, stream = request.id, request.stream
        try:
            self._engine.submit(
                request.prompt,
                request.params,
                id=id_,
                priority=request.priority,
                stream=stream,
                cache_salt=request.cache_salt,
                so_far=request.so_far,
            )
        except TwostepError as error:
            self._replies.append(Refused(id_, ErrorData.of(error)))
        except Exception as error:  # a defect costs one request, not all
            print_exc()
            problem = TwostepError(f"the engine cannot accept this request: {error!r}")
            self._replies.append(Refused(id_, ErrorData.of(problem)))
        else:
            if stream:
                self._replies.append(Accepted(id_))


def serve(wire: Wire[FromEngine, ToEngine], load: Load) -> None:
    """Loads the model, sends `Ready` and serves. Sends `Failed` if an error ends it."""
    engine, grammars = None, Timer(0, lambda: None)
    try:
        engine = _engine(load)
        grammars = Timer(GRAMMARS_AFTER_S, engine.prepare_grammars)
        grammars.name = "prepare-grammars"
        wire.send(Ready(capabilities(engine)))
        grammars.start()
        take_short_turns()
        EngineHost(engine, wire).run()
    except TwostepError as error:
        wire.send(Failed(ErrorData.of(error)))
    finally:
        grammars.cancel()
        if engine is not None:
            _close(engine)


def capabilities(engine: Engine) -> Capabilities:
    """What this engine can serve."""
    settings = engine.settings
    return Capabilities(
        max_sequence_tokens=engine.sizing.longest,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        kv_blocks=settings.blocks[0],
        isa=engine.kernels.isa,
        threads=engine.kernels.threads,
        profile=None if engine.profile.path is None else str(engine.profile.path),
        description=tuple(engine.describe()),
    )


def _engine(load: Load) -> Engine:
    """Raises `TwostepError`, also for files that cannot be read or written: an `OSError` here would be taken for one of
    the socket, which says that the owner is gone."""
    try:
        return Engine(open_model(load.path, encodes=False), load.config, serves=True)
    except OSError as error:
        named = f": {error.filename}" if error.filename else ""
        raise TwostepError(f"{error.strerror or error}{named}") from error


def _close(engine: Engine) -> None:
    """Also writes the rest of a recording."""
    try:
        engine.close()
    except RecordingError as error:
        _print(error)


def _print(error: TwostepError) -> None:
    _say(str(error))


def _say(line: str) -> None:
    """The owner reads it whenever it has nothing else to do, and copies it to its own output."""
    with suppress(OSError):  # the owner has ended
        print(f"twostep: {line}", file=sys.stderr, flush=True)


def main() -> None:
    """The first message says what to load."""
    faulthandler.enable()
    for number in (signal.SIGINT, signal.SIGTERM):  # they reach the whole group; the owner decides when to end
        signal.signal(number, signal.SIG_IGN)
    with (
        socket(fileno=int(sys.argv[1])) as end,
        suppress(EOFError, OSError),
    ):  # the owner has ended, perhaps while the model is loaded
        wire: Wire[FromEngine, ToEngine] = Wire(end, TO_ENGINE)
        match wire.recv():
            case Load() as load:
                serve(wire, load)
            case other:
                sys.exit(f"twostep: the first message is {type(other).__name__}; it has to be Load")


if __name__ == "__main__":
    main()
