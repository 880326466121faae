"""What the front end knows, in one place."""

import logging
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from time import time

from twostep.engine.process.client import EngineClient
from twostep.engine.process.messages import Ready
from twostep.model.loaded import LoadedModel
from twostep.openai_api.api_error import ApiError
from twostep.openai_api.prompt_tokens import PromptBounds
from twostep.server.api.structured_output_check import StructuredOutputCheck
from twostep.server.config import ServerConfig
from twostep.server.http.in_flight import AdmissionQueue, InFlightRequests
from twostep.server.http.replies import Slices
from twostep.server.http.request_body import Bodies
from twostep.server.observe.finished_requests import FinishedRequests
from twostep.server.observe.progress_watch import ProgressWatch
from twostep.server.observe.prometheus_metrics import Metrics
from twostep.server.observe.request_logs import LogLines, RefusalsLog, RequestsLog, clock
from twostep.server.observe.traffic_recorder import TrafficRecorder
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
    finished: FinishedRequests = field(init=False)
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
    prompt_bounds: PromptBounds = field(default_factory=lambda: PromptBounds(0, 0))
    draining: bool = False
    """No new requests are taken on: the server is about to end."""
    admission_queue: AdmissionQueue = field(default_factory=lambda: AdmissionQueue(0))
    in_flight: InFlightRequests = field(default_factory=InFlightRequests)
    progress: ProgressWatch = field(default_factory=ProgressWatch)
    structured_outputs: StructuredOutputCheck = field(default_factory=StructuredOutputCheck)
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
        records = [] if self.traffic is None else [self.traffic.add_reply]
        self.finished = FinishedRequests(on_complete=[self.metrics.add_reply, *logs, *records])

    def loaded(self, client: EngineClient, ready: Ready) -> None:
        """Requests can be taken on from now."""
        first = self.client is None
        self.client, self.ready, self.progress = client, ready, ProgressWatch()
        client.unawaited = self.finished.add_late_output
        client.ping()  # so that there are metrics before the first request
        if first:  # requests of an engine that died may still be in the queue
            self.admission_queue = AdmissionQueue(ready.settings.seats + self.config.max_queue)
        self.prompt_bounds = PromptBounds.of(ready.longest, self.model.tokenizer)

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
