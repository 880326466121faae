"""`/v1/chat/completions` and `/v1/completions`: a request's way from its body to its last byte."""

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
from twostep.openai_api.chunks import Chunks
from twostep.openai_api.requests import ApiRequest, read_request
from twostep.openai_api.responses import ID_PREFIX, sliced_body
from twostep.openai_api.structured import named
from twostep.server.http.admission_queue import Place
from twostep.server.http.bodies import Body, parse
from twostep.server.http.connections import ABORT
from twostep.server.http.errors import IN_LEDGER, api_error
from twostep.server.http.in_flight import ClientGoneError, Flight
from twostep.server.http.streaming import EventStream, Sender, WholeReply
from twostep.server.observe.finished import LEFT, Reply
from twostep.server.state import ServerState


class Completions:
    """An ASGI application for both paths."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises `TwostepError` if the request fails before anything was sent."""
        state = self._state
        state.check_accepting()
        with suppress(ClientGoneError):
            async with state.bodies.read(Request(scope, receive)) as body:
                exchange = Exchange(state, scope, send)
                async with exchange.accounted():
                    await self._run(exchange, body, receive)

    async def _run(self, exchange: "Exchange", body: Body, receive: Receive) -> None:
        """With a place, which is free again before the client is told of an error: it may not listen."""
        state = self._state
        with state.places.take() as place:
            async with state.flights.one(receive, state.config.request_timeout_s) as flight:
                await exchange.run(body, place, flight)


class Exchange:
    """One request for tokens whose body is here."""

    def __init__(self, state: ServerState, scope: Scope, send: Send) -> None:
        self._state, self._scope, self._send = state, scope, send
        self._path: str = scope["path"]
        self._received_ns = monotonic_ns()
        self._arrived_s, self._unique = time(), uuid4().hex
        self._served = state.models[0]
        """The one that the body names, once it is known."""
        self._failed = False
        """The part of the backend that served it failed: no output of it arrives any more."""
        self._form_ns: int | None = None
        self._submitted: _Submitted | None = None

    async def run(self, body: Body, place: Place, flight: Flight) -> None:
        """Understands the body, has it answered and sends the reply."""
        request = await body.understood(self._understand)
        flight.limit(request.timeout_s)
        await self._check_form(request)
        place.widen(len(request.prompts) * request.params.n)
        self._state.note_unknown(request.unknown)
        submits = self._submits(request)
        self._served.available()  # again: the body may have taken long
        self._submitted = _Submitted(request, [submit.id for submit in submits], self._sender(request), monotonic_ns())
        async with self._submitted.sender.kept_alive(), aclosing(self._events(submits)) as events:
            async for event in events:
                await self._submitted.heed(event)
        await self._submitted.sender.end(self._submitted.whole)

    @asynccontextmanager
    async def accounted(self) -> AsyncIterator[None]:
        """Whatever ends the block, the client is told, and the ledger if the engine had to do with it."""
        try:
            yield
            self._note(200)
        except ClientGoneError:
            self._note(LEFT)
            raise
        except TwostepError as error:
            self._failed = isinstance(error, EngineDiedError)
            told = api_error(named(error, self._submitted.request.form_field) if self._submitted else error)
            begun = self._submitted is not None and await self._submitted.sender.fail(told)
            self._note(told.status)
            if not begun:
                raise told from None

    def _understand(self, body: bytearray) -> ApiRequest:
        """In a thread: a long prompt takes long to tokenise."""
        state = self._state
        fields = parse(body)
        self._served = state.named(fields.get("model") if isinstance(fields, dict) else None)
        return read_request(self._path, fields, self._served.model, state.names, self._served.room)

    async def _check_form(self, request: ApiRequest) -> None:
        """Of a new one this takes as long as many a prompt: the bill has a line for it."""
        form = request.params.structured
        self._form_ns = None if form is None else monotonic_ns()
        await self._state.forms.check(form, request.form_field)

    def _submits(self, request: ApiRequest) -> list[Submit]:
        id_ = self._id(request)
        several = len(request.prompts) > 1
        alike = request.params, request.priority, request.stream, request.cache_salt
        return [
            Submit(f"{id_}-{number}" if several else id_, prompt, *alike)
            for number, prompt in enumerate(request.prompts)
        ]

    def _events(self, submits: Sequence[Submit]) -> AsyncGenerator[Event | Accepted]:
        return self._served.backend.submit(submits, on_late_output=self._state.ledger.late)

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
        """As the client sees it."""
        return ID_PREFIX[request.kind] + self._unique

    def _note(self, status: int) -> None:
        """What was refused is not the ledger's."""
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
        self._scope[IN_LEDGER] = True
        self._state.ledger.finished(reply)


@dataclass
class _Submitted:
    """What the engine has to do with, and what has come of it."""

    request: ApiRequest
    ids: Sequence[str]
    """The engine's, one for each prompt."""
    sender: Sender
    at_ns: int
    outputs: dict[str, RequestOutput] = field(default_factory=dict)
    accepted: int = 0
    """Prompts that the engine has taken on; it says so only of those that stream."""

    @property
    def whole(self) -> list[RequestOutput]:
        """Of all prompts, in their order."""
        return [self.outputs[id_] for id_ in self.ids]

    @property
    def awaited(self) -> tuple[str, ...]:
        return tuple(id_ for id_ in self.ids if id_ not in self.outputs)

    async def heed(self, event: Event | Accepted) -> None:
        if isinstance(event, Accepted):
            self.accepted += 1
            if self.accepted == len(self.ids):
                self.sender.accepted()
            return
        if isinstance(event, RequestOutput):
            self.outputs[event.id] = event
        await self.sender.event(self.ids.index(event.id), event)
