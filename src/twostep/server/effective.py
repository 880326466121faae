"""The effective settings, with who set them and the arithmetic behind them: what is printed at the start, and what
`/v1/config` answers."""

from collections.abc import Iterator
from typing import Any

from twostep.engine.backend import Capabilities
from twostep.server.config import Effective, ServerConfig


def effective(config: ServerConfig, capabilities: Capabilities) -> dict[str, Any]:
    """The answer of `/v1/config`: JSON's values. What was left open is as it was decided when the model was loaded."""
    return {
        "settings": {name: {"value": value, "set_by": by} for name, value, by in rows(config, capabilities)},
        "kv_blocks": capabilities.kv_blocks,
        "instruction_set": capabilities.isa,
        "arithmetic": list(capabilities.description),
    }


def rows(config: ServerConfig, capabilities: Capabilities) -> Iterator[Effective]:
    """All settings, in the order of their table."""
    decided = {
        "port": config.port,
        "served_model_name": ",".join(config.served_model_names),
        "max_num_batched_tokens": capabilities.max_num_batched_tokens,
        "max_model_len": capabilities.max_model_len,
        "threads": capabilities.threads,
    }
    for row in config.effective:
        yield row._replace(value=decided.get(row.name, row.value))


def lines(config: ServerConfig, capabilities: Capabilities) -> Iterator[str]:
    """The same to print, in columns."""
    shown = [(row.name, _text(row.value), row.set_by) for row in rows(config, capabilities)]
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
