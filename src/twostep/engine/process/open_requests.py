"""The requests that a backend has not answered yet, with what was received of each: enough for another engine to
continue it if its engine dies."""

import asyncio
from array import array
from collections.abc import Callable, Iterable, Iterator
from time import monotonic, monotonic_ns

import msgspec

from twostep.engine.backend import Accepted, ChoiceSoFar, RequestSoFar, Submit
from twostep.engine.outputs import ChoiceEnd, Delta, Event, RequestOutput
from twostep.engine.process.messages import Refused
from twostep.engine.process.wire import framed
from twostep.errors import TwostepError

FORGOTTEN_S = 60.0
"""A request that lived so long since the last death is not suspected of it any more."""
TURN_S = 0.001
"""How long a caller may take events without a pause, while other requests' tokens wait."""

OnLateOutput = Callable[[RequestOutput], None]


class Inbox:
    """The events of one caller's requests that it has not taken yet."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[Event | Accepted | TwostepError] = asyncio.Queue()
        self._waited_s = monotonic()

    async def next(self) -> Event | Accepted:
        """The next event; raises an error that arrived instead. Lets other tasks of the event loop run after `TURN_S`
        without a wait: a step of a request with 128 choices gives 128 events."""
        if self.events.empty():
            event = await self.events.get()
            self._waited_s = monotonic()
        else:
            if monotonic() - self._waited_s > TURN_S:
                await asyncio.sleep(0)
                self._waited_s = monotonic()
            event = self.events.get_nowait()
        if isinstance(event, TwostepError):
            raise event
        return event


class _Choice:
    """What was received of a choice: 12 bytes per token, and its log-probabilities if they were requested."""

    __slots__ = ("characters", "ended", "ended_ns", "logprobs", "token_ids", "token_ns")

    def __init__(self) -> None:
        self.token_ids, self.token_ns, self.characters = array("i"), array("q"), 0
        self.logprobs: list[bytes] = []
        self.ended: ChoiceEnd | None = None
        self.ended_ns = 0

    def add(self, delta: Delta, now_ns: int) -> None:
        for token in delta.token_ids:
            self.token_ids.append(token)
            self.token_ns.append(now_ns)
        self.characters += len(delta.text)
        if delta.packed_logprobs:
            self.logprobs.append(delta.packed_logprobs)
        if delta.ended is not None:
            self.ended, self.ended_ns = delta.ended, now_ns

    def so_far(self) -> ChoiceSoFar:
        return ChoiceSoFar(
            tuple(self.token_ids),
            tuple(self.token_ns),
            self.characters,
            tuple(self.logprobs),
            self.ended,
            self.ended_ns,
        )


class OpenRequest:
    """A request until its output has arrived. `inbox`: of whoever waits for it."""

    def __init__(self, submit: Submit, inbox: Inbox) -> None:
        """Draws the seed, so that every engine samples the same tokens."""
        self.submit = msgspec.structs.replace(submit, params=submit.params.seeded())
        self.inbox: Inbox | None = inbox
        self.on_late_output: OnLateOutput | None = None
        """Gets the output, if nobody waits any more."""
        self.cancelled = False
        self.accepted = False
        self.deaths = 0
        """Engines that died with this request, each soon after the one before and without a token of it in between."""
        self._choices = [_Choice() for _ in range(submit.params.n)] if submit.stream else []
        self._cached_tokens: int | None = None
        self._engines: list[tuple[int, int]] = []
        self._submitted_ns: int | None = None
        """When it was sent to the engine that has it; None if none has it."""

    @property
    def begun(self) -> bool:
        """Whether an engine has died with it."""
        return bool(self._engines)

    def add(self, delta: Delta, now_ns: int) -> None:
        """Keeps what another engine would need to continue after this."""
        self._choices[delta.index].add(delta, now_ns)
        self.deaths = 0
        if delta.cached_tokens is not None and self._cached_tokens is None:
            self._cached_tokens = delta.cached_tokens

    def died(self, now_ns: int) -> None:
        """The engine has died; if it had the request, that counts."""
        if self._submitted_ns is None:
            return
        if self._engines and now_ns - self._engines[-1][1] > int(FORGOTTEN_S * 1e9):
            self.deaths = 0
        self._engines.append((self._submitted_ns, now_ns))
        self._submitted_ns = None
        self.deaths += 1

    def frame(self) -> bytearray:
        """The message for the next engine. Raises as `framed` does."""
        if not self._engines:
            return framed(self.submit)
        choices = tuple(choice.so_far() for choice in self._choices)
        so_far = RequestSoFar(tuple(self._engines), choices, self._cached_tokens)
        return framed(msgspec.structs.replace(self.submit, so_far=so_far))

    def sent(self) -> None:
        """An engine has it now."""
        self._submitted_ns = monotonic_ns()


class OpenRequests:
    """By id, in the order of their arrival."""

    def __init__(self) -> None:
        self._requests: dict[str, OpenRequest] = {}

    def __iter__(self) -> Iterator[OpenRequest]:
        """May be changed meanwhile."""
        return iter([*self._requests.values()])

    @property
    def followed(self) -> int:
        """Requests whose events somebody waits for."""
        return sum(request.inbox is not None for request in self._requests.values())

    def add(self, requests: Iterable[OpenRequest]) -> None:
        """From now on their events are passed on."""
        self._requests.update((request.submit.id, request) for request in requests)

    def get(self, id_: str) -> OpenRequest | None:
        return self._requests.get(id_)

    def deliver(self, event: Event | Accepted | Refused, now_ns: int) -> None:
        """Passes an event to whoever waits for it. `now_ns`: when it arrived."""
        request = self._requests.get(event.id)
        if request is None:
            return
        if isinstance(event, Delta):
            request.add(event, now_ns)
        elif isinstance(event, Accepted):
            if request.accepted:
                return  # it was said by an engine that died
            request.accepted = True
        else:
            del self._requests[event.id]
        if request.inbox is not None:
            request.inbox.events.put_nowait(event.error.error() if isinstance(event, Refused) else event)
        elif isinstance(event, RequestOutput) and request.on_late_output is not None:
            request.on_late_output(event)

    def leave(self, ids: Iterable[str], on_late_output: OnLateOutput) -> list[str]:
        """Nobody waits for these any more; returns those that have to be cancelled."""
        left = [id_ for id_ in ids if id_ in self._requests]
        for id_ in left:
            request = self._requests[id_]
            request.inbox, request.on_late_output, request.cancelled = None, on_late_output, True
        return left

    def fail(self, error: TwostepError, request: OpenRequest | None = None) -> None:
        """Ends this request, or all, with an error."""
        for one in [*self._requests.values()] if request is None else [request]:
            del self._requests[one.submit.id]
            if one.inbox is not None:
                one.inbox.events.put_nowait(error)
