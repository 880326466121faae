"""What a user may set of the HTTP front end; the engine's part is `EngineConfig`."""

import re
from dataclasses import dataclass
from math import inf
from typing import Any, Literal, NamedTuple, get_args

from twostep.errors import InvalidParameterError

LogFormat = Literal["text", "json", "off"]

LEAST_S = 0.1
"""A limit on waiting below this would end what nothing is wrong with."""


class Effective(NamedTuple):
    """A setting as it is in effect."""

    name: str
    value: Any
    """As JSON has it; None: not set, or decided when the model is loaded."""
    set_by: str
    """A flag, an environment variable, a file, a preset, or the default."""


@dataclass(frozen=True)
class ServerConfig:
    """Raises `InvalidParameterError` that names the setting, its value and what is allowed."""

    hosts: tuple[str, ...] = ("127.0.0.1",)
    """Addresses or names to listen on; the default is reached from this machine alone."""
    port: int = 8000
    """0: any that is free."""
    api_keys: tuple[str, ...] = ()
    """Requests need one of these as a bearer token; none: everybody is served."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages a browser lets call the server, `*` for all."""
    allowed_hosts: tuple[str, ...] = ()
    """More names that are accepted in the Host header: `name`, `*.name`, or `*` for all."""
    root_path: str = ""
    """Path prefix under which a proxy exposes the server, such as `/llm`."""
    served_model_names: tuple[str, ...] = ()
    """What requests call the model, the first one by default; none: what the command line calls it."""
    max_queue: int = 256
    """Requests that wait beyond those that run; whoever comes then is sent away, to come again later."""
    max_connections: int = 1024
    """Open at a time; whoever comes then is sent away."""
    max_body_bytes: int = 4 << 20
    """Longest body of a request: 32 bytes for each token of a context of 131 072."""
    request_timeout_s: float | None = None
    """A request ends at the latest so long after it came; None: never."""
    drain_s: float = 30.0
    """How long SIGTERM lets requests finish before they are cut."""
    stall_s: float = 60.0
    """With work pending and no step finished for so long, the server reports itself as not alive.
    On a slow machine a wide step of a large model takes some tens of seconds."""
    log: LogFormat = "text"
    """How each finished request is logged, one line on standard error."""
    record_workload: str | None = None
    """File for the traffic that comes, as a workload, without its text; None: it is not recorded."""
    effective: tuple[Effective, ...] = ()
    """All settings as they are in effect, the engine's included, for people to read."""

    def __post_init__(self) -> None:
        if not self.hosts or not all(self.hosts):
            raise InvalidParameterError("host is ''; it has to be an address, such as 127.0.0.1", "host")
        if self.root_path and not re.fullmatch(r"(/[\w.~-]+)+", self.root_path):
            problem = f"root_path is {self.root_path!r}; it has to be a path such as /llm, without a slash at its end"
            raise InvalidParameterError(problem, "root_path")
        self._check("port", self.port, 0, 65535)
        self._check("max_queue", self.max_queue, 0)
        self._check("max_connections", self.max_connections, 1)
        self._check("max_body_bytes", self.max_body_bytes, 1)
        self._check("drain_s", self.drain_s, 0)
        self._check("stall_s", self.stall_s, LEAST_S)
        if self.request_timeout_s is not None:
            self._check("request_timeout_s", self.request_timeout_s, LEAST_S)
        for name in ("api_keys", "cors_origins", "allowed_hosts", "served_model_names"):
            if not all(getattr(self, name)):
                raise InvalidParameterError(f"{name} has an empty member", name)
        if self.log not in get_args(LogFormat):
            allowed = ", ".join(get_args(LogFormat))
            raise InvalidParameterError(f"log is {self.log!r}; it has to be one of {allowed}", "log")

    def _check(self, name: str, value: float, least: float, most: float = inf) -> None:
        if not least <= value <= most or value == inf:
            allowed = f"from {least}" if most == inf else f"from {least} to {most}"
            raise InvalidParameterError(f"{name} is {value}; it has to be {allowed}", name)
