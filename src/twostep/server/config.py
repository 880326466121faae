"""What a user may set of the HTTP front end; the engine's part is `EngineConfig`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Literal, get_args

from twostep.errors import InvalidParameterError

LogFormat = Literal["text", "json", "off"]


@dataclass(frozen=True)
class ServerConfig:
    """Raises `InvalidParameterError` that names the setting, its value and what is allowed."""

    host: str = "127.0.0.1"
    """Address to listen on; the default is reached from this machine alone."""
    port: int = 8000
    """0: any that is free."""
    api_keys: tuple[str, ...] = ()
    """Requests need one of these as a bearer token; none: everybody is served."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages a browser lets call the server, `*` for all."""
    served_model_name: str | None = None
    """What requests call the model; None: what the command line calls it."""
    max_queue: int = 256
    """Requests that wait beyond those that run; whoever comes then is sent away, to come again later."""
    max_connections: int = 1024
    """Open at a time; whoever comes then is sent away."""
    max_body_bytes: int = 16 << 20
    """Longest body of a request."""
    request_timeout_s: float | None = None
    """A request ends at the latest so long after it came; None: never."""
    drain_s: float = 30.0
    """How long SIGTERM lets requests finish before they are cut."""
    stall_s: float = 30.0
    """With work pending and no step finished for so long, the server reports itself as not alive."""
    log: LogFormat = "text"
    """How each finished request is logged, one line on standard error."""
    set_by: Mapping[str, str] = field(default_factory=dict)
    """Who set what, by the names of the table of settings, the engine's included; what is not in it is a default."""

    def __post_init__(self) -> None:
        if not self.host:
            raise InvalidParameterError("host is ''; it has to be an address, such as 127.0.0.1", "host")
        self._check("port", self.port, 0, 65535)
        for name in ("max_connections", "max_body_bytes"):
            self._check(name, getattr(self, name), 1)
        self._check("max_queue", self.max_queue, 0)
        for name in ("drain_s", "stall_s", "request_timeout_s"):
            if (value := getattr(self, name)) is not None:
                self._check(name, value, 0)
        for name, values in (("api_key", self.api_keys), ("cors_origins", self.cors_origins)):
            if not all(values):
                raise InvalidParameterError(f"{name} has an empty member", name)
        if self.log not in get_args(LogFormat):
            allowed = ", ".join(get_args(LogFormat))
            raise InvalidParameterError(f"log is {self.log!r}; it has to be one of {allowed}", "log")

    def _check(self, name: str, value: float, least: float, most: float | None = None) -> None:
        if not isfinite(value) or value < least or (most is not None and value > most):
            allowed = f"from {least}" if most is None else f"from {least} to {most}"
            raise InvalidParameterError(f"{name} is {value}; it has to be {allowed}", name)
