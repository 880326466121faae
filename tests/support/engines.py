"""Engines on a tiny real model, what to ask them, and doubles of kernels that watch a run or spoil a step of it."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from twostep.config.configs import EngineConfig
from twostep.config.values import MemoryBlocks
from twostep.engine import build
from twostep.engine.engine import Engine
from twostep.engine.outputs import Delta, Event, RequestOutput
from twostep.engine.params import SamplingParams
from twostep.errors import SamplingError
from twostep.kernels.sampling import Sampled, Sampler, SampleRow
from twostep.kernels.step import Capabilities, Executor, StepArrays
from twostep.model.loaded import LoadedModel, open_model

STORIES = Path(__file__).parent.parent / "data" / "stories260k.gguf"
VOCAB = 512
PLENTY = 2000
"""KV blocks for anything that these tests ask at once."""

Wrap = Callable[[Any, Any], tuple[Any, Any]]
"""Puts doubles around an executor and its sampler."""


@cache
def stories() -> LoadedModel:
    return open_model(STORIES)


@contextmanager
def engine(wrap: Wrap | None = None, *, model: LoadedModel | None = None, **settings: Any) -> Iterator[Engine]:
    """An engine without text on the tiny model, unless said otherwise; `wrap` puts doubles around its kernels."""
    usual = {"skip_tokenizer_init": model is None, "kv_memory": MemoryBlocks(PLENTY), "threads": 1}
    make = build.kernels

    def wrapped(*arguments: Any) -> build.Kernels:
        kernels = make(*arguments)
        if wrap is None:
            return kernels
        executor, sampler = wrap(kernels.executor, kernels.sampler)
        return kernels._replace(executor=executor, sampler=sampler)

    with patch.object(build, "kernels", wrapped):
        made = Engine(model or stories(), EngineConfig(**{**usual, **settings}))
    try:
        yield made
    finally:
        made.close()


# --- asking -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """What is asked of an engine; `id` as its output will have it."""

    id: str
    prompt: list[int]
    params: SamplingParams
    priority: int = 0


def prompt(tokens: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB), k=tokens)


def mixed_requests(count: int, seed: int) -> list[Asked]:
    """Every kind of request in one crowd. Each has its own seed, by which what the sampler saw can be named."""
    rng = random.Random(seed)
    prefixes = [prompt(length, 1000 + length) for length in (37, 128, 250)]
    return [_mixed_request(rng, i, prefixes) for i in range(count)]


def _mixed_request(rng: random.Random, i: int, prefixes: list[list[int]]) -> Asked:
    shared = rng.choice([[], [], *prefixes])
    longest = rng.choice([40, 400 - len(shared)])
    own = rng.choices(range(3, VOCAB), k=rng.randint(1, longest))
    max_tokens = rng.randint(1, 40)
    params = SamplingParams(
        n=rng.choice([1, 1, 1, 2, 3]),
        max_tokens=max_tokens,
        min_tokens=rng.choice([0, 0, min(5, max_tokens)]),
        seed=i,
        temperature=rng.choice([0.0, 0.7, 1.0, 1.5]),
        top_p=rng.choice([1.0, 0.9]),
        top_k=rng.choice([0, 0, 20]),
        presence_penalty=rng.choice([0.0, 0.0, 0.5]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
        logprobs=rng.choice([None, 0, 3]),
        logit_bias=rng.choice([{}, {}, {400: 2.0}]),
        stop_token_ids=rng.sample(range(3, VOCAB), k=rng.choice([0, 8, 32])),
        ignore_eos=rng.random() < 0.5,
    )
    return Asked(str(i), shared + own, params, rng.randrange(3))


def submit(engine: Engine, asked: Asked, *, stream: bool = False) -> str:
    return engine.submit(asked.prompt, asked.params, id=asked.id, priority=asked.priority, stream=stream)


def run(engine: Engine, turns: int = 20_000) -> dict[str, RequestOutput]:
    """Turns until nothing is outstanding; outputs by id."""
    outputs = {}
    for _ in range(turns):
        if not engine.outstanding:
            return outputs
        for event in engine.turn():
            if isinstance(event, RequestOutput):
                assert event.id not in outputs, "two outputs of one request"
                outputs[event.id] = event
    raise AssertionError("no end")


def answer(engine: Engine, prompt: Sequence[int], **params: Any) -> RequestOutput:
    """What it answers to this alone, greedily unless said otherwise."""
    id_ = engine.submit(prompt, SamplingParams(**{"temperature": 0, "max_tokens": 8, **params}))
    return run(engine)[id_]


def tokens_of(output: RequestOutput) -> list[list[int]]:
    """By choice."""
    return [list(choice.token_ids) for choice in output.choices]


def said(output: RequestOutput) -> list[tuple[Any, ...]]:
    """All of an output that must not depend on company: not its times, not what was found in the cache."""
    return [
        (c.index, c.text, tuple(c.token_ids), c.finish_reason, c.stop_reason, c.logprobs, c.error)
        for c in output.choices
    ]


def streamed(events: Iterable[Event], id_: str, index: int) -> list[Delta]:
    return [event for event in events if isinstance(event, Delta) and (event.id, event.index) == (id_, index)]


# --- residue ------------------------------------------------------------------------------------------------------


def assert_no_residue(engine: Engine) -> None:
    """Nobody is served, and nothing anywhere remembers that anybody was, but for blocks that may be found again.

    A last turn, with nothing to serve, works through what the one before has noted.
    """
    assert engine.turn() == []
    scheduler, executor, surroundings = engine.scheduler, engine._executor, engine._io
    scheduler.check()
    assert engine.outstanding == 0
    assert scheduler.idle
    assert scheduler.running == len(scheduler.waiting) == 0
    assert scheduler.cache.free == tuple(group.blocks for group in scheduler.config.groups), "blocks are not back"
    assert executor.answers == {}
    assert executor._tables._row_of == {}
    assert sorted(executor._rows.numbers) == sorted(scheduler._left), "those that the next step is told to let go"
    assert surroundings.collector._choices == {}
    assert surroundings.collector._ends == surroundings.collector.events == []
    assert surroundings._submitted == {}
    assert not surroundings._inbox


# --- doubles ------------------------------------------------------------------------------------------------------

Place = tuple[int | None, int, int]
"""Seed, choice and position of a token: names it where each request has its own seed."""


class WatchedSampler:
    """Keeps a hash of every row of logits. A row that is sampled again (its step failed) has to be the same."""

    def __init__(self, sampler: Sampler) -> None:
        self.seen: dict[Place, bytes] = {}
        self._sampler = sampler

    def sample(self, logits: NDArray[np.float32], rows: Sequence[SampleRow]) -> list[Sampled | SamplingError]:
        for values, row in zip(logits, rows, strict=True):
            digest = blake2b(values.tobytes(), digest_size=16).digest()
            place = row.params.seed, row.choice, row.position
            assert self.seen.setdefault(place, digest) == digest, f"{place}: other logits than before"
        return self._sampler.sample(logits, rows)


@dataclass
class SpoiltSampler:
    """Puts NaN into the logits of one request (by its seed) from its `position` on."""

    sampler: Sampler
    seed: int
    position: int

    def sample(self, logits: NDArray[np.float32], rows: Sequence[SampleRow]) -> list[Sampled | SamplingError]:
        logits = logits.copy()
        for i, row in enumerate(rows):
            if row.params.seed == self.seed and row.position >= self.position:
                logits[i, 7] = np.nan
        return self.sampler.sample(logits, rows)


@dataclass
class ScriptedSampler:
    """Gives the tokens that stand in a script, by seed, instead of those that it samples; from the start after the
    last."""

    sampler: Sampler
    scripts: dict[int, list[int]]
    prompt_tokens: int

    def sample(self, logits: NDArray[np.float32], rows: Sequence[SampleRow]) -> list[Sampled | SamplingError]:
        sampled = self.sampler.sample(logits, rows)
        return [self._scripted(row, given) for row, given in zip(rows, sampled, strict=True)]

    def _scripted(self, row: SampleRow, given: Sampled | SamplingError) -> Sampled | SamplingError:
        script = self.scripts.get(row.params.seed or 0)
        if script is None or isinstance(given, SamplingError):
            return given
        return given._replace(token=script[(row.position - self.prompt_tokens) % len(script)])


@dataclass
class WatchedKernels:
    """Calls `before` with the number of each step, from 1, and its arrays; what that raises is the step's end."""

    kernels: Executor
    before: Callable[[int, StepArrays], None]
    steps: int = 0
    widths: list[int] = field(default_factory=list)
    """Tokens of each step."""

    def forward_arrays(self, step: StepArrays) -> NDArray[np.float32]:
        self.steps += 1
        self.widths.append(len(step.tokens))
        self.before(self.steps, step)
        return self.kernels.forward_arrays(step)

    def copy_block(self, source: int, target: int, group: int = 0) -> None:
        self.kernels.copy_block(source, target, group)

    @property
    def capabilities(self) -> Capabilities:
        return self.kernels.capabilities


def watching(before: Callable[[int, StepArrays], None]) -> Wrap:
    """For `engine`."""
    return lambda kernels, sampler: (WatchedKernels(kernels, before), sampler)


def failing(steps: dict[int, BaseException]) -> Wrap:
    """For `engine`: the kernels raise this instead of computing these steps."""

    def before(number: int, step: StepArrays) -> None:
        if number in steps:
            raise steps[number]

    return watching(before)
