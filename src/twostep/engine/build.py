"""Builds the parts of an engine from a model and settings; refuses settings that cannot work."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from twostep.config.configs import EngineConfig, SchedulerSettings
from twostep.config.values import MemoryShare
from twostep.core.cost import CostModel
from twostep.core.request import BLOCK_TOKENS, blocks_for
from twostep.core.scheduler import Scheduler, least_step_tokens
from twostep.engine.host_memory import free_memory, plan_memory
from twostep.engine.other_servers import OtherServers
from twostep.errors import InvalidParameterError, MemoryPlanError
from twostep.kernels.native import NativeExecutor, packed_weight_bytes
from twostep.kernels.reference import ReferenceExecutor
from twostep.kernels.sampling import Sampler
from twostep.kernels.step import Executor
from twostep.kernels.threads import default_threads
from twostep.model.loaded import LoadedModel
from twostep.spec.host import HostDemand
from twostep.spec.memory import MemoryDemand, MemoryPlan

NO_OTHERS = OtherServers()


class Sizing(NamedTuple):
    """The sizes that machine and settings allow."""

    memory: MemoryPlan
    blocks: int
    """Of each group with full attention; `group_blocks` has those of all."""
    max_model_len: int
    max_num_batched_tokens: int
    """Most tokens of a step."""
    others: OtherServers = NO_OTHERS
    """The servers that had planned before."""

    @property
    def engine_bytes(self) -> int:
        """What the engine's process will take: weights, activations, its own part of the rest, and the blocks used."""
        demand = self.memory.demand
        kv_bytes = self.memory.kv_bytes * self.blocks // self.memory.blocks
        own = demand.host.engine_bytes if demand.host else 0
        return demand.fixed_bytes - demand.host_bytes + own + kv_bytes

    @property
    def group_blocks(self) -> tuple[int, ...]:
        """Blocks by group of the model's KV layout."""
        return self.memory.demand.group_blocks(self.blocks)

    @property
    def longest(self) -> int:
        """Most tokens of a sequence: the context, or the tokens of the whole cache and a last one without KV."""
        return min(self.max_model_len, self.blocks * BLOCK_TOKENS + 1)

    def lines(self, config: EngineConfig) -> Iterator[str]:
        """Lines to print: the arithmetic."""
        yield from self.others.lines()
        yield from self.memory.arithmetic(self.max_model_len)
        if self.longest < self.max_model_len:
            yield f"note: as the cache holds no more, prompt and answer have at most {self.longest} tokens together"
        if self.blocks < self.memory.blocks:
            filled_by = f"{config.max_num_seqs} sequences of {self.max_model_len} tokens"
            yield f"KV cache used: {self.blocks} blocks, all that {filled_by} can fill"


def size(model: LoadedModel, config: EngineConfig, *, serves: bool = False, others: OtherServers = NO_OTHERS) -> Sizing:
    """Plans memory and sizes. `serves`: for a server, whose processes count too. `others`: servers whose planned memory
    is not free.

    Raises `MemoryPlanError` with the arithmetic, `InvalidParameterError` for a context that the model lacks.
    """
    shape = model.network.shape
    wanted = shape.context if config.max_model_len is None else config.max_model_len
    if not 2 <= wanted <= shape.context:
        raise InvalidParameterError(f"max_model_len is {wanted}; it has to be from 2 to the context, {shape.context}")
    least = least_step_tokens(config.max_num_seqs, config.chunking)
    step_tokens = config.max_num_batched_tokens or max(wanted, least)
    vocab = 0 if config.skip_tokenizer_init else shape.vocab
    demand = MemoryDemand(
        shape,
        model.network.kv_layout,
        packed_weight_bytes(model.network),
        step_tokens,
        logit_rows=config.max_num_seqs,
        sequences=config.max_num_seqs,
        rotations=len(model.network.rotations),
        host=HostDemand(vocab, config.threads or default_threads(), serves),
    )
    try:
        free_bytes = free_memory(others=others.servers)
        memory = plan_memory(demand, free_bytes, config.kv_memory, least_tokens=config.max_model_len or 2)
    except MemoryPlanError as error:
        raise MemoryPlanError("; ".join([str(error), *others.lines()])) from None
    useful = config.max_num_seqs * blocks_for(wanted)
    blocks = min(memory.blocks, useful) if isinstance(config.kv_memory, MemoryShare) else memory.blocks
    return Sizing(memory, blocks, wanted, step_tokens, others)


def settings(config: EngineConfig, sizing: Sizing) -> SchedulerSettings:
    """The scheduler's part of the settings."""
    return SchedulerSettings(
        blocks=sizing.group_blocks,
        windows=sizing.memory.demand.layout.windows,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=sizing.max_num_batched_tokens,
        max_model_len=sizing.max_model_len,
        batching=config.batching,
        chunking=config.chunking,
        admission=config.admission,
        priority_preempts=config.priority_preempts,
    )


def scheduler(settings: SchedulerSettings, cost: CostModel) -> Scheduler:
    """Returns a scheduler that plans with `cost` and fits it to measured steps.

    Raises `InvalidParameterError` for settings that contradict each other.
    """
    try:
        return Scheduler(settings.config(), cost)
    except ValueError as error:
        raise InvalidParameterError(str(error)) from None


class Kernels(NamedTuple):
    """The executor and sampler, with the instruction set and threads that they use."""

    executor: Executor
    sampler: Sampler
    isa: str
    threads: int
    lacked_ns: Callable[[], int]
    """See `CoreStarvationMeter`."""

    def close(self) -> None:
        """Frees weights, KV cache and threads, even if these objects are still referred to."""
        for part in (self.executor, self.sampler):
            if isinstance(part, NativeExecutor | ReferenceExecutor | Sampler):
                part.close()


def kernels(model: LoadedModel, config: EngineConfig, sizing: Sizing) -> Kernels:
    """Returns the executor, with memory for its largest step, and a sampler on the same threads."""
    vocab, blocks = model.network.shape.vocab, sizing.group_blocks
    if config.executor == "reference":
        return Kernels(ReferenceExecutor(model.network, blocks), Sampler(vocab), "numpy", 1, lambda: 0)
    native = NativeExecutor(model.network, blocks, threads=config.threads or default_threads())
    try:
        native.reserve(sizing.max_num_batched_tokens, config.max_num_seqs)
    except BaseException:
        native.close()
        raise
    return Kernels(native, native.sampler(), native.isa, native.threads, native.lacked_ns)
