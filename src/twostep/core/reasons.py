"""Why a plan is as it is: values while planning; `words()` is for whoever reads them. The limit comes first."""

from dataclasses import dataclass
from typing import Protocol


class Reason(Protocol):
    """A value that can say itself."""

    def words(self) -> str:
        """One clause for a person."""
        ...


@dataclass(frozen=True, slots=True)
class Whole:
    """The slice is all that the sequence lacked."""

    def words(self) -> str:
        return "all that was left"


@dataclass(frozen=True, slots=True)
class CutByTokens:
    """The step's budget of tokens was used up."""

    budget_tokens: int

    def words(self) -> str:
        return f"token budget of {self.budget_tokens} a step"


@dataclass(frozen=True, slots=True)
class CutByTime:
    """More would have taken the step beyond its time."""

    budget_ns: int
    predicted_ns: int
    decoding: bool

    def words(self) -> str:
        limit = "ITL budget" if self.decoding else "longest step"
        return f"{limit} {_ms(self.budget_ns)}, predicted {_ms(self.predicted_ns)}"


@dataclass(frozen=True, slots=True)
class LeastShare:
    """No budget was left, but a prompt in prefill is never left waiting: this is its least share."""

    def words(self) -> str:
        return "no budget left: least share of a prompt in prefill"


@dataclass(frozen=True, slots=True)
class NoSeat:
    """As many sequences run as may."""

    seats: int

    def words(self) -> str:
        return f"all {self.seats} seats are taken"


@dataclass(frozen=True, slots=True)
class NoBlocks:
    """Too few free blocks: what it needs, and what admission leaves free for those that run, exceed them."""

    group: int
    needed: int
    free: int
    kept_free: int

    def words(self) -> str:
        kept = f", {self.kept_free} of them kept for those that run" if self.kept_free else ""
        return f"needs {self.needed} blocks of group {self.group}, {self.free} are free{kept}"


@dataclass(frozen=True, slots=True)
class AfterPreemption:
    """Nobody is admitted in a step that preempted."""

    def words(self) -> str:
        return "nobody is admitted in a step that preempted"


@dataclass(frozen=True, slots=True)
class BatchNotOpen:
    """Static batching: the batch under way has to end first, or a full one to gather."""

    def words(self) -> str:
        return "static batching: the batch under way has to end, or a full one to gather"


@dataclass(frozen=True, slots=True)
class SharesPrefix:
    """Another is computing the very prefix: waiting for it is sooner than computing it twice."""

    number: int

    def words(self) -> str:
        return f"waits for sequence {self.number}, which is computing the same prefix"


@dataclass(frozen=True, slots=True)
class EnoughInPrefill:
    """As many prompts are in mid-prefill as can all go on."""

    prompts: int

    def words(self) -> str:
        return f"{self.prompts} prompts are in mid-prefill"


@dataclass(frozen=True, slots=True)
class NoBudget:
    """Those that run use the step's budget."""

    def words(self) -> str:
        return "those that run use the whole step"


@dataclass(frozen=True, slots=True)
class OutOfBlocks:
    """Preempted: an earlier one needed its blocks."""

    for_number: int

    def words(self) -> str:
        return f"sequence {self.for_number} needed its blocks"


@dataclass(frozen=True, slots=True)
class MoreUrgent:
    """Preempted: one of a more urgent priority needed its place."""

    for_number: int

    def words(self) -> str:
        return f"sequence {self.for_number} is more urgent"


@dataclass(frozen=True, slots=True)
class StepFailed:
    """Preempted: the step under way failed or was cancelled, and what it wrote is unknown."""

    def words(self) -> str:
        return "the step failed or was cancelled"


ChunkReason = Whole | CutByTokens | CutByTime | LeastShare
HeldReason = NoSeat | NoBlocks | AfterPreemption | BatchNotOpen | SharesPrefix | EnoughInPrefill | NoBudget
PreemptReason = OutOfBlocks | MoreUrgent | StepFailed


def _ms(ns: int) -> str:
    return f"{ns / 1e6:.1f} ms"
