"""Many prompts at once, from Python: `LLM("smollm2-135m").generate(prompts, params)`."""

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from numbers import Integral
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any, Self, TypeGuard

import numpy as np

from twostep.config.configs import EngineConfig
from twostep.engine.engine import Engine
from twostep.engine.outputs import Event, RequestOutput
from twostep.engine.params import SamplingParams
from twostep.engine.refusals import refused
from twostep.engine.request_progress import RequestProgress
from twostep.engine.shared_engine import Call, SharedEngine
from twostep.engine.text.conversation import Message, read_messages
from twostep.errors import InvalidParameterError, TwostepError
from twostep.kernels.sampling import check_integer
from twostep.model.loaded import LoadedModel, open_model
from twostep.store.resolve import resolve
from twostep.store.wheel_download import FetchProgress

Prompt = str | Sequence[int]
"""Text, in which the text of a control token is that token; or token ids."""

SUBMITTED_AT_ONCE = 64
"""Prompts of one call that are queued in one turn, before other threads get theirs."""


class BusyError(TwostepError):
    """Another `run` has not ended; it yields all outputs."""


class LLM:
    """A model and an engine in this process. `with` closes it.

        with LLM("smollm2-135m", max_num_seqs=16) as llm:
            for output in llm.generate(["Once upon a time", "The sea"], SamplingParams(max_tokens=8)):
                print(output.choices[0].text)

    `model`: a name that `twostep models` lists, or the path of a weight file. Other keywords: see `EngineConfig`;
    `preset` sets defaults for a kind of traffic.
    Raises `TwostepError` for what cannot be loaded, `InvalidParameterError` for settings that are unknown, out of range
    or contradict themselves.

    Several threads may use it at once: their requests are served together, in the same steps, and each call gets its
    own outputs and errors. Only `run` is for one thread at a time.

    Ctrl-C ends a call and the step that it waits for; its requests are aborted, those of other threads go on, and the
    next call is served as usual.

    It belongs to the process that made it. In a forked child every call raises `ForkedError`: make another `LLM` there,
    or start children with the `multiprocessing` method "spawn".
    """

    def __init__(self, model: str | Path = "smollm2-135m", **settings: Any) -> None:
        config = EngineConfig(**settings)
        self._engine = Engine(open_model(resolve(str(model), FetchProgress())), config)
        self._shared = SharedEngine(self._engine)
        self._submitted = Call()
        self._running = Lock()

    @property
    def model(self) -> LoadedModel:
        """The weight file's network, tokenizer and chat template."""
        return self._engine.model

    @property
    def engine(self) -> Engine:
        """The engine, with its counters and settings."""
        return self._engine

    # --- all at once ----------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priorities: int | Sequence[int] = 0,
        progress: bool = True,
        parse_special: bool = True,
    ) -> list[RequestOutput]:
        """Answers all prompts, several at a time; outputs are in the order of the prompts.

            names = llm.generate(["Paris is in", "Rome is in"], SamplingParams(temperature=0, max_tokens=3))
            assert [len(output.choices) for output in names] == [1, 1]

        A prompt is text, in which the text of a control token is that token if `parse_special`, or token ids. `params`
        and `priorities` (a lower number is more urgent) are for all, or one for each; None: the defaults of
        `SamplingParams`. `progress` shows on standard error how far it is. Raises `InvalidParameterError` if one prompt
        cannot be served; the others are not served either.
        """
        self._shared.check()
        several = prompts_of(prompts)
        each, each_priority = params_of(params, len(several)), priorities_of(priorities, len(several))
        tokens = [self._encode(prompt, parse_special) for prompt in several]
        with self._call() as call:
            ids = self._submit_all(call, tokens, each, each_priority)
            return self._outputs(call, ids, RequestProgress(len(ids)) if progress and ids else None)

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priorities: int | Sequence[int] = 0,
        progress: bool = True,
        parse_special: bool = False,
    ) -> list[RequestOutput]:
        """`generate` for one conversation or many in OpenAI's form, put into the model's chat template.

            [reply] = llm.chat([{"role": "user", "content": "Say yes."}], SamplingParams(max_tokens=8))
            assert reply.choices[0].text

        A message has one of OpenAI's roles and content: a string, or text parts, which line ends join. The text of a
        control token in a message is text, unless `parse_special`: only the template begins and ends turns.

        Raises as `generate` does, also where the template refuses the messages or leaves one of them out.
        """
        self._shared.check()
        talks = conversations_of(conversations)
        prompts = []
        for i, messages in enumerate(talks):
            with _naming("conversations", i, len(talks)):
                prompts.append(self._render(messages, parse_special))
        return self.generate(prompts, params, priorities=priorities, progress=progress)

    # --- streaming ------------------------------------------------------------------------------------------------

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        parse_special: bool | None = None,
    ) -> Generator[Event, None, None]:
        """Streams one answer: yields `Delta`s, then the whole output. Leaving early, or `close`, aborts it.

        `prompt` may be a conversation, as for `chat`. `parse_special` None: the default of `generate` or `chat`.

            for event in llm.stream("Once upon a time", SamplingParams(max_tokens=8)):
                if isinstance(event, Delta):
                    print(event.text, end="", flush=True)

        Raises as `generate` does, when it is called.
        """
        self._shared.check()
        [own_params], [own_priority] = params_of(params, 1), priorities_of(priority, 1)
        events = self._stream(self._one(prompt, parse_special), own_params, own_priority)
        next(events)
        return (event for event in events if event is not None)

    # --- a queue of requests -------------------------------------------------------------------------------------

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> str:
        """Queues a request for `run`, from any thread and also while `run` is active; returns its id.

        Only requests with the same `cache_salt` share KV in the prefix cache.

        Raises `InvalidParameterError` for a request that cannot be served.
        """
        with self._shared.turn():
            return self._shared.submit(
                self._submitted, prompt_token_ids, params, id=id, priority=priority, cache_salt=cache_salt
            )

    def abort(self, id: str) -> None:
        """Ends a submitted request early: `run` yields what was generated. Does nothing if it has ended."""
        self._shared.abort(id)

    def run(self) -> Iterator[RequestOutput]:
        """Yields the outputs of submitted requests as they finish, until none is left. More may be submitted meanwhile.

        Leaving early, also by an exception, aborts the rest. Raises `BusyError` while another `run` is active in any
        thread.
        """
        if not self._running.acquire(blocking=False):
            raise BusyError("another `run` has not ended; it yields all that is submitted")
        try:
            self._shared.check()
            for event in self._shared.events(self._submitted):
                if isinstance(event, RequestOutput):
                    yield event
        finally:
            self._shared.leave(self._submitted)
            self._running.release()

    def close(self) -> None:
        """Frees the engine at once: memory, threads, the template's process, the recording.

        Later calls, and running calls of other threads, raise `TwostepError`. Does nothing in a forked child.
        """
        self._shared.close()
        self.model.close()

    def __repr__(self) -> str:
        settings = self._engine.settings
        name = self.model.path.name
        return f"LLM({name!r}, max_num_seqs={settings.max_num_seqs}, max_model_len={settings.max_model_len})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # --- inside ---------------------------------------------------------------------------------------------------

    @contextmanager
    def _call(self) -> Iterator[Call]:
        """A call whose requests are aborted however the block ends."""
        call = Call()
        try:
            yield call
        finally:
            self._shared.leave(call)

    def _stream(self, prompt: Sequence[int], params: SamplingParams, priority: int) -> Iterator[Event | None]:
        """Yields None first, when the request is queued; leaving aborts it from then on."""
        with self._call() as call:
            with self._shared.turn():
                self._shared.submit(call, prompt, params, priority=priority, stream=True)
            yield None
            yield from self._shared.events(call)

    def _submit_all(
        self,
        call: Call,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        priorities: Sequence[int],
    ) -> list[str]:
        """Raises `InvalidParameterError` that says which prompt cannot be served."""
        ids: list[str] = []
        each = zip(prompts, params, priorities, strict=True)
        while len(ids) < len(prompts):
            with self._shared.turn():
                for prompt, own_params, priority in islice(each, SUBMITTED_AT_ONCE):
                    with _naming("prompts", len(ids), len(prompts)):
                        ids.append(self._shared.submit(call, prompt, own_params, priority=priority))
        return ids

    def _outputs(self, call: Call, ids: Sequence[str], progress: RequestProgress | None) -> list[RequestOutput]:
        """Waits for all outputs; returns them in the order of `ids`."""
        outputs = {}
        try:
            for output in self._shared.events(call):
                if isinstance(output, RequestOutput):
                    outputs[output.id] = output
                    if progress:
                        progress.finished(output.output_tokens)
        finally:
            if progress:
                progress.say(progress.summary())
        return [outputs[id_] for id_ in ids]

    def _one(self, prompt: Prompt | Sequence[Message], parse_special: bool | None) -> Sequence[int]:
        if is_conversation(prompt):
            return self._render(read_messages(prompt, "prompt"), parse_special=parse_special is True)
        [one] = prompts_of([prompt])
        return self._encode(one, parse_special=parse_special is not False)

    def _encode(self, prompt: Prompt, parse_special: bool) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt
        self._check_text()
        return self.model.tokenizer.encode_raw(prompt, parse_special=parse_special)

    def _render(self, messages: Sequence[Message], parse_special: bool) -> Sequence[int]:
        """The template writes the beginning-of-sequence token itself, if there is one."""
        self._check_text()
        prompt = self.model.template.render(messages, add_generation_prompt=True)
        given = [] if parse_special else prompt.given
        return self.model.tokenizer.encode_given(prompt.text, given, add_bos=False)

    def _check_text(self) -> None:
        if self._engine.config.skip_tokenizer_init:
            problem = "a prompt is text, and skip_tokenizer_init leaves the tokenizer out; give token ids"
            raise InvalidParameterError(problem, "prompts")


