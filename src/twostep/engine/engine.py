"""The engine: a model, its memory, the scheduler and the loop, in the calling process."""

import secrets
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from platform import machine, python_version
from time import monotonic_ns

from twostep.config.configs import EngineConfig
from twostep.config.values import text_of
from twostep.core.blocks import prompt_hashes, root_hash
from twostep.core.cost import CostModel
from twostep.core.loop import Abort, Command, EngineLoop, MissingCapabilityError
from twostep.core.plan import Finished, Resolved, Step, StepResult
from twostep.core.request import Request, blocks_for
from twostep.core.scheduler import NeverFitsError
from twostep.engine import build
from twostep.engine.backend import RequestSoFar
from twostep.engine.collector import Collector
from twostep.engine.other_servers import Registration, Registry
from twostep.engine.outputs import Event, RequestOutput
from twostep.engine.params import SamplingParams
from twostep.engine.profiles import profile_for
from twostep.engine.resumption import Resumer, Resumption
from twostep.engine.step.executor import KernelExecutor
from twostep.engine.text.answer import Answer, Vocabulary
from twostep.engine.text.constraint import Grammars
from twostep.engine.text.text_stream import text_stream
from twostep.engine.timing.meter import Measured
from twostep.engine.timing.timekeeper import StepEnd
from twostep.errors import ContextLengthError, InvalidParameterError, UnsupportedError
from twostep.kernels.native import NativeExecutor
from twostep.kernels.sampling import check_integer
from twostep.model.loaded import LoadedModel
from twostep.model.tokenizer import Tokenizer
from twostep.processes import Owner
from twostep.recording.writer import RecordedSurroundings, Recorder


@dataclass(frozen=True)
class Submission:
    """A request with the data that the scheduler does not need."""

    request: Request
    prompt: Sequence[int]
    params: SamplingParams
    answers: Sequence[Answer]
    """One for each choice to compute; created before the request is queued, so that a failure affects no other
    request."""
    streams: bool
    resumption: Resumption | None = None
    """Of a request whose engine died."""


class LoopIo:
    """Implements `Clock`, `Inbox` and `Observer` of `core.loop` in one process. Other threads may fill the inbox."""

    def __init__(self, executor: KernelExecutor, tokenizer: Tokenizer | None, cost: CostModel) -> None:
        self._inbox: deque[Command] = deque()
        self.collector = Collector(tokenizer, self._inbox.append, cost)
        self._executor = executor
        self._submitted: dict[str, Submission] = {}
        self._began_ns = 0

    def submit(self, submission: Submission) -> None:
        """Puts a request into the inbox, unless all its choices have ended."""
        if submission.answers:
            self._submitted[submission.request.id] = submission
            self._inbox.append(submission.request)
        else:
            self._follow(submission, {}, self.now())

    def command(self, command: Command) -> None:
        """Puts a command into the inbox."""
        self._inbox.append(command)

    @property
    def has_input(self) -> bool:
        """Whether there are commands that the loop has not received yet."""
        return bool(self._inbox)

    # --- for the loop ---------------------------------------------------------------------------------------------

    def now(self) -> int:
        return monotonic_ns()

    def receive(self) -> Iterable[Command]:
        while self._inbox:
            yield self._inbox.popleft()

    def added(self, request: Request, numbers: tuple[int, ...], now: int) -> None:
        submission = self._submitted.pop(request.id)
        answers = dict(zip(numbers, submission.answers, strict=True))
        for number, answer in answers.items():
            self._executor.add(number, answer)
        self._follow(submission, answers, now)

    def _follow(self, one: Submission, answers: dict[int, Answer], now: int) -> None:
        self.collector.follow(
            one.request.id, one.prompt, one.params, answers, now, streams=one.streams, resumption=one.resumption
        )

    def refused(self, request: Request, why: str, now: int) -> None:
        submission = self._submitted.pop(request.id)
        self.collector.refused(request.id, submission.prompt, why, now)

    def began(self, step: Step, now: int) -> None:
        self._began_ns = now

    def ended(self, step: Step, result: StepResult, resolved: Resolved, now: int) -> None:
        self._drop(resolved.finished)
        self.collector.note(StepEnd(step, self._executor.given, result, resolved, self._began_ns, now))

    def aborted(self, finished: tuple[Finished, ...], now: int) -> None:
        self._drop(finished)
        self.collector.note_aborted(finished, now)

    def catch_up(self) -> None:
        self.collector.catch_up()

    def _drop(self, finished: Iterable[Finished]) -> None:
        for number, _, _ in finished:
            self._executor.drop(number)


MOST_URGENT = 2**31 - 1
"""Priorities range from its negative to it; the lowest number is the most urgent."""


