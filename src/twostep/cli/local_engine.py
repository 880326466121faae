"""An engine in this process that serves one request at a time: one answer for `generate`, a conversation for `chat`."""

import argparse
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from time import perf_counter
from typing import Any

from twostep.cli.chat import Message, Said
from twostep.cli.prompt_input import answer_limit, encode, print_notes
from twostep.config.configs import EngineConfig
from twostep.config.values import MemoryShare
from twostep.engine.engine import Engine
from twostep.engine.outputs import ChoiceOutput, ChunkTime, RequestOutput, Timeline
from twostep.engine.params import SamplingParams
from twostep.errors import SamplingError
from twostep.llm import LLM
from twostep.model.loaded import open_model
from twostep.store.catalogue import DEFAULT_MODEL
from twostep.store.resolve import resolve
from twostep.store.wheel_download import FetchProgress

STEP_TOKENS = 512
"""Enough for the full speed of the kernels, and few enough that Ctrl-C acts between chunks of a long prompt."""


def answer(options: argparse.Namespace, prompt: str, params: SamplingParams, show: Callable[[str], None]) -> list[str]:
    """Passes each piece of the answer's text to `show`. Returns lines of timings.

    Raises `SamplingError` if no token can be sampled, and `TwostepError` if the model cannot be loaded or the prompt
    cannot be answered.
    """
    path = resolve(options.model, FetchProgress())
    started_s = perf_counter()
    model = open_model(path)
    tokens = encode(model, prompt, options)
    print_notes(model)
    max_tokens = answer_limit(len(tokens), options.max_tokens, model.network.shape.context)
    engine = Engine(model, _config(options, len(tokens) + max_tokens))
    load_s = perf_counter() - started_s
    try:
        choice = _streamed(engine, tokens, replace(params, max_tokens=max_tokens), show)
    except BaseException:
        engine.stop_step()
        raise
    finally:
        engine.close()
    lines = [f"load     {load_s:.3f} s", *timeline_lines(choice.timeline, len(tokens))]
    return [_engine_line(engine), *lines] if options.executor == "native" else lines


def _config(options: argparse.Namespace, tokens: int) -> EngineConfig:
    """A KV cache for one sequence, without prefix caching."""
    return EngineConfig(
        max_num_seqs=1,
        max_model_len=tokens,
        max_num_batched_tokens=STEP_TOKENS,
        chunking=f"tokens={STEP_TOKENS}",
        kv_memory=MemoryShare(1.0),
        threads=options.threads,
        executor=options.executor,
        enable_prefix_caching=False,
    )


def _streamed(engine: Engine, prompt: list[int], params: SamplingParams, show: Callable[[str], None]) -> ChoiceOutput:
    engine.submit(prompt, params, stream=True)
    while True:
        for event in engine.turn():
            if isinstance(event, RequestOutput):
                [choice] = event.choices
                if choice.error is not None:
                    raise SamplingError(choice.error)
                return choice
            show(event.text)


def _engine_line(engine: Engine) -> str:
    memory = engine.sizing.memory
    return engine_line(
        isa=engine.kernels.isa,
        threads=engine.kernels.threads,
        file_bytes=sum(tensor.nbytes for tensor in engine.model.network.tensors.values()),
        weight_bytes=memory.weights_bytes,
        kv_bytes=memory.demand.kv_bytes(engine.sizing.blocks),
    )


def engine_line(*, isa: str, threads: int, file_bytes: int, weight_bytes: int, kv_bytes: int) -> str:
    """Instruction set, threads, and sizes of weights and KV cache."""
    sizes = f"weights {_mib(file_bytes)} in the file, {_mib(weight_bytes)} repacked in memory"
    return f"engine   {isa}, {threads} threads; {sizes}; KV cache {_mib(kv_bytes)}"


def timeline_lines(timeline: Timeline, prompt_tokens: int) -> Iterator[str]:
    """Queue, prefill and decode times of an answer. The first token belongs to prefill."""
    queue_s, prefill_s, ttft_s = timeline.queue_s, timeline.prefill_s, timeline.ttft_s
    if queue_s is None or prefill_s is None or ttft_s is None:
        return
    yield f"queue    {1000 * queue_s:.1f} ms"
    yield f"prefill  {prompt_tokens} tokens, TTFT {ttft_s:.3f} s, {prompt_tokens / prefill_s:.0f} tokens/s"
    if len(timeline.chunks) > 1:
        yield f"         in chunks: {_chunks(timeline.chunks)}"
    if timeline.tpot_s is not None:
        count = len(timeline.token_ns) - 1
        yield f"decode   {count} tokens, TPOT {1000 * timeline.tpot_s:.1f} ms, {1 / timeline.tpot_s:.0f} tokens/s"


def _chunks(chunks: Sequence[ChunkTime]) -> str:
    return ", ".join(f"{chunk.tokens} in {(chunk.end_ns - chunk.start_ns) / 1e6:.0f} ms" for chunk in chunks)


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


# --- a conversation ---------------------------------------------------------------------------------------------------


class LocalPartner:
    """An engine for one conversation; the prefix cache holds its earlier messages."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._params = SamplingParams(
            temperature=options.temperature, max_tokens=options.max_tokens, seed=options.seed
        )  # fmt: skip
        self.name = options.model or DEFAULT_MODEL
        settings: dict[str, Any] = {"max_num_batched_tokens": STEP_TOKENS, "chunking": f"tokens={STEP_TOKENS}"}
        self._llm = LLM(self.name, max_num_seqs=1, threads=options.threads, **settings)
        print_notes(self._llm.model)

    def answer(self, messages: list[Message], said: Said) -> Generator[str, None, None]:
        said.tokens = 0
        with closing(self._llm.stream(messages, self._params)) as events:
            for event in events:
                if isinstance(event, RequestOutput):
                    [choice] = event.choices
                    if choice.error is not None:
                        raise SamplingError(choice.error)
                    said.cut = choice.finish_reason == "length"
                else:
                    said.tokens += len(event.token_ids)
                    yield event.text

    def close(self) -> None:
        self._llm.close()
