"""What a user may set of an engine. Frozen; what contradicts itself is refused when the engine is made."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class EngineConfig:
    """Names as in vLLM where the meaning is the same."""

    max_num_seqs: int = 64
    """Sequences that run at a time."""
    max_model_len: int | None = None
    """Most tokens of prompt and answer together; None: the model's context."""
    max_step_tokens: int = 1024
    """Most tokens of one step: what the executor's buffers are made for."""
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
    executor: Literal["native", "reference"] = "native"
    """`reference` is numpy: slow, to compare with."""
    overlap: bool = True
    """Whether plans and text are made while a step runs."""
    record: Path | None = None
    """Where to write every plan and step time, for `twostep replay`."""
