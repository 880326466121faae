"""The table of settings. Flags, environment variables, TOML keys, keywords of `LLM`, `/v1/config`, its description and
the tables of the documentation are made from it and from nothing else.

A setting `max_num_seqs` is `--max-num-seqs`, `TWOSTEP_MAX_NUM_SEQS`, `max_num_seqs = ...` and `LLM(max_num_seqs=...)`.
Imports nothing heavy: every `--help` reads this.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from twostep.config import kinds
from twostep.config.kinds import Kind
from twostep.config.values import AUTO, NS_PER_MS, AdmissionOrder, MemoryShare
from twostep.core.policies import Continuous, TimeBudget, TokenBudget
from twostep.core.request import BLOCK_TOKENS

PREFIX = "TWOSTEP_"
LEAST_S = 0.1
"""A shorter limit on waiting would end healthy requests and servers."""

SERVER_PRESET = "chat"
"""What `twostep serve` takes if the user names none. Other commands and `LLM` then use the table's defaults."""

PRESETS: Mapping[str, Mapping[str, Any]] = {
    # Short prompts, many turns, users watch the stream: steady latency for a moderate number of people.
    "chat": {
        "enable_prefix_caching": True,
        "chunking": TimeBudget(50 * NS_PER_MS),
        "max_num_seqs": 32,
        "max_num_batched_tokens": 512,
    },
    # Long prompts over shared documents, short answers. With no decodes to delay, the time budget gives way to its
    # ceiling, and a step may be wide.
    "rag": {
        "enable_prefix_caching": True,
        "chunking": TimeBudget(100 * NS_PER_MS),
        "max_num_seqs": 16,
        "max_num_batched_tokens": 1024,
    },
    # Throughput only. Kernels reach full speed at a few hundred tokens a step; wider steps than these would only delay
    # cancellations and pings.
    "batch": {
        "enable_prefix_caching": True,
        "chunking": TokenBudget(1024),
        "max_num_seqs": 256,
        "max_num_batched_tokens": 1024,
    },
}

Part = Literal["start", "server", "scheduler", "engine"]
ENGINE_PARTS: tuple[Part, ...] = ("scheduler", "engine")
"""What an engine is made from, whether a server, `LLM` or a command runs it."""


@dataclass(frozen=True)
class Setting:
    """One row."""

    name: str
    part: Part
    """`start`: how the program starts; `server`: the HTTP front end; `scheduler`: what the scheduler plans by, which a
    recording keeps; `engine`: the rest of the engine."""
    kind: Kind
    metavar: str
    help: str
    default: Any = None
    """Typed; None: unset, or decided when the model is loaded."""
    default_note: str = ""
    """What stands for the default in help, if the value says little."""
    nullable: bool = False
    """Whether None may be given in Python even though the default is another value."""
    secret: bool = False
    python_only: bool = False
    """A keyword of `LLM` and nothing else."""
    alias_of: str = ""
    """The setting that this one is another form of."""
    former: tuple[str, ...] = ()
    """Earlier names, for the hint in an error."""

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """In the environment."""
        return PREFIX + self.name.upper()

    @property
    def is_switch(self) -> bool:
        return self.kind.toml_types == (bool,)

    @property
    def is_list(self) -> bool:
        return list in self.kind.toml_types

    def show(self, value: Any) -> Any:
        """The value as JSON has it; a secret is counted, not shown."""
        if self.secret:
            return f"{len(value)} given, not shown" if value else None
        return None if value is None else self.kind.to_json(value)

    def schema(self) -> dict[str, Any]:
        """JSON Schema of what `show` returns."""
        shape = {"type": "string"} if self.secret else dict(self.kind.schema)
        return {"anyOf": [shape, {"type": "null"}], "description": self.help}


