"""What a step costs: its shape, the contract of every cost model, and the inversion that sizes prefill chunks.

One cost model serves a whole engine: the scheduler plans with it and teaches it, the meter and the latency breakdown
divide measured time by it, and the simulator lets steps take the time that it expects.
"""

from typing import NamedTuple, Protocol


class StepShape(NamedTuple):
    """What a step's time depends on, with a field for each kind of work that costs differently.

    A slice of one row is a decode, whether it is an output token or the last token of a prompt: it reads the KV cache
    and does little arithmetic. A slice of several rows (a prefill chunk, or drafts to verify) does the arithmetic of
    all its query-key pairs over one read of the KV cache.
    """

    tokens: int = 0
    """Rows through the linear layers."""
    prefill_pairs: int = 0
    """Query-key pairs of slices of several rows: arithmetic."""
    prefill_kv_tokens: int = 0
    """Positions of KV cache that those slices read."""
    decode_kv_tokens: int = 0
    """Positions of KV cache that slices of one row read: memory traffic."""
    logit_rows: int = 0
    """Rows through the output head."""
    prefills: int = 0
    """Slices of several rows."""
    decodes: int = 0
    """Slices of one row."""

    @property
    def pairs(self) -> int:
        """Query-key pairs of all slices."""
        return self.prefill_pairs + self.decode_kv_tokens

    @property
    def sequences(self) -> int:
        return self.prefills + self.decodes

    def tile_rows(self, edge: int) -> int:
        """Rows that linear layers compute on kernels which work in tiles of `edge` rows: rounded up to whole tiles."""
        return -(-self.tokens // edge) * edge

    def with_slice(self, start: int, count: int, logit_rows: int) -> "StepShape":
        """This shape and `count` tokens of one sequence from position `start`, of which `logit_rows` want logits."""
        return self._changed(1, start, count, logit_rows)

    def without_slice(self, start: int, count: int, logit_rows: int) -> "StepShape":
        """This shape without a slice that it contains."""
        return self._changed(-1, start, count, logit_rows)

    def _changed(self, sign: int, start: int, count: int, logit_rows: int) -> "StepShape":
        tokens, pairs, prefill_kv, decode_kv, rows, prefills, decodes = self
        tokens, rows, end = tokens + sign * count, rows + sign * logit_rows, start + count
        if count == 1:
            decode_kv += sign * end
            decodes += sign
        else:
            pairs += sign * (count * start + count * (count + 1) // 2)  # each row attends to itself and all before it
            prefill_kv += sign * end
            prefills += sign
        return StepShape(tokens, pairs, prefill_kv, decode_kv, rows, prefills, decodes)


def decode_shape(sequences: int, kv_tokens: int) -> StepShape:
    """A step in which `sequences` decode one token each and read `kv_tokens` positions of KV cache together."""
    return StepShape(sequences, 0, 0, kv_tokens, sequences, 0, sequences)


class Terms(NamedTuple):
    """Expected nanoseconds of a step by the kind of work. A model leaves at 0 what it does not tell apart."""

    fixed: float = 0.0
    """The same for every step."""
    linear: float = 0.0
    prefill_attention: float = 0.0
    decode_attention: float = 0.0
    logits: float = 0.0
    sequences: float = 0.0
    """Per-sequence work, such as sampling and bookkeeping."""


class LeastTimes(NamedTuple):
    """What a step takes at least on a machine, in ns, by limit: all its operations at the peak, all its bytes at the
    full bandwidth. No step comes near both."""

    arithmetic: int = 0
    bandwidth: int = 0


NO_TIMES = LeastTimes()
"""Of a machine that is not calibrated."""


class Cost(NamedTuple):
    """The estimate of one step. `expected_ns` is the mean; `bound_ns` includes the model's margin and is what budgets
    are compared with. The sum of `terms` is the expected time, up to rounding."""

    expected_ns: int
    bound_ns: int
    terms: Terms


class CostModel(Protocol):
    """Estimates what steps cost.

    For `largest_slice` to be exact, `bound_ns` must not decrease when a slice grows. `observe` alone changes a model,
    and only `Scheduler.resolve` calls it: the same steps in the same order lead to the same estimates, which is what
    makes a recording replay.
    """

    def estimate(self, shape: StepShape) -> Cost:
        """The cost of a step of this shape. Changes nothing."""

    def observe(self, shape: StepShape, measured_ns: int) -> None:
        """Learns that a step of this shape took `measured_ns`. A model with fixed constants does nothing."""


def largest_slice(model: CostModel, load: StepShape, start: int, most: int, budget_ns: int) -> int:
    """The most tokens of one sequence from `start`, at most `most`, that fit beside `load` into `budget_ns`; 0 if none.

    Works for every cost model: guesses by interpolation, which finds the slice of a nearly linear model in a few
    estimates, and halves after guesses that did not help much. Its last row counts as one that wants logits.
    """

    def bound_ns(tokens: int) -> int:
        return model.estimate(load.with_slice(start, tokens, 1)).bound_ns

    if most < 1 or (most_ns := bound_ns(most)) <= budget_ns:
        return max(0, most)
    fits, too_many = 0, most
    fits_ns, too_many_ns = model.estimate(load).bound_ns, most_ns
    if fits_ns > budget_ns:
        return 0
    guess = True
    while (between := too_many - fits) > 1:
        middle = fits + between // 2
        if guess:
            share = (budget_ns - fits_ns) * between // (too_many_ns - fits_ns)
            middle = fits + min(max(1, share), between - 1)
        if (middle_ns := bound_ns(middle)) <= budget_ns:
            fits, fits_ns = middle, middle_ns
        else:
            too_many, too_many_ns = middle, middle_ns
        guess = not guess or 4 * (too_many - fits) < between
    return fits
