"""The state of the front end: what is served, and what all requests share."""

import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from time import time

from twostep.config.configs import ServerConfig
from twostep.engine.backend import Backend, Capabilities
from twostep.model.loaded import LoadedModel
from twostep.openai_api.api_error import ApiError
from twostep.openai_api.prompt_tokens import PromptBounds
from twostep.server.api.structured_output_check import StructuredOutputCheck
from twostep.server.http.in_flight import AdmissionQueue, InFlightRequests
from twostep.server.http.replies import Slices
from twostep.server.http.request_body import Bodies
from twostep.server.observe.finished_requests import FinishedRequests, Reply
from twostep.server.observe.prometheus_metrics import HttpReplies, Metrics
from twostep.server.observe.request_logs import LogLines, RefusalsLog, RequestsLog, clock
from twostep.server.observe.traffic_recorder import TrafficRecorder

log = logging.getLogger(__name__)

MAX_UNKNOWN = 100
"""Most names of unknown fields that are logged; clients choose the names."""


@dataclass
class ServedModel:
    """A model and the backend that serves it. `model` is the front end's own, for tokenizer and chat template."""

    names: tuple[str, ...]
    """What requests may call the model; the first is its name in logs and metrics."""
    model: LoadedModel
    backend: Backend
    metrics: Metrics = field(default_factory=Metrics)
    prepared: bool = False
    """Set by `ServerState.loaded`."""

    def available(self) -> Capabilities:
        """What the backend can serve now. Raises `ApiError` with status 503 if it does not accept requests."""
        capabilities = self.backend.capabilities
        if capabilities is None or not self.prepared:
            raise ApiError("the model is being loaded", status=503, code="loading")
        if self.backend.phase != "ready":
            soon = "; a new one is loading the model" if self.backend.phase == "restarting" else ""
            raise ApiError(f"{self.backend.error}{soon}", status=503, code="engine_died")
        return capabilities

    @property
    def prompt_bounds(self) -> PromptBounds:
        """Bounds of prompts. Raises as `available` does."""
        return PromptBounds.of(self.available().max_sequence_tokens, self.model.tokenizer)


@dataclass
class ServerState:
    """For one event loop."""

    config: ServerConfig
    models: Sequence[ServedModel]
    """All that is served; requests that name no model are for the first."""
    loopback: bool = True
    """Only this machine reaches the server."""
    http_replies: HttpReplies = field(default_factory=HttpReplies)
    finished: FinishedRequests = field(init=False)
    traffic: TrafficRecorder | None = field(init=False)
    requests_log: RequestsLog | None = field(init=False)
    refusals: RefusalsLog | None = field(init=False)
    bodies: Bodies = field(init=False)
    dropped_lines: Callable[[], int] = lambda: 0
    """How many lines of the log were dropped because nothing read them in time."""
    draining: bool = False
    """No new requests are accepted, as the server is about to end; see `drain`."""
    admission_queue: AdmissionQueue = field(default_factory=lambda: AdmissionQueue(0))
    in_flight: InFlightRequests = field(default_factory=InFlightRequests)
    structured_outputs: StructuredOutputCheck = field(default_factory=StructuredOutputCheck)
    slices: Slices = field(default_factory=Slices)
    """For replies that can be large."""
    started_s: int = field(default_factory=lambda: int(time()))
    """Wall clock."""
    _lines: LogLines = field(init=False)
    _unknown: set[str] = field(default_factory=set)
    _by_name: dict[str, ServedModel] = field(init=False)

    def __post_init__(self) -> None:
        self._by_name = {name: served for served in self.models for name in served.names}
        self.bodies = Bodies(self.config.max_body_bytes)
        log = self.config.log
        self._lines = LogLines(sys.stderr, as_json=log == "json")
        lines = None if log == "off" else self._lines
        self.requests_log = None if lines is None else RequestsLog(lines)
        logs = [] if self.requests_log is None else [self.requests_log.write]
        self.refusals = None if lines is None else RefusalsLog(lines)
        file = self.config.record_workload
        self.traffic = None if file is None else TrafficRecorder(file, self.names[0])
        records = [] if self.traffic is None else [self.traffic.add_reply]
        self.finished = FinishedRequests(on_complete=[self._count, *logs, *records])

    def _count(self, reply: Reply) -> None:
        self.named(reply.model).metrics.add_reply(reply)

    @property
    def names(self) -> tuple[str, ...]:
        """What requests may call the models, the default first."""
        return tuple(self._by_name)

    def named(self, name: object) -> ServedModel:
        """The model of this name; the first for one that is not served, or none at all."""
        return self._by_name.get(name, self.models[0]) if isinstance(name, str) else self.models[0]

    def loaded(self, served: ServedModel) -> None:
        """Requests for this model can be accepted from now."""
        served.prepared = True
        running = (one.backend.capabilities.max_num_seqs for one in self.models if one.backend.capabilities)
        self.admission_queue.limit = sum(running) + self.config.max_queue

    def drain(self) -> None:
        """No new requests are accepted, and parts of a backend that fail are not replaced."""
        self.draining = True
        for served in self.models:
            served.backend.drain()

    def close(self) -> None:
        """Ends what serves requests and writes logs."""
        self.bodies.close()
        if self.requests_log is not None:
            self.requests_log.close()
        if self.traffic is not None:
            self.traffic.close()
        if self.refusals is not None:
            self.refusals.end()

    def check_accepting(self, served: ServedModel | None = None) -> Capabilities:
        """What the model, or the first that accepts requests, can serve. Raises `ApiError` with status 503 if none
        accepts requests, or the server is about to end."""
        if self.draining and any(one.prepared for one in self.models):
            raise ApiError("the server is shutting down", status=503, code="shutting_down")
        ready = (one for one in self.models if one.prepared and one.backend.phase == "ready")
        return (served or next(ready, self.models[0])).available()

    def log_event(self, event: str, line: str) -> None:
        """Writes a line about the server itself, also if requests are not logged."""
        now = clock(time())
        self._lines.write({"event": event, "time": now, "message": line}, f"{now} {line}")

    def note_unknown(self, fields: Iterable[str]) -> None:
        """Logs unknown fields of requests, each name once."""
        for name in fields:
            if name not in self._unknown and len(self._unknown) < MAX_UNKNOWN:
                self._unknown.add(name)
                log.warning("requests have the field %.60r, which is unknown here and ignored", name)
