"""Keeps finished requests for a limited time: the source of latency breakdowns, metrics and the request log."""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import islice
from time import monotonic_ns

from twostep.engine.outputs import RequestOutput

LEFT = 499
"""Status of a reply whose client left before its end, as in nginx's log."""

MAX_EARLY = 100
"""Limit of outputs that arrive before their reply is recorded; recording waits until an error has been sent."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One HTTP request for tokens, from its arrival to its end. Times are `monotonic_ns`, the clock that the engine's
    process uses too."""

    id: str
    """The id sent to the client: `chatcmpl-...`, `cmpl-...`."""
    endpoint: str
    """The path, such as `/v1/chat/completions`."""
    model: str
    stream: bool
    arrived_s: float
    """Wall clock at `received_ns`."""
    received_ns: int
    """The whole body has arrived."""
    submitted_ns: int
    """The prompts, as token ids, are submitted to the engine."""
    sent_ns: int
    """The last byte was passed to the transport, or the client was found to have left. The engine computes a cancelled
    reply until it is told, so that its outputs may have later times."""
    status: int
    """HTTP status: 200, 500 also for an error in mid-stream, `LEFT`."""
    outputs: tuple[RequestOutput, ...]
    """Outputs of its prompts that have arrived, in order of arrival."""
    prompt_ids: tuple[str, ...]
    """The engine's ids of all its prompts, in the request's order."""
    awaited: tuple[str, ...] = ()
    """The engine's ids of cancelled prompts; their outputs are passed to `FinishedRequests.add_late_output`."""
    cache_salt: str = ""
    """The request's salt: prompts share blocks only if it is the same."""
    form_ns: int | None = None
    """The prompts are token ids, and the check of the structured output begins, which ends at `submitted_ns`; None:
    unconstrained."""

    def by_prompt(self) -> list[tuple[int, RequestOutput]]:
        """Outputs with the indices of their prompts, in the request's order."""
        numbers = {id_: number for number, id_ in enumerate(self.prompt_ids)}
        return sorted(((numbers[output.id], output) for output in self.outputs), key=lambda numbered: numbered[0])


class FinishedRequests:
    """The last `keep` replies, none older than `keep_s`. For one thread."""

    def __init__(
        self,
        keep: int = 1000,
        keep_s: float = 3600,
        on_complete: Iterable[Callable[[Reply], None]] = (),
        now_ns: Callable[[], int] = monotonic_ns,
    ) -> None:
        """Each of `on_complete` is called once per reply, when all its outputs have arrived."""
        self.keep, self._keep_ns = keep, int(keep_s * 1e9)
        self._on_complete, self._now_ns = tuple(on_complete), now_ns
        self._replies: OrderedDict[str, Reply] = OrderedDict()
        self._owner: dict[str, str] = {}
        """The reply of each awaited output."""
        self._early: OrderedDict[str, RequestOutput] = OrderedDict()

    def __len__(self) -> int:
        return len(self._replies)

    def add(self, reply: Reply) -> None:
        """Records a reply that has ended: complete, failed or left by its client; each once. Requests that never
        reached the engine are refusals, not replies."""
        self._replies[reply.id] = reply
        self._owner.update(dict.fromkeys(reply.awaited, reply.id))
        if not reply.awaited:
            self._complete(reply)
        for id_ in self._early.keys() & set(reply.awaited):
            self.add_late_output(self._early.pop(id_))
        self._expire()

    def add_late_output(self, output: RequestOutput) -> None:
        """Adds the output of a cancelled prompt (see `Backend.submit`); it may arrive before its reply."""
        owner = self._owner.pop(output.id, None)
        if owner is None:
            self._early[output.id] = output
            if len(self._early) > MAX_EARLY:
                self._early.popitem(last=False)
            return
        reply = self._replies[owner]
        awaited = tuple(id_ for id_ in reply.awaited if id_ != output.id)
        whole = self._replies[owner] = replace(reply, outputs=(*reply.outputs, output), awaited=awaited)
        if not awaited:
            self._complete(whole)

    def get(self, id_: str) -> Reply | None:
        """None if there is no such reply, or no longer."""
        self._expire()
        return self._replies.get(id_)

    def newest(self, most: int) -> list[Reply]:
        """The replies that ended last, newest first."""
        self._expire()
        return list(islice(reversed(self._replies.values()), most))

    def _complete(self, reply: Reply) -> None:
        for callback in self._on_complete:
            callback(reply)

    def _expire(self) -> None:
        """Drops the oldest replies if there are too many or they are too old, and reports incomplete ones."""
        oldest_ns = self._now_ns() - self._keep_ns
        while self._replies:
            first = next(iter(self._replies.values()))
            if len(self._replies) <= self.keep and first.sent_ns >= oldest_ns:
                return
            del self._replies[first.id]
            for id_ in first.awaited:
                del self._owner[id_]
            if first.awaited:
                self._complete(first)