class Engine:
    """Serves requests step by step: `submit`, then `turn` until nothing is outstanding. One thread at a time.

    Refuses at once what cannot work: `InvalidParameterError` for settings, `MemoryPlanError` with the arithmetic.
    """

    def __init__(self, model: LoadedModel, config: EngineConfig, *, serves: bool = False) -> None:
        """`serves`: the engine belongs to a server, whose processes are part of the memory plan."""
        self.model, self.config = model, config
        self._owner = Owner("this engine")
        self._recorder: Recorder | None = None
        self._registration: Registration | None = None
        self._open: set[str] = set()
        self._ids = 0
        try:
            self._prepare(serves)
        except BaseException:
            self.close()  # now, as the error may keep this frame alive
            raise

    def _prepare(self, serves: bool) -> None:
        model, config = self.model, self.config
        self.sizing = self._size(serves)
        self.settings = build.settings(config, self.sizing)
        self.profile = profile_for(model, config)
        self.cost = self.profile.cost_model()
        self.scheduler = build.scheduler(self.settings, self.cost)
        tokenizer = self._tokenizer = None if config.skip_tokenizer_init else model.tokenizer
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
            lacked_ns=self.kernels.lacked_ns,
        )
        self._io = LoopIo(self._executor, tokenizer, self.cost)
        self._io.collector.times.meter.limits = self.profile.limits(model.network.model_spec(model.path.stem))
        self._loop = self._make_loop()

    def _size(self, serves: bool) -> build.Sizing:
        """A server is registered before another one can plan."""
        registry = Registry()
        with registry.planning() as others:
            sizing = build.size(self.model, self.config, serves=serves, others=others)
            if serves:
                self._registration = registry.register(sizing.engine_bytes)
        return sizing

    def _make_loop(self) -> EngineLoop:
        around: LoopIo | RecordedSurroundings = self._io
        if self.config.record is not None:
            around = RecordedSurroundings(around, around, around, self._make_recorder(self.config.record))
        try:
            return EngineLoop(self.scheduler, self._executor, clock=around, inbox=around, observer=around)
        except MissingCapabilityError as error:
            raise UnsupportedError(str(error)) from None

    def _make_recorder(self, path: Path) -> Recorder:
        about = {"model": self.model.path.name, "machine": machine(), "python": python_version()}
        profile = self.profile.profile
        self._recorder = Recorder(path, self.settings, about, None if profile is None else profile.costs.to_json())
        return self._recorder

    @property
    def outstanding(self) -> int:
        """Requests whose output has not been returned yet."""
        return len(self._open)

    @property
    def computing(self) -> bool:
        """Whether a step is running, which `end` waits for."""
        return self._loop.computing

    def describe(self) -> Iterator[str]:
        """Yields lines to print: the effective settings, with the arithmetic behind the KV cache."""
        yield from self.sizing.lines(self.config)
        s = self.settings
        yield f"kernels: {self.kernels.isa}, {self.kernels.threads} threads"
        yield self.profile.line
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
        so_far: RequestSoFar | None = None,
    ) -> str:
        """Queues a request with these prompt tokens; returns its id.

        Only requests with the same `cache_salt` share KV. With `stream` the text is also returned in `Delta`s.
        `so_far`: of a request whose engine died; it is continued, see `Submit`. Raises `InvalidParameterError` for an
        empty prompt, a token outside the vocabulary, a prompt and answer longer than the context or the cache, an id in
        use, or a `so_far` that does not belong to the request.
        """
        self._owner.check()
        self._check_params(params)
        check_integer("priority", priority, -MOST_URGENT, MOST_URGENT)
        id_ = self._free_id(id)
        self._check_kind(prompt)
        max_tokens = self._answer_limit(len(prompt), params)  # before work on a prompt that is too long
        tokens = self._tokens(prompt)
        root = root_hash(str(self.model.path), self.model.network.kv_layout.name, cache_salt, self._key)
        hashes = prompt_hashes(root, tokens) if self.config.enable_prefix_caching else ()
        request = Request(id_, len(tokens), max_tokens, hashes, priority, params.n)
        self._check_fits(request)
        params = params.seeded()
        resumption = None if so_far is None else self._resumer(request, params, stream).resumed(so_far, self._io.now())
        answers = self._answers(request, tokens, params, root)
        if resumption is not None and so_far is not None and so_far.choices:
            request, answers = _open_choices(request, answers, so_far, resumption)
        self._open.add(id_)
        self._io.submit(Submission(request, tokens, params, answers, stream, resumption))
        return id_

    def abort(self, id: str) -> None:
        """Ends a request early; its output has the tokens generated so far. Does nothing if it has ended."""
        if id in self._open:
            self._io.command(Abort(id))

    def abort_all(self) -> None:
        """Ends every request and drops their outputs; the running step stops at its next layer."""
        self.stop_step()
        for id_ in self._open:
            self._io.command(Abort(id_))
        while self._open:
            self.turn()
            if self.scheduler.idle:
                self._open.clear()  # requests lost to an exception have no output

    def stop_step(self) -> None:
        """Cancels the running step at its next layer, without a result. For signal handlers and other threads.

        The reference executor cannot be cancelled; its step continues.
        """
        kernels = self.__dict__.get("kernels")
        if kernels is not None and isinstance(kernels.executor, NativeExecutor):
            kernels.executor.cancel()

    def turn(self) -> list[Event]:
        """Waits for the running step, starts the next one and returns the events of the finished one.

        Does nothing if no request is outstanding.
        """
        self.end()
        return self.begin()

    def end(self) -> None:
        """Waits for the running step, if there is one, and handles its result."""
        self._owner.check()
        self._executor.wait()
        self._loop.poll()

    def begin(self) -> list[Event]:
        """Starts the next step, if there is work; returns the events of finished steps."""
        self._owner.check()
        self._loop.begin()
        return self._take()

    def idle_s(self) -> float | None:
        """How long the caller may wait for input before it calls `begin` again: 0.0 while there is work, None if no
        request is outstanding. A static batch that is not full waits for more requests for a while."""
        if not self._open:
            return None
        wake_ns = self._loop.next_wake_ns
        if wake_ns is None or self._io.has_input:
            return 0.0
        return max(0, wake_ns - self._io.now()) / 1e9

    @property
    def first_tokens(self) -> bool:
        """Whether the step that ended last generated the first token of a streaming answer."""
        return self._io.collector.has_first_token

    def drain_events(self) -> list[Event]:
        """Returns the events of finished steps before the next one begins: text is made now, not while it runs."""
        self._io.catch_up()
        return self._take()

    def _take(self) -> list[Event]:
        collector = self._io.collector
        events, collector.events = collector.events, []
        self._open.difference_update(event.id for event in events if isinstance(event, RequestOutput))
        return events

    def prepare_grammars(self) -> None:
        """Creates what all grammars need, so that the first request with one does not wait. May run in another
        thread."""
        if self._grammars is not None:
            self._grammars.prepare()

    def measured(self) -> Measured:
        """Times and counts of steps and tokens since the start."""
        return self._io.collector.times.meter.measured()

    def take_notes(self) -> list[str]:
        """What a log should say about the steps since the last call, see `PromiseMeter.take_notes`."""
        return self._io.collector.times.meter.promises.take_notes()

    def close(self) -> None:
        """Frees weights, KV cache and threads, and ends the recording; running requests get no output.

        The engine cannot be used afterwards. Does nothing in a forked child, which owns none of it.
        """
        if not self._owner.here:
            return
        if (executor := self.__dict__.pop("_executor", None)) is not None:
            executor.close()
        self._open.clear()
        if (kernels := self.__dict__.get("kernels")) is not None:
            kernels.close()
        for name in ("_loop", "_io"):
            self.__dict__.pop(name, None)
        if self._registration is not None:
            self._registration.close()
        if self._recorder is not None:
            self._recorder.close()

    def _free_id(self, asked: str | None) -> str:
        self._ids += asked is None
        id_ = f"request-{self._ids}" if asked is None else asked
        if not isinstance(id_, str) or not id_ or id_ in self._open:
            raise InvalidParameterError(f"id is {id_!r}; it has to be text that no unfinished request has", "id")
        return id_

    def _answer_limit(self, prompt_tokens: int, params: SamplingParams) -> int:
        """The most tokens of the answer: as requested, which has to fit, or what context and cache have left."""
        limit = params.answer_limit(prompt_tokens, self.sizing.max_model_len)
        room = self.sizing.longest - prompt_tokens
        return limit if params.max_tokens else max(1, params.min_tokens, min(limit, room))

    def _check_kind(self, prompt: Sequence[int]) -> None:
        if isinstance(prompt, (str, bytes, bytearray)) or not hasattr(prompt, "__getitem__"):
            raise InvalidParameterError(f"the prompt is a {type(prompt).__name__}; it has to be token ids", "prompt")
        if len(prompt) == 0:
            raise InvalidParameterError("the prompt is empty; it needs at least one token", "prompt")

    def _tokens(self, prompt: Sequence[int]) -> list[int]:
        """Returns a checked copy, so that the caller may change its prompt."""
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

    def _resumer(self, request: Request, params: SamplingParams, stream: bool) -> Resumer:
        return Resumer(
            id=request.id,
            prompt_tokens=request.prompt_tokens,
            params=params,
            max_tokens=request.max_tokens,
            stop_ids=params.stop_ids(self._vocabulary.eos_ids),
            vocabulary=self._vocabulary.tokens,
            make_stream=lambda: text_stream(self._tokenizer, params),
            streams=stream,
        )

    def _answers(self, request: Request, tokens: list[int], params: SamplingParams, root: bytes) -> list[Answer]:
        """One for each choice."""
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


def _open_choices(
    request: Request, answers: list[Answer], so_far: RequestSoFar, resumption: Resumption
) -> tuple[Request, list[Answer]]:
    """Those that have not ended, with the tokens that they had; a choice that had none before others had some begins
    for itself."""
    open_ = sorted(resumption.begun)
    for index in open_:
        answers[index].resume(so_far.choices[index].token_ids)
    given = tuple(len(so_far.choices[index].token_ids) for index in open_)
    asked = replace(request, choices=max(1, len(open_)), given=given if any(given) else ())
    return asked, [answers[index] for index in open_]
