"""What a user may set of an engine. Frozen; what contradicts itself is refused when the engine is made."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Self, get_args

from twostep.engine.refusals import check_names
from twostep.errors import InvalidParameterError
from twostep.kernels.sampling import check_integer, check_real

ExecutorName = Literal["native", "reference"]


@dataclass(frozen=True)
class EngineConfig:
    """Names as in vLLM where the meaning is the same.

    Raises `InvalidParameterError` that names the setting, its value and what is allowed.
    """

    max_num_seqs: int = 64
    """Sequences that run at a time."""
    max_model_len: int | None = None
    """Most tokens of prompt and answer together; None: the model's context."""
    max_step_tokens: int | None = 1024
    """Most tokens of one step: what the executor's buffers are made for; None: as many as the longest sequence has."""
    batching: str = "continuous"
    """`continuous`, or the baseline `static=SIZE`."""
    chunking: str = "tokens=512"
    """How prompts are cut: `none`, `tokens=N` a step, `time=MS` between the tokens of those that decode."""
    admission: str = "priority"
    """Who is admitted first: `fcfs`, `priority` (a lower number is more urgent), `shortest-prefill`."""
    priority_preempts: bool = False
    """Whether a more urgent request takes the place of one that runs."""
    enable_prefix_caching: bool = True
    """Whether requests find the KV of prompts that began alike."""
    kv_share: float | None = None
    """Part of free memory for weights, activations and KV cache together; None: half, unless `kv_bytes` says more."""
    kv_bytes: int | None = None
    """Size of the KV cache instead of a share."""
    kv_blocks: int | None = None
    """The same in blocks of 16 tokens."""
    threads: int | None = None
    """Threads of the kernels; None: the cores that this process may use."""
    skip_tokenizer_init: bool = False
    """Token ids in, token ids out: no text, no end-of-sequence token."""
    executor: ExecutorName = "native"
    """`reference` is numpy: slow, to compare with."""
    overlap: bool = True
    """Whether plans and text are made while a step runs."""
    record: Path | None = None
    """Where to write every plan and step time, for `twostep replay`."""

    def __post_init__(self) -> None:
        check_integer("max_num_seqs", self.max_num_seqs, 1, None)
        optional = {"max_model_len": 2, "max_step_tokens": 1, "kv_bytes": 1, "kv_blocks": 1, "threads": 1}
        for name, least in optional.items():
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), least, None)
        if self.threads is not None and self.threads > (cpus := os.cpu_count() or 1):
            raise InvalidParameterError(f"threads is {self.threads}; this machine has {cpus} CPUs", "threads")
        if self.kv_share is not None:
            check_real("kv_share", self.kv_share, 0, 1, open_below=True)
        for name in ("batching", "chunking", "admission"):
            self._check_type(name, str, "a string")
        for name in ("priority_preempts", "enable_prefix_caching", "skip_tokenizer_init", "overlap"):
            self._check_type(name, bool, "true or false")
        if self.executor not in get_args(ExecutorName):
            allowed = " or ".join(map(repr, get_args(ExecutorName)))
            raise InvalidParameterError(f"executor is {self.executor!r}; it has to be {allowed}", "executor")
        if self.record is not None:
            self._check_type("record", (str, os.PathLike), "the path of a file")
            object.__setattr__(self, "record", Path(self.record))

    def _check_type(self, name: str, kind: type | tuple[type, ...], allowed: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, kind):
            raise InvalidParameterError(f"{name} is {value!r}; it has to be {allowed}", name)

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self:
        """Settings by name. Raises `InvalidParameterError` for a name that is none, with those that are."""
        check_names(settings, [field.name for field in fields(cls)], "setting")
        return cls(**settings)
