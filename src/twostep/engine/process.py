"""The engine in a process of its own: `python -m twostep.engine.process FD`, where FD is its end of a socket.

It hears between steps, never waits while there is work, and ends when its owner is gone.
"""

import pickle
import signal
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from traceback import print_exc

from twostep.engine.config import EngineConfig
from twostep.engine.engine import Engine
from twostep.engine.messages import Cancel, Failed, FromEngine, Ping, Ready, Refused, Snapshot, Submit, ToEngine, Turned
from twostep.errors import TwostepError
from twostep.model.loaded import open_model


class EngineHost:
    """Serves what its owner submits, one message back for each step that gave something."""

    def __init__(self, engine: Engine, connection: "Connection[FromEngine, ToEngine]") -> None:
        self._engine, self._connection = engine, connection
        self._refused: list[Refused] = []
        self._asked = False

    def run(self) -> None:
        """Until the owner closes its end: then sending or receiving raises."""
        while True:
            self._listen()
            events = (*self._refused, *self._engine.turn())
            if events or self._asked:
                self._connection.send(Turned(events, self.snapshot()))
            self._refused.clear()
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
        """Takes in what has been said; waits for it only where there is nothing else to do."""
        while self._connection.poll(0 if self._engine.outstanding or self._refused or self._asked else None):
            self._heed(self._connection.recv())

    def _heed(self, message: ToEngine) -> None:
        match message:
            case Submit(id, prompt, params, priority, stream, salt):
                try:
                    self._engine.submit(prompt, params, id=id, priority=priority, stream=stream, cache_salt=salt)
                except TwostepError as error:
                    self._refused.append(Refused(id, error))
                except Exception as error:  # a fault of ours costs one request, not all
                    print_exc()
                    self._refused.append(Refused(id, TwostepError(f"the engine cannot take this request: {error!r}")))
            case Cancel(id):
                self._engine.abort(id)
            case Ping():
                self._asked = True


def serve(connection: "Connection[FromEngine, ToEngine]", path: Path, config: EngineConfig) -> None:
    """Loads the model, says so, serves. What stops it is said before it ends."""
    try:
        engine = Engine(open_model(path), config)
        kernels = engine.kernels
        connection.send(Ready(engine.settings, tuple(engine.describe()), kernels.isa, kernels.threads))
        EngineHost(engine, connection).run()
    except TwostepError as error:
        connection.send(Failed(error))


def main() -> None:
    """The first message says what to load."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they reach the whole group; the owner decides when to end
        signal.signal(number, signal.SIG_IGN)
    connection: Connection[FromEngine, ToEngine] = Connection(int(sys.argv[1]))
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the owner is gone, perhaps while we load
        path, config = pickle.loads(connection.recv_bytes())
        serve(connection, path, config)


if __name__ == "__main__":
    main()
