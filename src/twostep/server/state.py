"""What the front end knows, in one place."""

import logging
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from time import time

from twostep.config.configs import ServerConfig
from twostep.engine.process.client import EngineClient
from twostep.engine.process.messages import Ready
from twostep.model.loaded import LoadedModel
from twostep.openai_api.errors import ApiError
from twostep.openai_api.room import Room
from twostep.server.api.forms import FormCheck
from twostep.server.http.admission_queue import Places
from twostep.server.http.bodies import Bodies
from twostep.server.http.in_flight import Flights
from twostep.server.http.slices import Slices
from twostep.server.observe.finished import Ledger
from twostep.server.observe.log_lines import LogLines, clock
from twostep.server.observe.metrics import Metrics
from twostep.server.observe.pulse import Pulse
from twostep.server.observe.refusals_log import RefusalsLog
from twostep.server.observe.requests_log import RequestsLog
from twostep.server.observe.traffic import TrafficRecorder
from twostep.server.supervisor import Supervisor

log = logging.getLogger(__name__)

MAX_UNKNOWN = 100
"""Names of unknown fields that are logged; more are somebody's game."""


@dataclass
class ServerState:
    """For one event loop. `model` is the front's own: tokenizer and template; the weights are the engine's."""

    config: ServerConfig
    model: LoadedModel
    names: tuple[str, ...]
    """What requests may call the model."""
    loopback: bool = True
    """Only this machine reaches the server."""
    metrics: Metrics = field(default_factory=Metrics)
    ledger: Ledger = field(init=False)
    traffic: TrafficRecorder | None = field(init=False)
    requests_log: RequestsLog | None = field(init=False)
    refusals: RefusalsLog | None = field(init=False)
    bodies: Bodies = field(init=False)
    client: EngineClient | None = None
    ready: Ready | None = None
    """Both None while the model is loaded for the first time."""
    supervisor: Supervisor | None = None
    """Starts the engine again if it dies; None: nothing does."""
    dropped_lines: Callable[[], int] = lambda: 0
    """How many lines of the log were dropped, as nobody read them."""
    room: Room = field(default_factory=lambda: Room(0, 0))
    """For prompts."""
    draining: bool = False
    """No new requests are taken on: the server is about to end."""
    places: Places = field(default_factory=lambda: Places(0))
    flights: Flights = field(default_factory=Flights)
    pulse: Pulse = field(default_factory=Pulse)
    forms: FormCheck = field(default_factory=FormCheck)
    slices: Slices = field(default_factory=Slices)
    """For replies that can be large."""
    started_s: int = field(default_factory=lambda: int(time()))
    """Wall clock."""
    _lines: LogLines = field(init=False)
    _unknown: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.bodies = Bodies(self.config.max_body_bytes)
        log = self.config.log
        self._lines = LogLines(sys.stderr, as_json=log == "json")
        lines = None if log == "off" else self._lines
        self.requests_log = None if lines is None else RequestsLog(lines)
        logs = [] if self.requests_log is None else [self.requests_log.write]
        self.refusals = None if lines is None else RefusalsLog(lines)
        file = self.config.record_workload
        self.traffic = None if file is None else TrafficRecorder(Path(file), self.names[0])
        records = [] if self.traffic is None else [self.traffic.heard]
        self.ledger = Ledger(tell=[self.metrics.heard, *logs, *records])

    def loaded(self, client: EngineClient, ready: Ready) -> None:
        """Requests can be taken on from now."""
        first = self.client is None
        self.client, self.ready, self.pulse = client, ready, Pulse()
        client.unawaited = self.ledger.late
        client.ping()  # so that there are metrics before the first request
        if first:  # requests of an engine that died may still hold places
            self.places = Places(ready.settings.max_num_seqs + self.config.max_queue)
        self.room = Room.of(ready.longest, self.model.tokenizer)

    def close(self) -> None:
        """Nothing is served any more."""
        self.bodies.close()
        if self.requests_log is not None:
            self.requests_log.close()
        if self.traffic is not None:
            self.traffic.close()
        if self.refusals is not None:
            self.refusals.end()

    def engine(self) -> tuple[EngineClient, Ready]:
        """Raises `ApiError` with status 503 where there is none that accepts requests, or the server is to end."""
        if self.draining and self.client is not None:
            raise ApiError("the server is shutting down", status=503, code="shutting_down")
        return self.living_engine()

    def living_engine(self) -> tuple[EngineClient, Ready]:
        """For a request that was accepted before. Raises `ApiError` with status 503 where there is none."""
        if self.client is None or self.ready is None:
            raise ApiError("the model is being loaded", status=503, code="loading")
        if self.client.died:
            soon = "; a new one is loading the model" if self.restarting else ""
            raise ApiError(f"{self.client.died}{soon}", status=503, code="engine_died")
        return self.client, self.ready

    @property
    def restarting(self) -> bool:
        """The engine died, and a new one is loading the model."""
        return self.supervisor is not None and self.supervisor.restarting

    def say(self, event: str, words: str) -> None:
        """A line of the log about the server itself: also where requests are not logged."""
        now = clock(time())
        self._lines.write({"event": event, "time": now, "message": words}, f"{now} {words}")

    def note_unknown(self, fields: Iterable[str]) -> None:
        """Names fields of requests that nobody knows, each once."""
        for name in fields:
            if name not in self._unknown and len(self._unknown) < MAX_UNKNOWN:
                self._unknown.add(name)
                log.warning("requests have the field %.60r, which is unknown here and ignored", name)
