"""An engine without a model's weights: it answers each prompt with a fixed text, the latest submitted first."""

from collections.abc import Iterator, Sequence

from twostep.engine.outputs import ChoiceOutput, RequestOutput, Timeline
from twostep.engine.params import SamplingParams
from twostep.errors import InvalidParameterError
from twostep.model.loaded import LoadedModel

ANSWER = "Fine, thanks."


class FakeEngine:
    def __init__(self, model: LoadedModel, context: int = 1000, stop_after: int | None = None) -> None:
        """`stop_after` requests somebody presses Ctrl-C."""
        self.model = model
        self.submitted: list[str] = []
        self.params: list[SamplingParams] = []
        self.salts: list[str] = []
        self.aborted: list[str] = []
        self.closed = False
        self.most_waiting = 0
        self._context = context
        self._stop_after = stop_after
        self._waiting: list[RequestOutput] = []

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> str:
        if id is None or id in self.submitted:
            raise InvalidParameterError(f"id is {id!r}; it has to be new")
        limit = params.answer_limit(len(prompt_token_ids), self._context)
        tokens = self.model.tokenizer.encode(ANSWER, special=False)[:limit]
        timeline = Timeline(0, 1_000_000, (), tuple(range(2_000_000, 2_000_000 + len(tokens))))
        reason = "error" if params.seed == 13 else "stop"
        text = self.model.tokenizer.decode(tokens)
        choices = tuple(
            ChoiceOutput(index, text, tokens, reason, timeline, error="bad luck" if params.seed == 13 else None)
            for index in range(params.n)
        )
        self.submitted.append(id)
        self.params.append(params)
        self.salts.append(cache_salt)
        self._waiting.append(RequestOutput(id, prompt_token_ids, choices, cached_tokens=3))
        self.most_waiting = max(self.most_waiting, len(self._waiting))
        return id

    def abort(self, id: str) -> None:
        self.aborted.append(id)

    def close(self) -> None:
        self.closed = True

    def run(self) -> Iterator[RequestOutput]:
        done = 0
        while self._waiting:
            if done == self._stop_after:
                raise KeyboardInterrupt
            done += 1
            yield self._waiting.pop()
