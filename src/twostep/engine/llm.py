"""Many prompts at once, from Python: `LLM("smollm2-135m").generate(prompts, params)`."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import sleep
from types import TracebackType
from typing import Any, Self

from twostep.engine.asked import Prompt, conversations_of, is_conversation, params_of, priorities_of, prompts_of
from twostep.engine.collector import Event
from twostep.engine.config import EngineConfig
from twostep.engine.conversation import Message, read_messages
from twostep.engine.engine import Engine
from twostep.engine.interrupts import Undisturbed
from twostep.engine.outputs import RequestOutput
from twostep.engine.params import SamplingParams
from twostep.engine.progress import RequestProgress
from twostep.errors import InvalidParameterError, TwostepError
from twostep.model.loaded import LoadedModel, open_model
from twostep.store.progress import Progress
from twostep.store.resolve import resolve


class BusyError(TwostepError):
    """Requests are under way that would be mixed up with those of this call."""


class LLM:
    """A model and an engine in this process. For one thread. `with` closes it.

        with LLM("smollm2-135m", max_num_seqs=16) as llm:
            for output in llm.generate(["Once upon a time", "The sea"], SamplingParams(max_tokens=8)):
                print(output.choices[0].text)

    `model`: a name that `twostep models` lists, or the path of a weight file. Other keywords: see `EngineConfig`.
    Raises `TwostepError` for what cannot be loaded, `InvalidParameterError` for settings that are unknown, out of range
    or contradict themselves.

    Ctrl-C ends a call and the step that it waits for; its requests are aborted, and the next call is served as usual.
    """

    def __init__(self, model: str | Path = "smollm2-135m", **settings: Any) -> None:
        config = EngineConfig.of(settings)
        self._engine = Engine(open_model(resolve(str(model), Progress())), config)
        self._undisturbed = Undisturbed(hurry=self._engine.stop_step)
        self._closed = False

    @property
    def model(self) -> LoadedModel:
        """The weight file's network, tokenizer and chat template."""
        return self._engine.model

    @property
    def engine(self) -> Engine:
        """What serves; its counters and settings."""
        return self._engine

    # --- all at once ----------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priorities: int | Sequence[int] = 0,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Answers all prompts, several at a time; outputs are in the order of the prompts.

            names = llm.generate(["Paris is in", "Rome is in"], SamplingParams(temperature=0, max_tokens=3))
            assert [len(output.choices) for output in names] == [1, 1]

        A prompt is text, in which the text of a control token is that token, or token ids. `params` and `priorities`
        (a lower number is more urgent) are for all, or one for each; None: the defaults of `SamplingParams`. `progress`
        shows on standard error how far it is. Raises `InvalidParameterError` before anything is computed if one prompt
        cannot be served, `BusyError` while other requests are under way.
        """
        several = prompts_of(prompts)
        each, urgency = params_of(params, len(several)), priorities_of(priorities, len(several))
        tokens = [self._encode(prompt) for prompt in several]
        with self._alone():
            ids = self._submit_all(tokens, each, urgency)
            return self._outputs(ids, RequestProgress(len(ids)) if progress and ids else None)

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priorities: int | Sequence[int] = 0,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """`generate` for one conversation or many in OpenAI's form, put into the model's chat template.

            [reply] = llm.chat([{"role": "user", "content": "Say yes."}], SamplingParams(max_tokens=8))
            assert reply.choices[0].text

        A message has one of OpenAI's roles and content: a string, or text parts, which line ends join.

        Raises as `generate` does, also where the template refuses the messages.
        """
        talks = conversations_of(conversations)
        prompts = []
        for i, messages in enumerate(talks):
            with _naming("conversations", i, len(talks)):
                prompts.append(self._render(messages))
        return self.generate(prompts, params, priorities=priorities, progress=progress)

    # --- one as it comes ------------------------------------------------------------------------------------------

    def stream(
        self, prompt: Prompt | Sequence[Message], params: SamplingParams | None = None, *, priority: int = 0
    ) -> Generator[Event, None, None]:
        """One answer as it comes, in `Delta`s, the whole output last. Leaving early, or `close`, aborts it.

        `prompt` may be a conversation, as for `chat`.

            for event in llm.stream("Once upon a time", SamplingParams(max_tokens=8)):
                if isinstance(event, Delta):
                    print(event.text, end="", flush=True)

        Raises as `generate` does, at once.
        """
        [asked], [urgency] = params_of(params, 1), priorities_of(priority, 1)
        events = self._stream(self._one(prompt), asked, urgency)
        next(events)
        return (event for event in events if event is not None)

    # --- requests that come and go --------------------------------------------------------------------------------

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> str:
        """Takes on a request for `run`, also while that is under way; returns its id.

        Only requests of the same `cache_salt` find each other's KV in the prefix cache.

        Raises `InvalidParameterError` for what cannot be served.
        """
        self._check_open()
        with self._undisturbed:
            return self._engine.submit(prompt_token_ids, params, id=id, priority=priority, cache_salt=cache_salt)

    def abort(self, id: str) -> None:
        """Ends a submitted request early: `run` yields it with what it has. Nothing happens if it has ended."""
        with self._undisturbed:
            self._engine.abort(id)

    def run(self) -> Iterator[RequestOutput]:
        """Yields submitted requests as they finish until none is left; others may be submitted meanwhile.

        Leaving early, an exception included, aborts those that are left.
        """
        with self._aborting():
            for event in self._serve():
                if isinstance(event, RequestOutput):
                    yield event

    def close(self) -> None:
        """Frees the engine's thread and closes its recording. Nothing can be asked any more."""
        self._closed = True
        self._engine.close()

    def __repr__(self) -> str:
        settings = self._engine.settings
        name = self.model.path.name
        return f"LLM({name!r}, max_num_seqs={settings.seats}, max_model_len={settings.context_tokens})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # --- inside ---------------------------------------------------------------------------------------------------

    @contextmanager
    def _aborting(self) -> Iterator[None]:
        """However it is left, nothing stays under way."""
        try:
            yield
        finally:
            with self._undisturbed:
                self._engine.abort_all()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """The same, for requests that are submitted within. Raises `BusyError` if there are others."""
        self._check_open()
        if count := self._engine.outstanding:
            raise BusyError(f"requests under way: {count}; `run`, or an unfinished `stream`, has to end first")
        with self._aborting():
            yield

    def _check_open(self) -> None:
        if self._closed:
            raise TwostepError("this LLM is closed")

    def _serve(self) -> Iterator[Event]:
        """Events until nothing is outstanding."""
        while self._engine.outstanding:
            with self._undisturbed:
                self._engine.end()
            with self._undisturbed:  # apart, so that who comes while a step ends need not wait for the next one
                events = self._engine.begin()
            yield from events
            sleep(self._engine.idle_s() or 0)  # a static batch that is not full waits for others

    def _stream(self, prompt: Sequence[int], params: SamplingParams, priority: int) -> Iterator[Event | None]:
        """First comes None: the request is taken on, and leaving aborts it from then on."""
        with self._alone():
            with self._undisturbed:
                self._engine.submit(prompt, params, priority=priority, stream=True)
            yield None
            yield from self._serve()

    def _submit_all(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], priorities: Sequence[int]
    ) -> list[str]:
        """Raises `InvalidParameterError` that says which prompt cannot be served."""
        ids: list[str] = []
        with self._undisturbed:
            for prompt, asked, priority in zip(prompts, params, priorities, strict=True):
                with _naming("prompts", len(ids), len(prompts)):
                    ids.append(self._engine.submit(prompt, asked, priority=priority))
        return ids

    def _outputs(self, ids: Sequence[str], progress: RequestProgress | None) -> list[RequestOutput]:
        """In the order of `ids`, when all have come."""
        outputs = {}
        try:
            for output in self.run():
                outputs[output.id] = output
                if progress:
                    progress.finished(output.output_tokens)
        finally:
            if progress:
                progress.say(progress.summary())
        return [outputs[id_] for id_ in ids]

    def _one(self, prompt: Prompt | Sequence[Message]) -> Sequence[int]:
        if is_conversation(prompt):
            return self._render(read_messages(prompt, "prompt"))
        [one] = prompts_of([prompt])
        return self._encode(one)

    def _encode(self, prompt: Prompt) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt
        self._check_text()
        return self.model.tokenizer.encode(prompt, special=True)

    def _render(self, messages: Sequence[Message]) -> Sequence[int]:
        """The template writes the beginning-of-sequence token itself, if there is one."""
        self._check_text()
        text = self.model.template.render(messages, add_generation_prompt=True)
        return self.model.tokenizer.encode(text, special=True, add_bos=False)

    def _check_text(self) -> None:
        if self._engine.config.skip_tokenizer_init:
            problem = "a prompt is text, and skip_tokenizer_init leaves the tokenizer out; give token ids"
            raise InvalidParameterError(problem, "prompts")


@contextmanager
def _naming(name: str, index: int, count: int) -> Iterator[None]:
    """An error within is about this member of a list, which goes without saying of the only one."""
    try:
        yield
    except InvalidParameterError as error:
        which = f"{name}[{index}]: " if count > 1 else ""
        raise type(error)(f"{which}{error}", error.param) from None