SETTINGS = (
    Setting(
        "model", "start", kinds.text(), "MODEL", "a name that `twostep models` lists, or a .gguf file",
        default="smollm2-135m",
    ),
    Setting(
        "preset", "start", kinds.choice(*PRESETS), "PRESET",
        "defaults for a kind of traffic: chat, rag or batch",
    ),
    Setting(
        "config", "start", kinds.file_path(), "FILE",
        "TOML file of settings; flags and environment variables override it",
    ),
    Setting(
        "calibrate", "start", kinds.switch(), "",
        "measure what steps cost on this machine before the server opens, in about a minute", default=False,
    ),
    # --- HTTP -----------------------------------------------------------------------------------------------------
    Setting(
        "host", "server", kinds.texts(least=1, joined=True), "ADDRESS",
        "address to listen on; :: includes IPv4; may be given more than once", default=("127.0.0.1",),
        default_note="127.0.0.1, only this machine",
    ),
    Setting("port", "server", kinds.integer(0, 65535), "N", "port to listen on; 0 picks a free one", default=8000),
    Setting(
        "api_key", "server", kinds.texts(), "KEY",
        "key that every request must carry; may be given more than once "
        "(prefer TWOSTEP_API_KEY: other users of the machine can see flags)",
        default=(), secret=True,
    ),
    Setting(
        "allowed_origins", "server", kinds.texts(), "ORIGIN",
        "origins whose web pages may call the server, * for all", default=(),
        default_note="on loopback those of this machine, else none",
    ),
    Setting(
        "allowed_hosts", "server", kinds.texts(), "NAME",
        "additional names to accept in the Host header: NAME, *.NAME, or * for all", default=(),
        default_note="on loopback none, else all",
    ),
    Setting(
        "root_path", "server",
        kinds.text("a path such as /llm, without a slash at its end", r"((/[\w.~-]+)+)?"), "PATH",
        "path prefix under which a proxy exposes the server, such as /llm", default="",
    ),
    Setting(
        "served_model_name", "server", kinds.texts(joined=True), "NAME",
        "model name in requests; of several, the first is the default", default=(), default_note="MODEL",
    ),
    Setting("max_queue", "server", kinds.integer(0), "N", "most requests that may wait", default=256),
    Setting("max_connections", "server", kinds.integer(1), "N", "most open connections", default=1024),
    Setting(
        "max_body_bytes", "server", kinds.integer(1), "N", "longest request body", default=4 << 20,
        default_note="4 MiB",
    ),
    Setting(
        "request_timeout_s", "server", kinds.number(LEAST_S), "S", "seconds after which a request is cancelled",
        default_note="never",
    ),
    Setting(
        "drain_s", "server", kinds.number(0), "S", "seconds that requests may take to finish after SIGTERM",
        default=30.0,
    ),
    Setting(
        "stall_s", "server", kinds.number(LEAST_S), "S",
        "seconds without a finished step, with work pending, after which /health reports failure", default=60.0,
    ),
    Setting(
        "log", "server", kinds.choice("text", "json", "off"), "FORMAT", "one line per request: text, json or off",
        default="text",
    ),
    Setting(
        "record_workload", "server", kinds.file_path(), "FILE",
        "write the arriving traffic, without its text, as a workload",
    ),
    # --- the scheduler --------------------------------------------------------------------------------------------
    Setting(
        "max_num_seqs", "scheduler", kinds.integer(1), "N", "most sequences that run at a time", default=64,
        former=("seats",),
    ),
    Setting(
        "max_model_len", "scheduler", kinds.integer(2), "N", "most tokens of prompt and answer together",
        default_note="the model's context", former=("context_tokens",),
    ),
    Setting(
        "max_num_batched_tokens", "scheduler", kinds.integer(1), "N", "most tokens of one step", default=1024,
        nullable=True, former=("max_step_tokens", "step_tokens"),
    ),
    Setting(
        "itl_budget", "scheduler", kinds.itl_budget(), "MS",
        "target inter-token latency; sizes prefill chunks to keep it: another form of --chunking time=MS",
        alias_of="chunking",
    ),
    Setting(
        "chunking", "scheduler", kinds.chunking(), "HOW",
        "how prompts are cut into chunks: none, tokens=N per step, or time=MS per step", default=TokenBudget(512),
    ),
    Setting(
        "batching", "scheduler", kinds.batching(), "HOW",
        "continuous, or static=SIZE, the baseline to compare with", default=Continuous(),
    ),
    Setting(
        "admission", "scheduler", kinds.admission(), "ORDER",
        "which waiting request is admitted first: priority, fcfs or shortest-prefill", default=AdmissionOrder.PRIORITY,
    ),
    Setting(
        "priority_preempts", "scheduler", kinds.switch(), "",
        "let more urgent requests preempt running ones", default=False,
    ),
    # --- the rest of the engine -----------------------------------------------------------------------------------
    Setting(
        "enable_prefix_caching", "engine", kinds.switch(), "", "reuse the KV of prompts with a common prefix",
        default=True,
    ),
    Setting(
        "kv_memory", "engine", kinds.kv_memory(), "SIZE",
        "share of free memory for the model and its KV cache, such as 0.5, or size of the cache, such as 2GiB or "
        "500 blocks",
        default=MemoryShare(0.5), former=("kv_share", "kv_bytes", "kv_blocks"),
    ),
    Setting(
        "block_size", "engine", kinds.integer(BLOCK_TOKENS, BLOCK_TOKENS), "N",
        f"tokens of a KV block; only {BLOCK_TOKENS} is supported", default=BLOCK_TOKENS,
    ),
    Setting(
        "threads", "engine", kinds.cpu_count(), "N", "threads of the kernels",
        default_note="the cores that this process may use",
    ),
    Setting(
        "profile", "engine", kinds.profile(), "FILE",
        "what steps cost on this machine, as twostep calibrate measured it: a file, auto for the one of this machine "
        "and model, or none",
        default=AUTO,
    ),
    Setting("record", "engine", kinds.file_path(), "FILE", "write every plan and step time, for twostep replay"),
    Setting(
        "executor", "engine", kinds.choice("native", "reference"), "NAME",
        "native, or reference: numpy, slow, to compare with", default="native", python_only=True,
    ),
    Setting(
        "overlap", "engine", kinds.switch(), "", "make plans and text while a step runs", default=True,
        python_only=True,
    ),
    Setting(
        "skip_tokenizer_init", "engine", kinds.switch(), "",
        "token ids in, token ids out: no text and no end-of-sequence token", default=False, python_only=True,
    ),
)  # fmt: skip

BY_NAME = {setting.name: setting for setting in SETTINGS}
FLAGGED = tuple(setting for setting in SETTINGS if not setting.python_only)
"""Those that have a flag, a variable and a key in a TOML file."""


def of_parts(*parts: Part) -> tuple[Setting, ...]:
    """The settings of these parts that hold a value of their own."""
    return tuple(setting for setting in SETTINGS if setting.part in parts and not setting.alias_of)
