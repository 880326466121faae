"""Why a plan is as it is: values while planning, put into words only when read."""

from enum import Enum
from typing import NamedTuple


class Why(Enum):
    """What limited or moved a sequence, as a clause with places for its numbers; the limit comes first."""

    WHOLE = "all that was left"
    TOKEN_BUDGET = "token budget of {} a step"
    ITL_BUDGET = "ITL budget {:.1f} ms, predicted {:.1f} ms"
    LONGEST_STEP = "steps of at most {:.1f} ms, predicted {:.1f} ms"
    LEAST_SHARE = "no budget left: the least share of a prompt in prefill"

    NO_SLOT = "all {} slots are taken"
    NO_BLOCKS = "block group {}: needs {}, {} are free, {} of them reserved for running requests"
    NO_BUDGET = "running requests use the whole step"
    AFTER_PREEMPTION = "no request is admitted in a step that preempts another"
    BATCH_CLOSED = "static batching: waits for the current batch to end, or for a full batch to gather"
    SHARES_PREFIX = "waits for sequence {}, which is computing the same prefix"
    MANY_IN_PREFILL = "{} prompts are in prefill already"

    OUT_OF_BLOCKS = "sequence {} needed its blocks"
    MORE_URGENT = "sequence {} is more urgent"
    STEP_FAILED = "the step failed or was cancelled"


class Reason(NamedTuple):
    """Times among the `numbers` are in ns."""

    why: Why
    numbers: tuple[int, ...] = ()

    def words(self) -> str:
        """One clause for a person: "ITL budget 40.0 ms, predicted 38.9 ms"."""
        in_ms = self.why in (Why.ITL_BUDGET, Why.LONGEST_STEP)
        return self.why.value.format(*(n / 1e6 if in_ms else n for n in self.numbers))


WHOLE = Reason(Why.WHOLE)
