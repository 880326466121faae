"""The table of settings. Flags, environment variables and keys of a TOML file are made from it and from nothing else.

A setting `max_num_seqs` is `--max-num-seqs`, `TWOSTEP_MAX_NUM_SEQS` and `max_num_seqs = ...`. Imports nothing heavy:
every `--help` reads this.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

PREFIX = "TWOSTEP_"


class Kind(NamedTuple):
    """What values a setting has, as text and in TOML."""

    allowed: str
    from_text: Callable[[str], Any]
    """Raises `ValueError`."""
    toml_types: tuple[type, ...]

    def from_toml(self, value: object) -> Any:
        """Raises `ValueError`."""
        if type(value) not in self.toml_types:  # by `isinstance` true would be an integer
            raise ValueError
        if not isinstance(value, list):
            return self.from_text(str(value))
        if not all(isinstance(member, str) for member in value):
            raise ValueError
        return tuple(value)


def _switch(text: str) -> bool:
    switches = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
    if (value := switches.get(text.strip().lower())) is None:
        raise ValueError
    return value


def _list(text: str) -> tuple[str, ...]:
    return tuple(member.strip() for member in text.split(","))


INTEGER = Kind("an integer", int, (int,))
NUMBER = Kind("a number", float, (int, float))
TEXT = Kind("text", str, (str,))
SWITCH = Kind("true or false", _switch, (bool,))
LIST = Kind("texts, separated by commas", _list, (list, str))
SIZE = Kind("a share such as 0.5, or a size such as 2GiB", str, (str, float, int))


@dataclass(frozen=True)
class Setting:
    """One row. `field` is its name in the configuration that it is a part of, if that has another."""

    name: str
    part: Literal["start", "server", "engine"]
    """What it sets: how to start, or a field of `ServerConfig` or `EngineConfig`."""
    kind: Kind
    metavar: str
    help: str
    field: str = ""
    secret: bool = False

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """In the environment."""
        return PREFIX + self.name.upper()

    @property
    def target(self) -> str:
        """The field that it sets."""
        return self.field or self.name


SETTINGS = (
    Setting("model", "start", TEXT, "MODEL", "a name that `twostep models` lists, or a .gguf file"),
    Setting("preset", "start", TEXT, "PRESET", "what the defaults lean to: chat (default), rag or batch"),
    Setting("config", "start", TEXT, "FILE", "TOML file of settings; flags and environment variables go before it"),
    # --- HTTP -----------------------------------------------------------------------------------------------------
    Setting(
        "host", "server", LIST, "ADDRESS",
        "where to listen (default: 127.0.0.1, this machine alone); :: includes IPv4; may be given more than once",
        field="hosts",
    ),
    Setting("port", "server", INTEGER, "N", "default: 8000; 0: any that is free"),
    Setting(
        "api_key", "server", LIST, "KEY",
        "wanted of every request; may be given more than once (better in TWOSTEP_API_KEY, as others see flags)",
        field="api_keys", secret=True,
    ),
    Setting(
        "allowed_origins", "server", LIST, "ORIGIN",
        "origins of pages that may call it, * for all (default: on loopback those of this machine, else none)",
        field="cors_origins",
    ),
    Setting(
        "allowed_hosts", "server", LIST, "NAME",
        "more names accepted in the Host header: NAME, *.NAME, or * for all (default: on loopback none, else all)",
    ),
    Setting("root_path", "server", TEXT, "PATH", "path prefix under which a proxy exposes the server, such as /llm"),
    Setting(
        "served_model_name", "server", LIST, "NAME",
        "what requests call the model (default: MODEL); the first of several is the default",
        field="served_model_names",
    ),
    Setting("max_queue", "server", INTEGER, "N", "requests that may wait (default: 256)"),
    Setting("max_connections", "server", INTEGER, "N", "open at a time (default: 1024)"),
    Setting("max_body_bytes", "server", INTEGER, "N", "longest body of a request (default: 4 MiB)"),
    Setting("request_timeout_s", "server", NUMBER, "S", "a request ends at the latest after so long (default: never)"),
    Setting("drain_s", "server", NUMBER, "S", "how long SIGTERM lets requests finish (default: 30)"),
    Setting("stall_s", "server", NUMBER, "S", "without a step for so long the server is not alive (default: 60)"),
    Setting("log", "server", TEXT, "FORMAT", "a line a request: text (default), json or off"),
    Setting("record_workload", "server", TEXT, "FILE", "write the traffic that comes, without its text, as a workload"),
    # --- the engine -----------------------------------------------------------------------------------------------
    Setting("max_num_seqs", "engine", INTEGER, "N", "sequences that run at a time"),
    Setting("max_model_len", "engine", INTEGER, "N", "most tokens of prompt and answer (default: the model's context)"),
    Setting(
        "max_num_batched_tokens", "engine", INTEGER, "N", "most tokens of one step", field="max_step_tokens"
    ),
    Setting(
        "itl_budget", "engine", NUMBER, "MS", "cut prompts so that tokens of others come so often: --chunking time=MS"
    ),
    Setting("chunking", "engine", TEXT, "HOW", "how prompts are cut: none, tokens=N a step, or time=MS a step"),
    Setting("admission", "engine", TEXT, "ORDER", "priority (default), fcfs or shortest-prefill"),
    Setting("priority_preempts", "engine", SWITCH, "", "more urgent requests take the place of running ones"),
    Setting("enable_prefix_caching", "engine", SWITCH, "", "find the KV of prompts that began alike (default: yes)"),
    Setting(
        "kv_memory", "engine", SIZE, "SIZE",
        "share of free memory for the model and its KV cache (default: 0.5), or size of the cache, such as 2GiB",
    ),
    Setting("block_size", "engine", INTEGER, "N", "tokens of a KV block: 16, nothing else"),
    Setting("threads", "engine", INTEGER, "N", "default: the cores that this process may use"),
    Setting("record", "engine", TEXT, "FILE", "write every plan and step time, for twostep replay"),
)  # fmt: skip

BY_NAME = {setting.name: setting for setting in SETTINGS}
