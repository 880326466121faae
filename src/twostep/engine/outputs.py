"""Outputs of the engine: answers and their deltas, why each ended, and the time of each event."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import msgspec

from twostep.core.cost import NO_TIMES, LeastTimes
from twostep.core.reasons import WHOLE, Reason
from twostep.engine.text.packed_logprobs import PackedLogprobs, TokenLogprobs
from twostep.metrics import times

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class ChunkTime:
    """A step that computed `tokens` known tokens of a request: of its prompt, or recomputed after a preemption."""

    start_ns: int
    end_ns: int
    tokens: int
    step: int
    """Number of the step, in the order of the engine's steps."""
    position: int = 0
    """Of the first of these tokens in the sequence."""
    kernel_ns: int = 0
    """Time of the step in the kernels; the rest is planning and handling the result."""
    others: int = 0
    """Tokens of other sequences in the step."""
    alone_ns: int = 0
    """Estimated: what the step would have taken with these tokens only."""
    reason: Reason = WHOLE
    """What limited `tokens`."""
    without_ns: int = 0
    """Kernel time of the steps since the last one with a token of this sequence."""
    starved_ns: int = 0
    """Estimated: part of `kernel_ns` in which the kernel threads had no core, for example because of other programs."""
    attention_ns: int = 0
    """Estimated: of `alone_ns`, attention; the rest is mostly the linear layers."""
    least: LeastTimes = NO_TIMES
    """The least that the whole step could take on this machine; 0 where it is not calibrated."""


@dataclass(frozen=True)
class DecodeTime:
    """Successive steps that each generated one token of a sequence: from the end of the step with the token before them
    to the end of the last."""

    start_ns: int
    end_ns: int
    steps: int
    mixed_steps: int
    """Steps that also computed prompts of other requests."""
    kernel_ns: int
    tokens: int
    """Of all sequences in these steps."""
    alone_ns: int
    """Estimated: what the steps would have taken with one average sequence only."""
    prefill_ns: int
    """Estimated: how much longer prompts of other requests made these steps."""
    starved_ns: int = 0
    """Estimated: part of `kernel_ns` in which the kernel threads had no core, for example because of other programs."""
    attention_ns: int = 0
    """Estimated: part of `kernel_ns` in which decodes read the KV cache."""
    least: LeastTimes = NO_TIMES
    """The least that these steps could take on this machine; 0 where it is not calibrated."""


@dataclass(frozen=True)
class WaitTime:
    """How long, and for how many steps, a sequence waited in the queue for this reason."""

    reason: Reason
    ns: int
    steps: int


@dataclass(frozen=True)
class PreemptionTime:
    at_ns: int
    tokens_lost: int
    """Computed tokens whose KV was freed, including those that are found again in the prefix cache."""
    reason: Reason | None = None
    waits: tuple[WaitTime, ...] = ()
    """Why it waited from then on."""


@dataclass(frozen=True)
class LostTime:
    """A span of a sequence on an engine that died, of which only its tokens are known: their times are those of their
    arrival at the engine's owner."""

    start_ns: int
    """When the request was submitted to that engine."""
    end_ns: int
    """When the engine was found dead, or the sequence had ended before."""
    resumed_ns: int
    """When the next engine received the request; `end_ns` if the sequence had ended."""
    tokens_lost: int
    """Tokens that had certainly been computed, and whose KV is lost."""


