"""The settings in effect, with where each comes from and the arithmetic behind them: what the server prints when it
starts and what `/v1/config` returns."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from twostep.config.resolution import Resolution
from twostep.config.settings import BY_NAME, FLAGGED, Setting
from twostep.config.values import ms_text
from twostep.core.policies import TimeBudget


class Effective(NamedTuple):
    """A setting as it is in effect."""

    name: str
    value: Any
    """As JSON has it; None: unset, or decided when the model is loaded."""
    set_by: str
    """A flag, an environment variable, a file, a preset, or the default."""


class Loaded(Protocol):
    """What was decided when the model was loaded: a backend's capabilities."""

    @property
    def max_model_len(self) -> int: ...
    @property
    def max_num_batched_tokens(self) -> int: ...
    @property
    def kv_blocks(self) -> int: ...
    @property
    def isa(self) -> str: ...
    @property
    def threads(self) -> int: ...
    @property
    def profile(self) -> str | None: ...
    @property
    def description(self) -> Sequence[str]: ...


class Server(Protocol):
    """What was decided when the server began to listen."""

    @property
    def port(self) -> int: ...
    @property
    def served_model_name(self) -> tuple[str, ...]: ...
    @property
    def effective(self) -> tuple[Effective, ...]: ...


def effective_rows(resolution: Resolution) -> tuple[Effective, ...]:
    """All settings that have a flag, in the order of the table."""
    return tuple(_row(setting, resolution) for setting in FLAGGED)


def _row(setting: Setting, resolution: Resolution) -> Effective:
    given = resolution[setting.alias_of or setting.name]
    if setting.name == "itl_budget":
        budget = given.value
        value = float(ms_text(budget.budget_ns)) if isinstance(budget, TimeBudget) else None
        return Effective(setting.name, value, given.by)
    return Effective(setting.name, setting.show(given.value), given.by)


def config_answer(server: Server, loaded: Loaded) -> dict[str, Any]:
    """What `/v1/config` returns: JSON's values."""
    return {
        "settings": {name: {"value": value, "set_by": by} for name, value, by in _rows(server, loaded)},
        "kv_blocks": loaded.kv_blocks,
        "instruction_set": loaded.isa,
        "profile": loaded.profile,
        "arithmetic": list(loaded.description),
    }


def config_schema() -> dict[str, Any]:
    """JSON Schema of `config_answer`."""
    text = {"type": "string"}
    rows = {
        setting.name: _object({"value": setting.schema(), "set_by": text}) for setting in FLAGGED
    }  # fmt: skip
    return _object(
        {
            "settings": {"type": "object", "properties": rows},
            "kv_blocks": {"type": "integer"},
            "instruction_set": text,
            "profile": {"anyOf": [text, {"type": "null"}]},
            "arithmetic": {"type": "array", "items": text},
        }
    )


def _object(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": dict(properties), "required": list(properties)}


def _rows(server: Server, loaded: Loaded) -> Iterator[Effective]:
    """As decided when the model was loaded, where that decides."""
    decided: dict[str, Any] = {
        "port": server.port,
        "served_model_name": server.served_model_name,
        "max_num_batched_tokens": loaded.max_num_batched_tokens,
        "max_model_len": loaded.max_model_len,
        "threads": loaded.threads,
    }
    shown = {name: BY_NAME[name].show(value) for name, value in decided.items()}
    for row in server.effective:
        yield row._replace(value=shown.get(row.name, row.value))


def effective_lines(server: Server, loaded: Loaded) -> Iterator[str]:
    """The same to print, in columns."""
    shown = [(row.name, _text(row.value), row.set_by) for row in _rows(server, loaded)]
    widths = [max(len(row[column]) for row in shown) for column in (0, 1)]
    for name, value, by in shown:
        yield f"{name:<{widths[0]}}  {value:<{widths[1]}}  {by}"


def _text(value: object) -> str:
    match value:
        case None | []:
            return "-"
        case bool():
            return "yes" if value else "no"
        case list():
            return ",".join(map(str, value))
        case float():
            return f"{value:g}"
    return str(value)
