"""The engine in a process of its own: `python -m twostep.engine.process.host FD`, where FD is its end of a socket.

It hears between steps, never waits while there is work, and ends when its owner is gone.
"""

import faulthandler
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from socket import socket
from threading import Thread
from time import sleep
from traceback import print_exc

from twostep.config.configs import EngineConfig
from twostep.engine.collector import Event
from twostep.engine.engine import Engine
from twostep.engine.process.messages import (
    Accepted,
    Cancel,
    Failed,
    FromEngine,
    Load,
    Ping,
    Ready,
    Refused,
    Snapshot,
    Submit,
    ToEngine,
    Turned,
)
from twostep.engine.process.wire import Wire
from twostep.errors import RecordingError, TwostepError
from twostep.model.loaded import open_model
from twostep.turns import take_short_turns

HEAD_START_S = 0.001
"""What the owner gets of the cores to pass on somebody's first token, before the next step takes all of them. It costs
a step with a prompt in it about a fiftieth of its time, and saves that first token half of the next step's."""


class EngineHost:
    """Serves what its owner submits, one message back for each step that gave something."""

    def __init__(self, engine: Engine, wire: Wire[FromEngine, ToEngine]) -> None:
        self._engine, self._wire = engine, wire
        self._heard: list[Refused | Accepted] = []
        self._asked = False

    def run(self) -> None:
        """Until the owner closes its end: then sending or receiving raises."""
        while True:
            try:
                self._turn()
            except RecordingError as error:  # raised once; the interrupted turn is taken up where it was
                _say(error)

    def _turn(self) -> None:
        self._listen()
        self._engine.end()
        if self._engine.first_tokens:
            self._tell(self._engine.come())
            sleep(HEAD_START_S)
        self._tell(self._engine.begin())

    def _tell(self, come: Sequence[Event]) -> None:
        events = (*self._heard, *come)
        if events or self._asked:
            self._wire.send(Turned(events, self.snapshot()))
        self._heard.clear()
        self._asked = False

    def snapshot(self) -> Snapshot:
        """How things stand between two steps."""
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

    def _listen(self) -> None:
        """Takes in what has been said; waits for it only as long as there is nothing else to do."""
        while self._wire.poll(0 if self._heard or self._asked else self._engine.idle_s()):
            self._heed(self._wire.recv())

    def _heed(self, message: ToEngine) -> None:
        match message:
            case Submit(id, prompt, params, priority, stream, salt):
                try:
                    self._engine.submit(prompt, params, id=id, priority=priority, stream=stream, cache_salt=salt)
                except TwostepError as error:
                    self._heard.append(Refused(id, error))
                except Exception as error:  # a fault of ours costs one request, not all
                    print_exc()
                    self._heard.append(Refused(id, TwostepError(f"the engine cannot take this request: {error!r}")))
                else:
                    if stream:
                        self._heard.append(Accepted(id))
            case Cancel(id):
                self._engine.abort(id)
            case Ping():
                self._asked = True


def serve(wire: Wire[FromEngine, ToEngine], path: Path, config: EngineConfig) -> None:
    """Loads the model, says so, serves. What stops it is said before it ends."""
    engine = None
    try:
        engine = Engine(open_model(path), config, serves=True)
        kernels = engine.kernels
        lines = tuple(engine.describe())
        wire.send(Ready(engine.settings, lines, kernels.isa, kernels.threads, engine.sizing.longest))
        Thread(target=engine.prepare_grammars, name="prepare-grammars").start()
        take_short_turns()
        EngineHost(engine, wire).run()
    except TwostepError as error:
        wire.send(Failed(error))
    finally:
        if engine is not None:
            _close(engine)


def _close(engine: Engine) -> None:
    """The rest of a recording is written."""
    try:
        engine.close()
    except RecordingError as error:
        _say(error)


def _say(error: TwostepError) -> None:
    with suppress(OSError):  # the owner, which reads it, is gone
        print(f"twostep: {error}", file=sys.stderr, flush=True)


def main() -> None:
    """The first message says what to load."""
    faulthandler.enable()
    for number in (signal.SIGINT, signal.SIGTERM):  # they reach the whole group; the owner decides when to end
        signal.signal(number, signal.SIG_IGN)
    with (
        socket(fileno=int(sys.argv[1])) as end,
        suppress(EOFError, OSError),
    ):  # the owner is gone, perhaps while we load
        load: Load = Wire[FromEngine, Load](end).recv()
        serve(Wire(end), load.path, load.config)


if __name__ == "__main__":
    main()