@dataclass(frozen=True)
class Timeline:
    """Times of the events of one choice, in integer nanoseconds of one clock. Derived times are in seconds, or None if
    the event did not happen.

    Terms as in docs/glossary.md: TTFT = queue time + prefill time.
    """

    arrival_ns: int
    first_scheduled_ns: int | None = None
    """Start of the first step that computed one of its tokens; None also if that was on an engine that died."""
    chunks: tuple[ChunkTime, ...] = ()
    """Steps that computed known tokens, in order; decodes are not among them."""
    token_ns: tuple[int, ...] = ()
    """When each output token left the engine."""
    preemptions: tuple[PreemptionTime, ...] = ()
    finish_ns: int | None = None
    waits: tuple[WaitTime, ...] = ()
    """Why it was not scheduled at once, after the step that ran when it arrived."""
    decodes: tuple[DecodeTime, ...] = ()
    """In order: one, and another after each preemption."""
    lost: tuple[LostTime, ...] = ()
    """Spans on engines that died, before all others."""

    def __repr__(self) -> str:
        """Short, because users print outputs."""
        times = {"queue": self.queue_s, "ttft": self.ttft_s, "tpot": self.tpot_s, "e2e": self.e2e_s}
        said = [f"{name} {1000 * seconds:.1f} ms" for name, seconds in times.items() if seconds is not None]
        return f"<Timeline: {', '.join([*said, f'{len(self.preemptions)} preemptions'])}>"

    @property
    def began_elsewhere(self) -> bool:
        """Whether its first token came from an engine that died."""
        return any(one.tokens_lost for one in self.lost)

    @property
    def queue_s(self) -> float | None:
        """Arrival to the first step that computes a token, without time spent preempted."""
        return times.seconds(self.arrival_ns, self.first_scheduled_ns)

    @property
    def prefill_s(self) -> float | None:
        """The first step that computes a token to the first output token."""
        return times.seconds(self.first_scheduled_ns, self.token_ns[0] if self.token_ns else None)

    @property
    def ttft_s(self) -> float | None:
        """Arrival to the first output token."""
        return times.ttft_s(self.arrival_ns, self.token_ns)

    @property
    def itl_s(self) -> tuple[float, ...]:
        """Gaps between successive output tokens, one fewer than tokens."""
        return times.itl_s(self.token_ns)

    @property
    def tpot_s(self) -> float | None:
        """Mean gap between output tokens; undefined for one token."""
        return times.tpot_s(self.token_ns)

    @property
    def e2e_s(self) -> float | None:
        """Arrival to the last output token."""
        return times.e2e_s(self.arrival_ns, self.token_ns)

    @property
    def preempted_s(self) -> float:
        """Total time from each preemption to the next step that computes a token of the sequence, or to its end."""
        return sum(self._resumed_ns(preemption.at_ns) - preemption.at_ns for preemption in self.preemptions) / 1e9

    @property
    def tokens_lost(self) -> int:
        return sum(preemption.tokens_lost for preemption in self.preemptions)

    def _resumed_ns(self, preempted_ns: int) -> int:
        later = (chunk.start_ns for chunk in self.chunks if chunk.start_ns >= preempted_ns)
        return next(later, preempted_ns if self.finish_ns is None else self.finish_ns)


@dataclass(frozen=True)
class ChoiceOutput:
    """One answer. `token_ids` include the token that ended it; `text` ends before it."""

    index: int
    text: str
    token_ids: Sequence[int]
    finish_reason: FinishReason
    timeline: Timeline
    stop_reason: str | int | None = None
    """The stop string or the id among `stop_token_ids` that ended it; None for the model's own end."""
    logprobs: PackedLogprobs | None = None
    """One for each of `token_ids`, including tokens of a stop string that is not in the text; None if not requested."""
    error: str | None = None
    """The error in one line, if `finish_reason` is "error"."""


@dataclass(frozen=True)
class RequestOutput:
    id: str
    prompt_token_ids: Sequence[int]
    choices: tuple[ChoiceOutput, ...]
    """In the order of their index."""
    cached_tokens: int
    """Prompt tokens whose KV was found in the prefix cache."""

    @property
    def output_tokens(self) -> int:
        """Generated tokens of all choices."""
        return sum(len(choice.token_ids) for choice in self.choices)


class ChoiceEnd(NamedTuple):
    """How a choice ended while others of its request continue. The fields as in `ChoiceOutput`."""

    finish_reason: FinishReason
    stop_reason: str | int | None
    error: str | None = None


class Delta(msgspec.Struct, frozen=True, array_like=True, tag="delta"):
    """New text of one choice of a request that streams; tokens may arrive before their text is complete."""

    id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    packed_logprobs: bytes = b""
    """As `logprobs` reads them."""
    ended: ChoiceEnd | None = None
    """Set in the last delta of a choice, which has no text or tokens; the last choice of a request has none, its end
    is in the `RequestOutput`."""
    cached_tokens: int | None = None
    """As in `RequestOutput`; set in the first delta of a choice that has a token."""

    @property
    def logprobs(self) -> Sequence[TokenLogprobs]:
        """One for each of `token_ids`; empty if not requested."""
        return PackedLogprobs.from_bytes(self.packed_logprobs) if self.packed_logprobs else ()


Event = Delta | RequestOutput
