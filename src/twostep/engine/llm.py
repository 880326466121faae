"""Many prompts at once, from Python: `LLM("smollm2-135m").generate(prompts, params)`."""

from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from twostep.engine.collector import Delta
from twostep.engine.config import EngineConfig
from twostep.engine.engine import Engine
from twostep.engine.outputs import RequestOutput
from twostep.engine.params import SamplingParams
from twostep.engine.progress import RequestProgress
from twostep.errors import InvalidParameterError
from twostep.model.loaded import LoadedModel, open_model
from twostep.store.progress import Progress
from twostep.store.resolve import resolve

Prompt = str | Sequence[int]
"""Text, in which the text of a control token is that token; or token ids."""
Message = Mapping[str, Any]


class LLM:
    """A model and an engine in this process. Not thread-safe. `with` closes it.

        llm = LLM("smollm2-135m", max_num_seqs=16)
        for output in llm.generate(["Once upon a time", "The sea"], SamplingParams(max_tokens=50)):
            print(output.choices[0].text)

    `model`: a name that `twostep models` lists, or the path of a weight file. Other keywords: see `EngineConfig`.
    Raises `TwostepError` for what cannot be loaded or contradicts itself.
    """

    def __init__(self, model: str | Path = "smollm2-135m", **settings: Any) -> None:
        self._engine = Engine(open_model(resolve(str(model), Progress())), EngineConfig(**settings))

    @property
    def model(self) -> LoadedModel:
        """The weight file's network, tokenizer and chat template."""
        return self._engine.model

    @property
    def engine(self) -> Engine:
        """What serves; its counters and settings."""
        return self._engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priorities: Sequence[int] | None = None,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Answers all prompts, several at a time; outputs are in the order of the prompts.

        `params` for all, or one for each; None: the defaults of `SamplingParams`. `progress` shows on standard error
        how far it is. Raises `InvalidParameterError` before anything is computed if one prompt cannot be served.
        """
        several = _several(prompts)
        each = _for_each(SamplingParams() if params is None else params, len(several), "params")
        urgency = _for_each(0 if priorities is None else priorities, len(several), "priorities")
        tokens = [self._encode(prompt) for prompt in several]
        return self._answer_all(tokens, each, urgency, progress)

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """`generate` for conversations in OpenAI's form, [{"role": "user", "content": "..."}], put into the model's
        chat template."""
        template, tokenizer = self.model.template, self.model.tokenizer
        one = len(conversations) > 0 and isinstance(conversations[0], Mapping)
        several: Sequence[Any] = [conversations] if one else conversations
        texts = [template.render(conversation, add_generation_prompt=True) for conversation in several]
        prompts = [tokenizer.encode(text, special=True, add_bos=False) for text in texts]
        return self.generate(prompts, params, progress=progress)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta | RequestOutput]:
        """One answer as it comes, the whole output last. Leaving early aborts it."""
        self._engine.submit(self._encode(prompt), params or SamplingParams(), stream=True)
        try:
            while self._engine.outstanding:
                yield from self._engine.turn()
        finally:
            self._engine.abort_all()

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        id: str | None = None,
        priority: int = 0,
    ) -> None:
        """Takes on a request for `run`. Raises `InvalidParameterError` for what cannot be served."""
        self._engine.submit(prompt_token_ids, params, id=id, priority=priority)

    def run(self) -> Iterator[RequestOutput]:
        """Yields requests as they finish until none is left; others may be submitted meanwhile.

        Leaving early, an exception included, aborts those that are left.
        """
        try:
            while self._engine.outstanding:
                for event in self._engine.turn():
                    if isinstance(event, RequestOutput):
                        yield event
        finally:
            self._engine.abort_all()

    def close(self) -> None:
        """Frees the engine's thread and closes its recording."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _encode(self, prompt: Prompt) -> Sequence[int]:
        if isinstance(prompt, str):
            return self.model.tokenizer.encode(prompt, special=True)
        return prompt

    def _answer_all(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        priorities: Sequence[int],
        progress: bool,
    ) -> list[RequestOutput]:
        try:
            ids = [
                self._engine.submit(prompt, asked, priority=priority)
                for prompt, asked, priority in zip(prompts, params, priorities, strict=True)
            ]
        except BaseException:
            self._engine.abort_all()
            raise
        bar = RequestProgress(len(ids)) if progress else None
        outputs = {}
        for output in self.run():
            outputs[output.id] = output
            if bar:
                bar.finished(output.output_tokens)
        if bar:
            bar.say(bar.summary())
        return [outputs[id_] for id_ in ids]


def _several(prompts: Any) -> list[Prompt]:
    """One prompt is a list of one: text, or token ids."""
    one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], Integral))
    return [prompts] if one else list(prompts)


def _for_each(value: object, count: int, name: str) -> Sequence[Any]:
    """`value` once for each prompt, or the list that it is."""
    if not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise InvalidParameterError(f"{name} has {len(value)} entries for {count} prompts; one or as many are allowed")
    return value
