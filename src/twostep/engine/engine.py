"""The engine: a model, its memory, the scheduler and the loop, in the process of whoever calls it."""

import secrets
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from platform import machine, python_version

from twostep.config.configs import EngineConfig
from twostep.config.values import text_of
from twostep.core.blocks import prompt_hashes, root_hash
from twostep.core.loop import Abort, EngineLoop
from twostep.core.request import Request, blocks_for
from twostep.core.scheduler import NeverFitsError
from twostep.engine import build
from twostep.engine.collector import Event
from twostep.engine.outputs import RequestOutput
from twostep.engine.params import SamplingParams
from twostep.engine.step.executor import KernelExecutor
from twostep.engine.surroundings import EngineSurroundings, Submission
from twostep.engine.text.answer import Answer, Vocabulary
from twostep.engine.text.constraint import Grammars
from twostep.engine.timing.meter import Measured
from twostep.errors import ContextLengthError, InvalidParameterError
from twostep.kernels.native import NativeExecutor
from twostep.kernels.sampling import check_integer
from twostep.model.loaded import LoadedModel
from twostep.perf.linear import LinearCostModel
from twostep.processes import Owner
from twostep.recording.writer import RecordedSurroundings, Recorder

MOST_URGENT = 2**31 - 1
"""Priorities are from its negative to it, the least number being the most urgent."""
KV_FORMAT = "f16 v2"
"""Names the layout of a KV block: equal hashes mean equal bytes."""


