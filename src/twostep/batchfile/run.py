"""Answers the lines of a file of requests: as many at once as the engine can use, each line when it is done."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import time
from typing import Any, Protocol
from uuid import uuid4

from twostep.batchfile.lines import BatchLine
from twostep.engine.outputs import RequestOutput
from twostep.engine.params import SamplingParams
from twostep.errors import TwostepError
from twostep.model.loaded import LoadedModel
from twostep.openai_api.errors import ApiError, refusal
from twostep.openai_api.requests import ApiRequest, read_request
from twostep.openai_api.responses import response_body
from twostep.openai_api.structured import named

MAX_OUTSTANDING = 256
"""Prompts that the engine holds at a time: more than it runs together, few enough for memory."""


class Engine(Protocol):
    """What is needed of `LLM`."""

    @property
    def model(self) -> LoadedModel: ...

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> str:
        """Takes a request on and returns its id. Raises `TwostepError` for what cannot be answered."""
        ...

    def abort(self, id: str) -> None:
        """Ends a request early; `run` yields it all the same."""
        ...

    def run(self) -> Iterator[RequestOutput]:
        """Yields requests as they finish until none is left; others may be submitted meanwhile."""
        ...

    def close(self) -> None:
        """Nothing is asked of it any more."""
        ...


@dataclass
class _Open:
    """A line whose prompts are being answered."""

    line: BatchLine
    request: ApiRequest
    outputs: dict[int, RequestOutput] = field(default_factory=dict)
    """By prompt."""


class BatchRun:
    """One run over lines. `write` gets each answer, `finished` after it the number of its output tokens."""

    def __init__(
        self,
        engine: Engine,
        names: Sequence[str],
        write: Callable[[Mapping[str, Any]], None],
        finished: Callable[[int], None],
    ) -> None:
        """`names` are those of the model that bodies may ask for."""
        self._engine = engine
        self._names = names
        self._write = write
        self._finished = finished
        self._open: dict[str, tuple[_Open, int]] = {}

    def run(self, lines: Iterable[BatchLine]) -> None:
        """Answers all lines, in the order in which they finish."""
        waiting = iter(lines)
        self._fill(waiting)
        for output in self._engine.run():
            self._collect(output)
            self._fill(waiting)

    def _fill(self, waiting: Iterator[BatchLine]) -> None:
        while len(self._open) < MAX_OUTSTANDING and (line := next(waiting, None)) is not None:
            try:
                self._start(line)
            except TwostepError as error:
                self._fail(line, refusal(error))

    def _start(self, line: BatchLine) -> None:
        request = read_request(line.url, line.body, self._engine.model, self._names)
        if request.stream:
            raise ApiError("stream is true; answers in a file are not streamed", param="stream")
        if request.timeout_s is not None:
            raise ApiError("timeout_s is given; answers in a file take the time they need", param="timeout_s")
        started = _Open(line, request)
        for prompt, tokens in enumerate(request.prompts):
            id_ = f"{line.number}.{prompt}"
            try:
                self._submit(id_, tokens, request)
            except TwostepError as error:
                self._give_up(line, prompt)
                raise named(error, request.form_field) from None
            self._open[id_] = started, prompt

    def _submit(self, id_: str, tokens: Sequence[int], asked: ApiRequest) -> None:
        self._engine.submit(tokens, asked.params, id=id_, priority=asked.priority, cache_salt=asked.cache_salt)

    def _give_up(self, line: BatchLine, prompts: int) -> None:
        """One prompt of a line is refused, so that the `prompts` before it are asked in vain."""
        for prompt in range(prompts):
            id_ = f"{line.number}.{prompt}"
            self._engine.abort(id_)
            del self._open[id_]

    def _collect(self, output: RequestOutput) -> None:
        if output.id not in self._open:
            return
        started, prompt = self._open.pop(output.id)
        started.outputs[prompt] = output
        if len(started.outputs) == len(started.request.prompts):
            self._complete(started)

    def _complete(self, done: _Open) -> None:
        outputs = [done.outputs[prompt] for prompt in range(len(done.outputs))]
        unique = uuid4().hex
        try:
            body = response_body(
                done.request, outputs, self._engine.model.tokenizer, unique=unique, created_s=int(time())
            )
        except ApiError as error:
            self._fail(done.line, error)
        else:
            self._answer(done.line, 200, body, unique, sum(output.output_tokens for output in outputs))

    def _fail(self, line: BatchLine, error: ApiError) -> None:
        self._answer(line, error.status, error.body(), uuid4().hex, tokens=0)

    def _answer(self, line: BatchLine, status: int, body: Mapping[str, Any], unique: str, tokens: int) -> None:
        response = {"status_code": status, "request_id": f"req_{unique}", "body": body}
        self._write({"id": f"batch_req_{unique}", "custom_id": line.custom_id, "response": response, "error": None})
        self._finished(tokens)