@contextmanager
def _naming(name: str, index: int, count: int) -> Iterator[None]:
    """Adds to errors within which member of a list they are about, unless it is the only one."""
    try:
        yield
    except InvalidParameterError as error:
        which = f"{name}[{index}]: " if count > 1 else ""
        raise type(error)(f"{which}{error}", error.param) from None


def prompts_of(prompts: object) -> list[Prompt]:
    """Returns one prompt or any iterable of them, arrays of token ids included, as a list. Raises
    `InvalidParameterError`."""
    values = _listed(prompts)
    if isinstance(values, str) or (_is_tokens(values) and values):
        return [values]
    if not isinstance(values, Iterable) or isinstance(values, bytes | Mapping):
        raise refused("prompts", values, "text, token ids, or a list of these")
    return [_prompt(f"prompts[{i}]", _listed(prompt)) for i, prompt in enumerate(values)]


def params_of(params: object, count: int) -> list[SamplingParams]:
    """Parameters of each of `count` prompts; None: the defaults. Raises `InvalidParameterError`."""
    each = _for_each(SamplingParams() if params is None else params, count, "params")
    for one in each:
        if not isinstance(one, SamplingParams):
            raise refused("params", one, "SamplingParams, or a list of as many as prompts")
    return each


def priorities_of(priorities: object, count: int) -> list[int]:
    """Priorities of each of `count` prompts. Raises `InvalidParameterError`."""
    each = _for_each(priorities, count, "priorities")
    for priority in each:
        check_integer("a priority", priority, -(2**31), 2**31 - 1, param="priorities")
    return each


