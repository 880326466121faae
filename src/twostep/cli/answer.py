"""One answer to one prompt, on an engine that is made for it alone."""

import argparse
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter

from twostep.cli.request import answer_limit, encode, print_notes
from twostep.cli.statistics import engine_line, timeline_lines
from twostep.config.configs import EngineConfig
from twostep.config.values import MemoryShare
from twostep.engine.engine import Engine
from twostep.engine.outputs import ChoiceOutput, RequestOutput
from twostep.engine.params import SamplingParams
from twostep.errors import SamplingError
from twostep.model.loaded import open_model
from twostep.store.progress import Progress
from twostep.store.resolve import resolve

STEP_TOKENS = 512
"""Wide enough for the kernels' full speed; wider ones would only take memory."""


def answer(options: argparse.Namespace, prompt: str, params: SamplingParams, show: Callable[[str], None]) -> list[str]:
    """Hands each piece of the answer's text to `show` when it comes. Returns where the time went, in lines.

    Raises `SamplingError` where no token can be chosen, and `TwostepError` for what cannot be loaded or answered.
    """
    path = resolve(options.model, Progress())
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
    """A KV cache that holds this one sequence, and nothing that only others would gain by."""
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
        kv_bytes=engine.sizing.blocks * memory.kv_bytes_per_block,
    )
