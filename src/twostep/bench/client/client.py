"""Sends requests to an OpenAI-compatible server, and measures when tokens arrive or why a request fails."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from time import monotonic_ns

from twostep.bench.client.address import Address, base_url, find_address
from twostep.bench.client.http import HttpRequest, exchange
from twostep.bench.client.outcome import Failure, FailureError, FailureKind, Outcome, failure_message, garbage, one_line
from twostep.bench.client.reply import Refusal, StreamReply, check_plain
from twostep.bench.client.target import Prompt, Target
from twostep.bench.load.run_record import Server
from twostep.errors import TargetError

MAX_WHOLE_BYTES = 4 << 20
WITHOUT_LIST = ("400", "404", "405", "422", "501")
"""Status codes of servers that cannot list their models."""


@dataclass(frozen=True)
class Ask:
    """One request. `due_ns` as in `Outcome`."""

    number: int
    prompt: Prompt
    input_tokens: int
    output_tokens: int
    due_ns: int


class Client:
    """A client of one server."""

    def __init__(self, target: Target, address: Address, server: Server) -> None:
        self.server = server
        self._target, self._address = target, address
        self._running = set[StreamReply]()

    @property
    def pieces(self) -> int:
        """Chunks with text received so far of the running answers."""
        return sum(reply.pieces for reply in self._running)

    async def ask(self, ask: Ask, origin_ns: int) -> Outcome:
        """Sends one request. Failures of the server and cancellation become part of the outcome; never raises.

        Times in the outcome count from `origin_ns` on the monotonic clock.
        """
        reply = StreamReply(ask.output_tokens, self._target.must_be_full)
        request = self._target.request(self.server, ask.prompt, ask.output_tokens)
        self._running.add(reply)
        sent_ns = monotonic_ns()
        failure = await self._failure(request, reply)
        ended_ns = reply.ended_ns or monotonic_ns()
        self._running.discard(reply)
        token_ns, counted = reply.tokens()
        return Outcome(
            number=ask.number,
            due_ns=ask.due_ns,
            sent_ns=sent_ns - origin_ns,
            token_ns=tuple(at_ns - origin_ns for at_ns in token_ns),
            ended_ns=ended_ns - origin_ns,
            asked_input_tokens=ask.input_tokens,
            asked_output_tokens=ask.output_tokens,
            input_tokens=reply.usage.input_tokens if reply.usage else None,
            cached_tokens=reply.usage.cached_tokens if reply.usage else None,
            counted=counted,
            failure=failure or reply.failure(len(token_ns)),
            request_id=reply.request_id,
        )

    async def _failure(self, request: HttpRequest, reply: StreamReply) -> Failure | None:
        """Sends the request. Returns why its reply is incomplete, or None."""
        try:
            await exchange(self._address, request, reply, self._target.patience)
        except FailureError as error:
            return reply.refusal() or error.failure
        except asyncio.CancelledError:
            return Failure(FailureKind.CANCELLED, "the run was stopped")
        return None


async def connect(target: Target) -> Client:
    """Connects to the server, and asks it for its model unless the target names one.

    Raises `TargetError` if it cannot be reached or does not list exactly one model.
    """
    url = base_url(target.url)
    address = await find_address(url, target.trust)
    try:
        models = await _models(target, address)
    except FailureError as error:
        if target.model is None or error.failure.kind is FailureKind.TLS:
            raise TargetError(f"{url}/models: {_models_problem(error.failure)}") from None
        models = {}
    model = target.model or _only(models, url)
    return Client(target, address, Server(url, target.endpoint, model, models.get(model, "")))


def _models_problem(failure: Failure) -> str:
    """Why the server did not list its models; with a hint if it cannot."""
    has_none = failure.kind is FailureKind.GARBAGE or failure.detail[:3] in WITHOUT_LIST
    return failure_message(failure) + "; name the model (--model)" * has_none


def _only(models: Mapping[str, str], url: str) -> str:
    if len(models) != 1:
        listed = one_line(", ".join(models)) or "none"
        raise TargetError(f"{url} lists {len(models)} models ({listed}); choose one (--model)")
    return next(iter(models))


async def _models(target: Target, address: Address) -> dict[str, str]:
    """Owners by model name. Raises `FailureError`."""
    reply = _WholeReply()
    await exchange(address, HttpRequest("GET", "/models", target.all_headers()), reply, target.patience)
    if reply.refusal:
        failure = reply.refusal.failure()
        raise FailureError(failure.kind, failure.detail)
    try:
        listed = json.loads(reply.received)["data"]
        return {str(model["id"]): str(model.get("owned_by") or "") for model in listed}
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
        raise garbage(f"not a list of models: {bytes(reply.received[:120])!r}") from None


class _WholeReply:
    """A `Reader` for a reply that is not streamed."""

    def __init__(self) -> None:
        self.received = bytearray()
        self.refusal: Refusal | None = None

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        if status != 200:
            self.refusal = Refusal(status, headers)
        else:
            check_plain(headers)

    def body(self, data: bytes, at_ns: int) -> bool:
        if self.refusal:
            return self.refusal.body(data)
        self.received += data
        if len(self.received) > MAX_WHOLE_BYTES:
            raise garbage(f"more than {MAX_WHOLE_BYTES} bytes")
        return False

    def end(self) -> None:
        """Nothing to do at the end of the reply."""