def conversations_of(conversations: object) -> list[list[dict[str, Any]]]:
    """One conversation, or a list of them, as chat templates read them. Raises `InvalidParameterError`."""
    name = "conversations"
    if not isinstance(conversations, Sequence) or isinstance(conversations, str | bytes):
        raise refused(name, conversations, "a list of messages, or a list of such lists")
    if is_conversation(conversations):
        return [read_messages(conversations, name)]
    return [read_messages(messages, f"{name}[{i}]") for i, messages in enumerate(conversations)]


def is_conversation(value: object) -> TypeGuard[Sequence[Message]]:
    """Whether it looks like one; `read_messages` checks the messages."""
    return isinstance(value, Sequence) and len(value) > 0 and isinstance(value[0], Mapping)


def _listed(value: object) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def _prompt(name: str, prompt: object) -> Prompt:
    if isinstance(prompt, str) or _is_tokens(prompt):
        return prompt
    raise refused(name, prompt, "text or a list of token ids")


def _is_tokens(value: object) -> TypeGuard[Sequence[int]]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        return False
    return all(isinstance(id_, Integral) and not isinstance(id_, bool) for id_ in value)


def _for_each(value: object, count: int, name: str) -> list[Any]:
    """`value` as a list with one entry for each prompt."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return [value] * count
    if len(value) != count:
        problem = f"{name} has {len(value)} entries for {count} prompts; one or as many are allowed"
        raise InvalidParameterError(problem, name)
    return list(value)
