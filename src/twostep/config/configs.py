"""Configurations: the typed values of one part of the table each, complete and checked. Frozen, without state."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from twostep.config.effective import Effective, effective_rows
from twostep.config.resolution import resolve_engine, resolve_server, served_name
from twostep.config.settings import ENGINE_PARTS, of_parts
from twostep.config.sources import from_keywords, value_of
from twostep.config.values import AdmissionOrder, KvMemory
from twostep.core.kv_cache import BlockGroup
from twostep.core.policies import Batching, ChunkPolicy, Unchunked
from twostep.core.scheduler import SchedulerConfig

CONTEXT = 8192
"""`max_model_len` of a scheduler that is made without a model."""


def _fill(config: object, values: Mapping[str, Any]) -> None:
    """Sets fields of a frozen object."""
    for name, value in values.items():
        object.__setattr__(config, name, value)


@dataclass(frozen=True, init=False)
class EngineConfig:
    """What a user may set of an engine; the table of settings says what each field means.

    Keywords are the names in the table, and `preset`. Policies and sizes may be typed values or texts:
    `chunking="time=50"` is `chunking=TimeBudget(50_000_000)`. Raises `InvalidParameterError` for a name that is not a
    setting, with the nearest ones, for a value that is not allowed, and for settings that contradict each other.
    """

    max_num_seqs: int
    max_model_len: int | None
    """None: the model's context."""
    max_num_batched_tokens: int | None
    """None: as many as the longest sequence has."""
    chunking: ChunkPolicy
    batching: Batching
    admission: AdmissionOrder
    priority_preempts: bool
    enable_prefix_caching: bool
    kv_memory: KvMemory
    block_size: int
    threads: int | None
    """None: the cores that this process may use."""
    profile: str | Path
    """auto, none, or a file."""
    record: Path | None
    executor: Literal["native", "reference"]
    overlap: bool
    skip_tokenizer_init: bool

    def __init__(self, **settings: Any) -> None:
        _fill(self, resolve_engine(settings).values(*ENGINE_PARTS))

    def to_json(self) -> dict[str, Any]:
        """All settings as the table writes JSON: keywords for an equal configuration."""
        return {row.name: row.show(getattr(self, row.name)) for row in of_parts(*ENGINE_PARTS)}


@dataclass(frozen=True, init=False)
class ServerConfig:
    """What a user may set of the HTTP front end; the table of settings says what each field means. Raises
    `InvalidParameterError`."""

    host: tuple[str, ...]
    port: int
    api_key: tuple[str, ...]
    """Requests need one of these as a bearer token; empty: no key is needed."""
    allowed_origins: tuple[str, ...]
    allowed_hosts: tuple[str, ...]
    root_path: str
    served_model_name: tuple[str, ...]
    max_queue: int
    max_connections: int
    max_body_bytes: int
    request_timeout_s: float | None
    drain_s: float
    stall_s: float
    log: Literal["text", "json", "off"]
    record_workload: Path | None
    effective: tuple[Effective, ...]
    """All settings as they are in effect, the engine's included, for people to read."""

    def __init__(self, *, effective: tuple[Effective, ...] = (), **settings: Any) -> None:
        said = from_keywords(settings, "server")
        values = {s.name: said[s.name].value if s.name in said else s.default for s in of_parts("server")}
        _fill(self, {**values, "effective": effective})


@dataclass(frozen=True)
class ServeSettings:
    """What `twostep serve` starts with."""

    model: str
    """As the user calls it."""
    server: ServerConfig
    engine: EngineConfig
    calibrate: bool = False
    """Before it opens."""


def serve_settings(flags: Mapping[str, Any], environ: Mapping[str, str]) -> ServeSettings:
    """From the flags that were given, as argparse leaves them, the environment, and the TOML file that either of them
    names. Raises `InvalidParameterError`."""
    resolution = resolve_server(flags, environ)
    model = str(resolution["model"].value)
    engine = EngineConfig(**resolution.values(*ENGINE_PARTS))
    server = ServerConfig(**resolution.values("server"), effective=effective_rows(resolution))
    if not server.served_model_name:
        server = replace(server, served_model_name=(served_name(model),))
    return ServeSettings(model, server, engine, bool(resolution["calibrate"].value))


@dataclass(frozen=True, init=False)
class SchedulerSettings:
    """What a scheduler plans by, complete: the scheduler's part of the table, and the KV blocks that the machine has.
    A recording keeps this.

    Policies may be typed values or texts, as in `EngineConfig`. Raises `InvalidParameterError` for a value that is not
    allowed; `config` finds contradictions.
    """

    blocks: tuple[int, ...]
    """Of each group of layers."""
    windows: tuple[int | None, ...]
    """Tokens of each group's sliding window; None: full attention."""
    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    chunking: ChunkPolicy
    batching: Batching
    admission: AdmissionOrder
    priority_preempts: bool

    def __init__(
        self, blocks: tuple[int, ...], windows: tuple[int | None, ...] = (None,), **settings: Any
    ) -> None:  # fmt: skip
        given = {"max_model_len": CONTEXT} | settings
        from_keywords(given, "scheduler")
        rows = of_parts("scheduler")
        values = {row.name: value_of(row, given[row.name]) if row.name in given else row.default for row in rows}
        _fill(self, {"blocks": tuple(blocks), "windows": tuple(windows), **values})

    def to_json(self) -> dict[str, Any]:
        """All settings as the table writes JSON."""
        values = {row.name: row.show(getattr(self, row.name)) for row in of_parts("scheduler")}
        return {"blocks": list(self.blocks), "windows": list(self.windows), **values}

    def config(self) -> SchedulerConfig:
        """Raises `ValueError` that names the setting, its value and what is allowed."""
        chunking = self.chunking
        if isinstance(chunking, Unchunked):
            chunking = replace(chunking, budget_tokens=self.max_num_batched_tokens)
        return SchedulerConfig(
            groups=tuple(BlockGroup(*group) for group in zip(self.blocks, self.windows, strict=True)),
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            chunking=chunking,
            batching=self.batching,
            order=self.admission.order(self.max_model_len),
            priority_preempts=self.priority_preempts,
        )
