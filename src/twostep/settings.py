"""The scheduler's settings as a user writes them, and a recording keeps them: plain strings and numbers."""

import re
from dataclasses import dataclass

from twostep.core.kv_cache import BlockGroup
from twostep.core.policies import (
    Batching,
    ChunkPolicy,
    Continuous,
    Order,
    ShortestPrefill,
    Static,
    TimeBudget,
    TokenBudget,
    Unchunked,
    by_priority,
    fcfs,
)
from twostep.core.scheduler import SchedulerConfig, least_step_tokens

NS_PER_MS = 1_000_000
GATHER_NS = 100 * NS_PER_MS
"""How long a static batch waits to be full."""


@dataclass(frozen=True)
class Settings:
    """`batching`: continuous, static=SIZE (which waits 100 ms for a full batch). `chunking`: none, tokens=N (a step),
    time=MS (between tokens of those that decode). `admission`: fcfs, priority, shortest-prefill. The rest as in
    `SchedulerConfig`."""

    blocks: tuple[int, ...]
    windows: tuple[int | None, ...] = (None,)
    seats: int = 64
    step_tokens: int = 1024
    context_tokens: int = 8192
    batching: str = "continuous"
    chunking: str = "time=50"
    admission: str = "priority"
    priority_preempts: bool = False

    @property
    def least_step_tokens(self) -> int:
        """What `step_tokens` has to be at least. Raises `ValueError` if `chunking` is none that there is."""
        return least_step_tokens(self.seats, _chunking(self.chunking, self.step_tokens))

    def config(self) -> SchedulerConfig:
        """Raises `ValueError` that names the setting, its value and what is allowed."""
        return SchedulerConfig(
            groups=tuple(BlockGroup(*group) for group in zip(self.blocks, self.windows, strict=True)),
            max_num_seqs=self.seats,
            max_num_batched_tokens=self.step_tokens,
            max_model_len=self.context_tokens,
            chunking=_chunking(self.chunking, self.step_tokens),
            batching=_batching(self.batching),
            order=_order(self.admission, self.context_tokens),
            priority_preempts=self.priority_preempts,
        )


def _chunking(text: str, step_tokens: int) -> ChunkPolicy:
    if text == "none":
        return Unchunked(step_tokens)
    if match := re.fullmatch(r"tokens=([1-9]\d*)", text):
        return TokenBudget(int(match[1]))
    if (match := re.fullmatch(r"time=(\d+(\.\d+)?)", text)) and float(match[1]) > 0:
        return TimeBudget(int(float(match[1]) * NS_PER_MS))
    raise ValueError(f"chunking is {text!r}; it has to be none, tokens=N or time=MILLISECONDS")


def _batching(text: str) -> Batching:
    if text == "continuous":
        return Continuous()
    if match := re.fullmatch(r"static=([1-9]\d*)", text):
        return Static(int(match[1]), GATHER_NS)
    raise ValueError(f"batching is {text!r}; it has to be continuous or static=SIZE")


def _order(text: str, context_tokens: int) -> Order:
    orders: dict[str, Order] = {
        "fcfs": fcfs, "priority": by_priority, "shortest-prefill": ShortestPrefill(context_tokens)
    }  # fmt: skip
    if text not in orders:
        raise ValueError(f"admission is {text!r}; it has to be {', '.join(orders)}")
    return orders[text]
