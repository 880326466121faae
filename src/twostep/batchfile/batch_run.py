"""Answers the lines of a request file concurrently; each answer is written when it is complete."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import time
from typing import Any, Protocol
from uuid import uuid4

from twostep.batchfile.request_lines import BatchLine
from twostep.engine.outputs import RequestOutput
from twostep.engine.params import SamplingParams
from twostep.errors import TwostepError
from twostep.model.loaded import LoadedModel
from twostep.openai_api.api_error import ApiError, refusal
from twostep.openai_api.api_request import ApiRequest, read_request
from twostep.openai_api.response_format import with_field_name
from twostep.openai_api.responses import response_body

MAX_OUTSTANDING = 256
"""Limit of prompts submitted at a time: more than the engine runs in one batch, and few enough for memory."""


class Engine(Protocol):
    """The part of `LLM` that is used here."""

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
        """Submits a request and returns its id. Raises `TwostepError` if it cannot be answered."""
        ...

    def abort(self, id: str) -> None:
        """Ends a request early; `run` still yields it."""
        ...

    def run(self) -> Iterator[RequestOutput]:
        """Yields requests as they finish until none is left; more may be submitted meanwhile."""
        ...

    def close(self) -> None:
        """Stops the engine."""
        ...


@dataclass
class _SubmittedLine:
    """A line whose prompts have been submitted."""

    line: BatchLine
    request: ApiRequest
    outputs: dict[int, RequestOutput] = field(default_factory=dict)
    """By index of the prompt."""


class BatchRun:
    """One run over the lines. Calls `write` with each answer, then `finished` with its number of output tokens."""

    def __init__(
        self,
        engine: Engine,
        names: Sequence[str],
        write: Callable[[Mapping[str, Any]], None],
        finished: Callable[[int], None],
    ) -> None:
        """`names`: names of the model that bodies may use."""
        self._engine = engine
        self._names = names
        self._write = write
        self._finished = finished
        self._submitted: dict[str, tuple[_SubmittedLine, int]] = {}

    def run(self, lines: Iterable[BatchLine]) -> None:
        """Answers all lines, in the order in which they finish."""
        waiting = iter(lines)
        self._fill(waiting)
        for output in self._engine.run():
            self._collect(output)
            self._fill(waiting)

    def _fill(self, waiting: Iterator[BatchLine]) -> None:
        while len(self._submitted) < MAX_OUTSTANDING and (line := next(waiting, None)) is not None:
            try:
                self._start(line)
            except TwostepError as error:
                self._fail(line, refusal(error))

    def _start(self, line: BatchLine) -> None:
        request = read_request(line.url, line.body, self._engine.model, self._names)
        if request.stream:
            raise ApiError("stream is true; it is not supported in a request file", param="stream")
        if request.timeout_s is not None:
            raise ApiError("timeout_s is set; it is not supported in a request file", param="timeout_s")
        started = _SubmittedLine(line, request)
        for prompt, tokens in enumerate(request.prompts):
            id_ = f"{line.number}.{prompt}"
            try:
                self._submit(id_, tokens, request)
            except TwostepError as error:
                self._abort(line, prompt)
                raise with_field_name(error, request.form_field) from None
            self._submitted[id_] = started, prompt

    def _submit(self, id_: str, tokens: Sequence[int], request: ApiRequest) -> None:
        self._engine.submit(tokens, request.params, id=id_, priority=request.priority, cache_salt=request.cache_salt)

    def _abort(self, line: BatchLine, prompts: int) -> None:
        """Aborts the first `prompts` prompts of a line, as a later one was refused."""
        for prompt in range(prompts):
            id_ = f"{line.number}.{prompt}"
            self._engine.abort(id_)
            del self._submitted[id_]

    def _collect(self, output: RequestOutput) -> None:
        if output.id not in self._submitted:
            return
        started, prompt = self._submitted.pop(output.id)
        started.outputs[prompt] = output
        if len(started.outputs) == len(started.request.prompts):
            self._complete(started)

    def _complete(self, done: _SubmittedLine) -> None:
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
