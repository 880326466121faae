"""What computes answers, as the front end sees it: one local engine, several, or engines on other machines.

The front end holds a `Backend` for each model that it serves, and knows nothing of processes, sockets or machines.
"""

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Literal, NoReturn, Protocol

import msgspec

from twostep.core.request import FinishReason
from twostep.engine.outputs import ChoiceEnd, Event, RequestOutput
from twostep.engine.params import SamplingParams
from twostep.engine.timing.meter import Measured
from twostep.errors import TwostepError


class ChoiceSoFar(msgspec.Struct, frozen=True):
    """What was received of one choice of a request that streams."""

    token_ids: tuple[int, ...] = ()
    token_ns: tuple[int, ...] = ()
    """When each arrived."""
    characters: int = 0
    """Of its text."""
    packed_logprobs: tuple[bytes, ...] = ()
    """As in the deltas, in their order; none if not requested."""
    ended: ChoiceEnd | None = None
    """If its end was received too."""
    ended_ns: int = 0


class RequestSoFar(msgspec.Struct, frozen=True):
    """What is known of a request whose engine died. Times are `monotonic_ns`."""

    engines: tuple[tuple[int, int], ...]
    """For each engine that died: when the request was submitted to it, and when it was found dead."""
    choices: tuple[ChoiceSoFar, ...] = ()
    """All of them, in order; none if nothing was received."""
    cached_tokens: int | None = None
    """Of the prompt, by the first engine; None if its first token was not received."""


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """A request. With `stream` its text comes in deltas. Only requests of the same `cache_salt` share KV.

    With `so_far`, what comes continues what was received: no text, token or end comes twice. The output is whole. The
    parameters need the seed that they had.
    """

    id: str
    prompt: Sequence[int]
    params: SamplingParams
    priority: int = 0
    stream: bool = False
    cache_salt: str = ""
    so_far: RequestSoFar | None = None


class Accepted(msgspec.Struct, frozen=True, array_like=True, tag="accepted"):
    """A streaming request passed all checks and is queued: it will not be refused."""

    id: str


class Capabilities(msgspec.Struct, frozen=True):
    """What a backend was started with, and can serve."""

    max_sequence_tokens: int
    """Most tokens of a prompt and its answer together."""
    max_model_len: int
    """Length of the context; the KV cache may hold less."""
    max_num_seqs: int
    """Sequences that run at a time, on all workers."""
    max_num_batched_tokens: int
    """Most tokens of one step of a worker."""
    kv_blocks: int
    """Of all workers."""
    isa: str
    """Instruction set of the kernels."""
    threads: int
    """Of a worker's kernels."""
    profile: str | None = None
    """The file with what steps cost on this machine; None: that is learned while running."""
    description: tuple[str, ...] = ()
    """The effective settings in lines, with the arithmetic behind the KV cache."""


class Snapshot(msgspec.Struct, frozen=True):
    """The state of a worker between two steps. Totals count since its start."""

    steps: int
    running: int
    waiting: int
    kv_blocks: int
    kv_blocks_free: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    preemptions: int
    preempted_tokens: int
    finished: dict[FinishReason, int]
    measured: Measured


Phase = Literal["loading", "ready", "restarting", "failed"]
"""loading: no model is loaded yet. ready: requests are accepted. restarting: a part that failed is being replaced, and
no other accepts requests. failed: it will not be ready again."""


class Worker(msgspec.Struct, frozen=True):
    """One part of a backend that runs steps."""

    name: str
    up: bool
    """It accepts requests."""
    restarts: int = 0
    """How many times it was started again, successfully or not."""
    stalled_s: float = 0.0
    """For how long it has had requests and ended no step; without requests 0."""
    snapshot: Snapshot | None = None
    """As of its last message, also after it failed; None before the first."""
    resumed: int = 0
    """Requests of a part that failed that were given to this one."""


class Backend(Protocol):
    """Serves one model. All methods are for one event loop.

    For each request the events come in order: `Accepted` first, if it streams; then its `Delta`s, if it streams; last
    its `RequestOutput`. A part of the backend that fails is replaced if it can be, and the requests on it go on: their
    events are those of an undisturbed run, apart from their times. If it cannot be, or failed repeatedly with the same
    request, they raise `EngineDiedError`.
    """

    @property
    def phase(self) -> Phase:
        """Whether requests are accepted."""

    @property
    def error(self) -> TwostepError | None:
        """What failed, while the phase is "restarting" or "failed"."""

    @property
    def capabilities(self) -> Capabilities | None:
        """None while the phase is "loading". May change when a part is replaced."""

    @property
    def outstanding(self) -> int:
        """Requests whose events somebody waits for."""

    async def run(self, on_ready: Callable[[], None]) -> NoReturn:
        """Starts the backend and replaces parts that fail, until it is cancelled. Requests are served until `stop`.

        `on_ready` is called once, when the phase is "ready" for the first time. Raises `TwostepError` if the first
        start fails, `EngineDiedError` if the backend has failed for good, or a part failed after the last request that
        was under way at `drain`.
        """

    def drain(self) -> None:
        """The requests under way are the last: parts that fail are replaced only for them."""

    async def stop(self) -> None:
        """Ends everything that the backend started. Requests under way raise `EngineDiedError`."""

    def submit(
        self, requests: Sequence[Submit], on_late_output: Callable[[RequestOutput], None] = lambda output: None
    ) -> AsyncGenerator[Event | Accepted]:
        """Submits requests when it is first iterated, and yields their events until each has its output. Ids are those
        of no other request whose output has not arrived.

        Closing the generator earlier cancels the requests that have none; their outputs go to `on_late_output`. Raises
        `TwostepError` if one is refused, which cancels the others, and `EngineDiedError` if the backend has failed, or
        one may be the cause of failures.
        """

    def cancel(self, id: str) -> None:
        """Ends a request early: its output comes soon, while a part is replaced as soon as that is ready, with what was
        generated so far. Unknown ids are ignored."""

    def workers(self) -> Sequence[Worker]:
        """The parts that run steps, always in the same order. Does not wait for them."""
