"""Makes what an engine consists of, from a model and the user's settings; refuses at once what cannot work."""

from collections.abc import Iterator
from typing import NamedTuple

from twostep.config.configs import EngineConfig, SchedulerSettings
from twostep.config.values import MemoryShare
from twostep.core.cost import CostModel
from twostep.core.request import BLOCK_TOKENS, blocks_for
from twostep.core.scheduler import Scheduler, least_step_tokens
from twostep.engine.host_memory import free_memory, plan_memory
from twostep.errors import InvalidParameterError
from twostep.kernels.native import NativeExecutor, packed_weight_bytes
from twostep.kernels.reference import ReferenceExecutor
from twostep.kernels.sampling import Sampler
from twostep.kernels.step import Executor
from twostep.kernels.threads import default_threads
from twostep.model.loaded import LoadedModel
from twostep.spec.host import HostDemand
from twostep.spec.memory import MemoryDemand, MemoryPlan


class Sizing(NamedTuple):
    """What the machine and the settings allow: KV blocks, and the longest sequence."""

    memory: MemoryPlan
    blocks: int
    max_model_len: int
    max_num_batched_tokens: int

    @property
    def longest(self) -> int:
        """Most tokens of a sequence: the context, or what the whole cache holds and one that is never computed."""
        return min(self.max_model_len, self.blocks * BLOCK_TOKENS + 1)

    def lines(self, config: EngineConfig) -> Iterator[str]:
        """The arithmetic, to print."""
        yield from self.memory.arithmetic(self.max_model_len)
        if self.longest < self.max_model_len:
            yield f"note: as the cache holds no more, prompt and answer have at most {self.longest} tokens together"
        if self.blocks < self.memory.blocks:
            filled_by = f"{config.max_num_seqs} sequences of {self.max_model_len} tokens"
            yield f"KV cache used: {self.blocks} blocks, all that {filled_by} can fill"


def size(model: LoadedModel, config: EngineConfig, *, serves: bool = False) -> Sizing:
    """`serves`: for a server, whose processes count too.

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
        packed_weight_bytes(model.network),
        step_tokens,
        config.max_num_seqs,
        host=HostDemand(vocab, config.threads or default_threads(), serves),
    )
    memory = plan_memory(demand, free_memory(), config.kv_memory, config.max_model_len or 2)
    useful = config.max_num_seqs * blocks_for(wanted)
    is_share = isinstance(config.kv_memory, MemoryShare)
    return Sizing(memory, min(memory.blocks, useful) if is_share else memory.blocks, wanted, step_tokens)


def settings(config: EngineConfig, sizing: Sizing) -> SchedulerSettings:
    """The scheduler's part of the settings."""
    return SchedulerSettings(
        blocks=(sizing.blocks,),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=sizing.max_num_batched_tokens,
        max_model_len=sizing.max_model_len,
        batching=config.batching,
        chunking=config.chunking,
        admission=config.admission,
        priority_preempts=config.priority_preempts,
    )


def scheduler(settings: SchedulerSettings, cost: CostModel) -> Scheduler:
    """A scheduler that plans with `cost`, and teaches it.

    Raises `InvalidParameterError` for settings that contradict each other.
    """
    try:
        return Scheduler(settings.config(), cost)
    except ValueError as error:
        raise InvalidParameterError(str(error)) from None


class Kernels(NamedTuple):
    """What computes, and on what."""

    executor: Executor
    sampler: Sampler
    isa: str
    threads: int

    def close(self) -> None:
        """Gives back weights, KV cache and threads, whoever else may still refer to these objects."""
        for part in (self.executor, self.sampler):
            if isinstance(part, NativeExecutor | ReferenceExecutor | Sampler):
                part.close()


def kernels(model: LoadedModel, config: EngineConfig, sizing: Sizing) -> Kernels:
    """The executor, with the memory of its widest step taken, and a sampler on the same threads."""
    vocab = model.network.shape.vocab
    if config.executor == "reference":
        return Kernels(ReferenceExecutor(model.network, sizing.blocks), Sampler(vocab), "numpy", 1)
    native = NativeExecutor(model.network, sizing.blocks, threads=config.threads or default_threads())
    try:
        native.reserve(sizing.max_num_batched_tokens, config.max_num_seqs)
    except BaseException:
        native.close()
        raise
    return Kernels(native, native.sampler(), native.isa, native.threads)