class Engine:
    """Serves requests step by step: `submit`, then `turn` until nothing is outstanding. One thread at a time.

    Refuses at once what cannot work: `InvalidParameterError` for settings, `MemoryPlanError` with the arithmetic.
    """

    def __init__(self, model: LoadedModel, config: EngineConfig, *, serves: bool = False) -> None:
        """`serves`: it belongs to a server, whose processes are part of the memory that is planned."""
        self.model, self.config = model, config
        self._owner = Owner("this engine")
        self._recorder: Recorder | None = None
        self._open: set[str] = set()
        self._ids = 0
        try:
            self._prepare(serves)
        except BaseException:
            self.close()  # at once, however long the error and its frames are kept
            raise

    def _prepare(self, serves: bool) -> None:
        model, config = self.model, self.config
        self.sizing = build.size(model, config, serves=serves)
        self.settings = build.settings(config, self.sizing)
        self.cost = LinearCostModel()
        self.scheduler = build.scheduler(self.settings, self.cost)
        tokenizer = None if config.skip_tokenizer_init else model.tokenizer
        self._vocabulary = Vocabulary(model.network.shape.vocab, tokenizer)
        self._grammars = None if tokenizer is None else Grammars(tokenizer, self._vocabulary.rows)
        self._key = secrets.token_bytes(16)
        self.kernels = build.kernels(model, config, self.sizing)
        self._executor = KernelExecutor(
            self.kernels.executor,
            self.kernels.sampler,
            config.max_num_seqs,
            blocks_for(self.sizing.max_model_len),
            overlap=config.overlap,
            threads=0 if config.executor == "reference" else self.kernels.threads,
        )
        self._surroundings = EngineSurroundings(self._executor, tokenizer, self.cost)
        self._loop = self._make_loop()

    def _make_loop(self) -> EngineLoop:
        around: EngineSurroundings | RecordedSurroundings = self._surroundings
        if self.config.record is not None:
            around = RecordedSurroundings(around, around, around, self._make_recorder(self.config.record))
        return EngineLoop(self.scheduler, self._executor, clock=around, inbox=around, observer=around)

    def _make_recorder(self, path: Path) -> Recorder:
        about = {"model": self.model.path.name, "machine": machine(), "python": python_version()}
        self._recorder = Recorder(path, self.settings, about)
        return self._recorder

    @property
    def outstanding(self) -> int:
        """Requests whose output has not come yet."""
        return len(self._open)

    @property
    def computing(self) -> bool:
        """Whether a step is under way, which `end` waits for."""
        return self._loop.computing

    def describe(self) -> Iterator[str]:
        """The effective settings in lines to print, with the arithmetic behind the KV cache."""
        yield from self.sizing.lines(self.config)
        s = self.settings
        yield f"kernels: {self.kernels.isa}, {self.kernels.threads} threads"
        batching, chunking = text_of(s.batching), text_of(s.chunking)
        yield f"scheduler: {s.max_num_seqs} sequences at a time, {batching} batching, admission {s.admission}"
        yield f"steps: at most {s.max_num_batched_tokens} tokens, prompts cut by {chunking}; context {s.max_model_len}"
        if not self.config.skip_tokenizer_init:
            yield from self.model.tokenizer.vocabulary.notes()

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        stream: bool = False,
    ) -> str:
        """Takes on a request of these prompt tokens; returns its id.

        Only requests of the same `cache_salt` find each other's KV. With `stream` the text comes in `Delta`s as well.
        Raises `InvalidParameterError` for what cannot be served: a prompt that is empty or not of this vocabulary, or
        with its answer longer than context or cache, an id in use.
        """
        self._owner.check()
        self._check_params(params)
        check_integer("priority", priority, -MOST_URGENT, MOST_URGENT)
        id_ = self._free_id(id)
        self._check_kind(prompt)
        max_tokens = self._answer_limit(len(prompt), params)  # before anything is done with a long one
        tokens = self._tokens(prompt)
        root = root_hash(str(self.model.path), KV_FORMAT, cache_salt, self._key)
        request = Request(
            id=id_,
            prompt_tokens=len(tokens),
            max_tokens=max_tokens,
            hashes=prompt_hashes(root, tokens) if self.config.enable_prefix_caching else (),
            priority=priority,
            choices=params.n,
        )
        self._check_fits(request)
        answers = self._answers(request, tokens, params.seeded(), root)
        self._open.add(id_)
        self._surroundings.submit(Submission(request, tokens, answers, stream))
        return id_

    def abort(self, id: str) -> None:
        """Ends a request early; its output comes with what it has. Nothing happens if it has ended."""
        if id in self._open:
            self._surroundings.ask(Abort(id))

    def abort_all(self) -> None:
        """Ends every request; their outputs are dropped, and the step under way stops at its next layer."""
        self.stop_step()
        for id_ in self._open:
            self._surroundings.ask(Abort(id_))
        while self._open:
            self.turn()
            if self.scheduler.idle:
                self._open.clear()  # what nobody serves any more, after an exception, has no output either

    def stop_step(self) -> None:
        """From a signal handler or another thread: the step under way ends at its next layer, and gives nothing.

        The reference executor has no such place to stop at; it goes on.
        """
        kernels = self.__dict__.get("kernels")
        if kernels is not None and isinstance(kernels.executor, NativeExecutor):
            kernels.executor.cancel()

    def turn(self) -> list[Event]:
        """Ends the step under way, begins the next and leaves it running; returns what came of the ended one.

        Where nothing is outstanding, nothing happens.
        """
        self.end()
        return self.begin()

    def end(self) -> None:
        """Waits for the step under way, if there is one, and takes in its result."""
        self._owner.check()
        self._executor.wait()
        self._loop.poll()

    def begin(self) -> list[Event]:
        """Begins the next step, if there is work, and leaves it running; returns what came of those that have ended."""
        self._owner.check()
        self._loop.begin()
        return self._take()

    def idle_s(self) -> float | None:
        """How long a host may wait for input before it calls `begin` again: 0.0 while there is work, None if nothing is
        outstanding. A static batch that is not full waits for others for a while."""
        if not self._open:
            return None
        wake_ns = self._loop.next_wake_ns
        if wake_ns is None or self._surroundings.has_input:
            return 0.0
        return max(0, wake_ns - self._surroundings.now()) / 1e9

    @property
    def first_tokens(self) -> bool:
        """Whether the step that ended last gave the first token of an answer that streams."""
        return self._surroundings.collector.awaits_first

    def come(self) -> list[Event]:
        """What has come of steps that have ended, before the next one begins: text is made now, not beside it."""
        self._surroundings.catch_up()
        return self._take()

    def _take(self) -> list[Event]:
        collector = self._surroundings.collector
        events, collector.events = collector.events, []
        self._open.difference_update(event.id for event in events if isinstance(event, RequestOutput))
        return events

    def prepare_grammars(self) -> None:
        """So that the first request under a grammar does not wait for what all of them need. Safe beside all else."""
        if self._grammars is not None:
            self._grammars.prepare()

    def measured(self) -> Measured:
        """What the steps and tokens took, since the start."""
        return self._surroundings.collector.times.meter.measured()

    def close(self) -> None:
        """Gives back weights, KV cache and threads, and ends the recording; requests under way have no output.

        The engine cannot be used any more. In a forked child nothing happens, since nothing of it is the child's.
        """
        if not self._owner.here:
            return
        if (executor := self.__dict__.pop("_executor", None)) is not None:
            executor.close()
        self._open.clear()
        if (kernels := self.__dict__.get("kernels")) is not None:
            kernels.close()
        for name in ("_loop", "_surroundings"):
            self.__dict__.pop(name, None)
        if self._recorder is not None:
            self._recorder.close()

    def _free_id(self, asked: str | None) -> str:
        self._ids += asked is None
        id_ = f"request-{self._ids}" if asked is None else asked
        if not isinstance(id_, str) or not id_ or id_ in self._open:
            raise InvalidParameterError(f"id is {id_!r}; it has to be text that no unfinished request has", "id")
        return id_

    def _answer_limit(self, prompt_tokens: int, params: SamplingParams) -> int:
        """Where no length is asked for, it is what context and cache leave; what is asked for has to fit."""
        limit = params.answer_limit(prompt_tokens, self.sizing.max_model_len)
        room = self.sizing.longest - prompt_tokens
        return limit if params.max_tokens else max(1, params.min_tokens, min(limit, room))

    def _check_kind(self, prompt: Sequence[int]) -> None:
        if isinstance(prompt, (str, bytes, bytearray)) or not hasattr(prompt, "__getitem__"):
            raise InvalidParameterError(f"the prompt is a {type(prompt).__name__}; it has to be token ids", "prompt")
        if len(prompt) == 0:
            raise InvalidParameterError("the prompt is empty; it needs at least one token", "prompt")

    def _tokens(self, prompt: Sequence[int]) -> list[int]:
        """A copy: what the caller does with the prompt afterwards changes nothing."""
        try:
            tokens = array("i", list(prompt)).tolist()
        except (TypeError, OverflowError) as error:
            raise InvalidParameterError(f"the prompt has something that is no token id: {error}", "prompt") from None
        last = self._vocabulary.tokens - 1
        for id_ in (min(tokens), max(tokens)):
            if not 0 <= id_ <= last:
                raise InvalidParameterError(f"the prompt has token {id_}; the vocabulary is 0 to {last}", "prompt")
        return tokens

    def _check_fits(self, request: Request) -> None:
        try:
            self.scheduler.check_fits(request)
        except NeverFitsError as error:
            raise ContextLengthError(str(error)) from None

    def _check_params(self, params: SamplingParams) -> None:
        params.check_vocabulary(self._vocabulary.tokens)
        if self.config.skip_tokenizer_init and params.stop_strings:
            raise InvalidParameterError("stop needs text, and skip_tokenizer_init leaves the tokenizer out", "stop")
        if params.structured is not None:
            if self._grammars is None:
                problem = "structured needs text, and skip_tokenizer_init leaves the tokenizer out"
                raise InvalidParameterError(problem, "structured")
            self._grammars.check(params.structured)

    def _answers(self, request: Request, tokens: list[int], params: SamplingParams, root: bytes) -> list[Answer]:
        """One a choice."""
        hashes = request.hashes if self.config.enable_prefix_caching else None
        form, grammars = params.structured, self._grammars
        return [
            Answer(
                tokens,
                params,
                choice,
                request.max_tokens,
                self._vocabulary,
                hashes,
                root,
                grammars.constraint(form) if grammars and form else None,
            )
            for choice in range(request.choices)
        ]
