"""Remembers finished replies for a while: what the bill, the metrics and the log of requests are made of."""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import islice
from time import monotonic_ns

from twostep.engine.outputs import RequestOutput

LEFT = 499
"""Status of a reply whose client had gone, as nginx writes it into its log."""

MOST_EARLY = 100
"""Outputs that are kept until the end of their replies is told, which takes as long as an error takes to be sent."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One HTTP request for tokens, from its arrival to its end. Times in `monotonic_ns`, the clock that the engine's
    process reads too."""

    id: str
    """As the client sees it: `chatcmpl-...`, `cmpl-...`."""
    endpoint: str
    """The path, such as `/v1/chat/completions`."""
    model: str
    stream: bool
    arrived_s: float
    """Wall clock, at `received_ns`."""
    received_ns: int
    """The whole body is here."""
    submitted_ns: int
    """Prompts are token ids and on their way to the engine."""
    sent_ns: int
    """The last byte was handed to the transport, or the client was found to have gone. A reply that was cut is
    computed on until the engine hears of it, so that its outputs may have later times."""
    status: int
    """HTTP status: 200, 500 for an error also in mid-stream, `LEFT`."""
    outputs: tuple[RequestOutput, ...]
    """Of its prompts, as far as they have come and in the order in which they did."""
    prompt_ids: tuple[str, ...]
    """The engine's ids of all its prompts, in the order of the request."""
    awaited: tuple[str, ...] = ()
    """Engine's ids of prompts that nobody waited for any more: their outputs come to `Ledger.late`."""
    cache_salt: str = ""
    """As the request gave it: prompts are like those of others only where it is the same."""
    form_ns: int | None = None
    """Prompts are token ids, and the form that the answer has to have is checked from now until `submitted_ns`; None:
    any form will do."""

    def by_prompt(self) -> list[tuple[int, RequestOutput]]:
        """Outputs with the numbers of their prompts, in the order of the request."""
        numbers = {id_: number for number, id_ in enumerate(self.prompt_ids)}
        return sorted(((numbers[output.id], output) for output in self.outputs), key=lambda numbered: numbered[0])


class Ledger:
    """The last `keep` replies, none older than `keep_s`. For one thread."""

    def __init__(
        self,
        keep: int = 1000,
        keep_s: float = 3600,
        tell: Iterable[Callable[[Reply], None]] = (),
        now_ns: Callable[[], int] = monotonic_ns,
    ) -> None:
        """Each of `tell` hears of every reply once, when all its outputs are here."""
        self.keep, self._keep_ns = keep, int(keep_s * 1e9)
        self._tell, self._now_ns = tuple(tell), now_ns
        self._replies: OrderedDict[str, Reply] = OrderedDict()
        self._owner: dict[str, str] = {}
        """Replies of outputs that are awaited."""
        self._early: OrderedDict[str, RequestOutput] = OrderedDict()

    def __len__(self) -> int:
        return len(self._replies)

    def finished(self, reply: Reply) -> None:
        """A reply has ended: whole, failed or left by its client; each once. Those that never reached the engine are
        refusals, not replies."""
        self._replies[reply.id] = reply
        self._owner.update(dict.fromkeys(reply.awaited, reply.id))
        if not reply.awaited:
            self._told(reply)
        for id_ in self._early.keys() & set(reply.awaited):
            self.late(self._early.pop(id_))
        self._forget()

    def late(self, output: RequestOutput) -> None:
        """The output of a prompt that nobody waits for any more (see `Backend.submit`); it may come first."""
        owner = self._owner.pop(output.id, None)
        if owner is None:
            self._early[output.id] = output
            if len(self._early) > MOST_EARLY:
                self._early.popitem(last=False)
            return
        reply = self._replies[owner]
        awaited = tuple(id_ for id_ in reply.awaited if id_ != output.id)
        whole = self._replies[owner] = replace(reply, outputs=(*reply.outputs, output), awaited=awaited)
        if not awaited:
            self._told(whole)

    def get(self, id_: str) -> Reply | None:
        """None if there never was such a reply, or not any more."""
        self._forget()
        return self._replies.get(id_)

    def newest(self, most: int) -> list[Reply]:
        """Those that ended last, the last of them first."""
        self._forget()
        return list(islice(reversed(self._replies.values()), most))

    def _told(self, reply: Reply) -> None:
        for tell in self._tell:
            tell(reply)

    def _forget(self) -> None:
        """Too many or too old: the oldest go, told of if they still waited."""
        oldest_ns = self._now_ns() - self._keep_ns
        while self._replies:
            first = next(iter(self._replies.values()))
            if len(self._replies) <= self.keep and first.sent_ns >= oldest_ns:
                return
            del self._replies[first.id]
            for id_ in first.awaited:
                del self._owner[id_]
            if first.awaited:
                self._told(first)
