"""`/v1/chat/completions` and `/v1/completions`: from a request's body to the last byte of its reply."""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from time import monotonic_ns, time
from uuid import uuid4

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from twostep.engine.backend import Accepted, Submit
from twostep.engine.outputs import Event, RequestOutput
from twostep.errors import EngineDiedError, TwostepError
from twostep.openai_api.api_request import ApiRequest, read_request
from twostep.openai_api.response_format import with_field_name
from twostep.openai_api.responses import ID_PREFIX, Chunks, sliced_body
from twostep.server.http.connections import ABORT
from twostep.server.http.error_replies import RECORDED, api_error
from twostep.server.http.in_flight import Admission, ClientGoneError, InFlightRequest
from twostep.server.http.replies import EventStream, Sender, WholeReply
from twostep.server.http.request_body import Body, parse
from twostep.server.observe.finished_requests import LEFT, Reply
from twostep.server.state import ServerState


class Completions:
    """The ASGI application of both paths."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises `TwostepError` if the request fails before anything is sent."""
        state = self._state
        state.check_accepting()
        with suppress(ClientGoneError):
            async with state.bodies.read(Request(scope, receive)) as body:
                exchange = Exchange(state, scope, send)
                async with exchange.recorded():
                    await self._run(exchange, body, receive)

    async def _run(self, exchange: "Exchange", body: Body, receive: Receive) -> None:
        """Leaves the queue before the client is told of an error, as it may not read the reply."""
        state = self._state
        with state.admission_queue.admit() as admission:
            async with state.in_flight.track(receive, state.config.request_timeout_s) as in_flight:
                await exchange.run(body, admission, in_flight)


class Exchange:
    """One request for tokens whose body has arrived, and its reply."""

    def __init__(self, state: ServerState, scope: Scope, send: Send) -> None:
        self._state, self._scope, self._send = state, scope, send
        self._path: str = scope["path"]
        self._received_ns = monotonic_ns()
        self._arrived_s, self._unique = time(), uuid4().hex
        self._served = state.models[0]
        """The model that the body names, once the body is parsed."""
        self._failed = False
        """The backend's worker failed: no more outputs of this request arrive."""
        self._form_ns: int | None = None
        self._submitted: _Submitted | None = None

    async def run(self, body: Body, admission: Admission, in_flight: InFlightRequest) -> None:
        """Parses the body, submits its prompts to the engine and sends the reply."""
        request = await body.parsed(self._parse)
        in_flight.limit(request.timeout_s)
        await self._check_structured_output(request)
        admission.resize(len(request.prompts) * request.params.n)
        self._state.note_unknown(request.unknown)
        submits = self._submits(request)
        self._served.available()  # again, as the body may have taken long
        self._submitted = _Submitted(request, [submit.id for submit in submits], self._sender(request), monotonic_ns())
        async with self._submitted.sender.kept_alive(), aclosing(self._events(submits)) as events:
            async for event in events:
                await self._submitted.handle(event)
        await self._submitted.sender.end(self._submitted.ordered_outputs)

    @asynccontextmanager
    async def recorded(self) -> AsyncIterator[None]:
        """However the block ends, tells the client, and records the request if it was submitted to the engine."""
        try:
            yield
            self._record(200)
        except ClientGoneError:
            self._record(LEFT)
            raise
        except TwostepError as error:
            self._failed = isinstance(error, EngineDiedError)
            if self._submitted is not None:
                error = with_field_name(error, self._submitted.request.form_field)
            failure = api_error(error)
            begun = self._submitted is not None and await self._submitted.sender.fail(failure)
            self._record(failure.status)
            if not begun:
                raise failure from None

    def _parse(self, body: bytearray) -> ApiRequest:
        """Runs in a thread: tokenizing a long prompt takes long."""
        state = self._state
        fields = parse(body)
        self._served = state.named(fields.get("model") if isinstance(fields, dict) else None)
        return read_request(self._path, fields, self._served.model, state.names, self._served.prompt_bounds)

    async def _check_structured_output(self, request: ApiRequest) -> None:
        """A new form takes as long as many a prompt, so the latency breakdown has a line for it."""
        form = request.params.structured
        self._form_ns = None if form is None else monotonic_ns()
        await self._state.structured_outputs.check(form, request.form_field)

    def _submits(self, request: ApiRequest) -> list[Submit]:
        id_ = self._id(request)
        several = len(request.prompts) > 1
        fields = request.params, request.priority, request.stream, request.cache_salt
        return [
            Submit(f"{id_}-{number}" if several else id_, prompt, *fields)
            for number, prompt in enumerate(request.prompts)
        ]

    def _events(self, submits: Sequence[Submit]) -> AsyncGenerator[Event | Accepted]:
        return self._served.backend.submit(submits, on_late_output=self._state.finished.add_late_output)

    def _sender(self, request: ApiRequest) -> Sender:
        tokenizer, unique = self._served.model.tokenizer, self._unique
        created_s, received_ns = int(self._arrived_s), self._received_ns
        if request.stream:
            chunks = Chunks(request, tokenizer, unique=unique, created_s=created_s, received_ns=received_ns)
            return EventStream(self._send, self._id(request), chunks, self._scope["state"][ABORT])
        body = partial(
            sliced_body,
            request,
            tokenizer=tokenizer,
            unique=unique,
            created_s=created_s,
            received_ns=received_ns,
        )
        return WholeReply(self._send, self._id(request), self._state.slices, body)

    def _id(self, request: ApiRequest) -> str:
        """The id in the reply."""
        return ID_PREFIX[request.kind] + self._unique

    def _record(self, status: int) -> None:
        """Records the reply; a refused request is not recorded."""
        submitted = self._submitted
        if submitted is None or (400 <= status < 500 and status != LEFT):
            return
        reply = Reply(
            id=self._id(submitted.request),
            endpoint=self._path,
            model=submitted.request.model,
            stream=submitted.request.stream,
            arrived_s=self._arrived_s,
            received_ns=self._received_ns,
            submitted_ns=submitted.at_ns,
            sent_ns=monotonic_ns(),
            status=status,
            outputs=tuple(submitted.outputs.values()),
            prompt_ids=tuple(submitted.ids),
            awaited=() if self._failed else submitted.awaited,
            cache_salt=submitted.request.cache_salt,
            form_ns=self._form_ns,
        )
        self._scope[RECORDED] = True
        self._state.finished.add(reply)


@dataclass
class _Submitted:
    """A request's prompts at the engine, and their outputs so far."""

    request: ApiRequest
    ids: Sequence[str]
    """The engine's ids, one per prompt."""
    sender: Sender
    at_ns: int
    outputs: dict[str, RequestOutput] = field(default_factory=dict)
    accepted: int = 0
    """Number of prompts that the engine accepted; it reports this only for streams."""

    @property
    def ordered_outputs(self) -> list[RequestOutput]:
        """Outputs of all prompts, in order."""
        return [self.outputs[id_] for id_ in self.ids]

    @property
    def awaited(self) -> tuple[str, ...]:
        return tuple(id_ for id_ in self.ids if id_ not in self.outputs)

    async def handle(self, event: Event | Accepted) -> None:
        if isinstance(event, Accepted):
            self.accepted += 1
            if self.accepted == len(self.ids):
                self.sender.accepted()
            return
        if isinstance(event, RequestOutput):
            self.outputs[event.id] = event
        await self.sender.event(self.ids.index(event.id), event)
