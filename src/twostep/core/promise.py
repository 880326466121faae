"""The promise of a time budget: what a step with decodes may take, what of that is not the kernels', and by how much a
step may knowingly take longer so that prompts advance.

`Promise` is made anew for every step, since the batch, the machine and the budget (`auto`) change.
"""

from typing import NamedTuple

DELAY_PARTS = 8
"""Where no token of a prompt fits, prompts lengthen the steps of those that decode by an 8th."""


class Promise(NamedTuple):
    """What a step with decodes has to keep to, in ns."""

    budget_ns: int
    """The longest time between two tokens of a sequence that decodes."""
    overhead_ns: int
    """Of it, what passes outside the kernels, see `HostTime`."""
    decodes_ns: int
    """Upper bound of the kernels' time for the decodes alone."""

    @property
    def kernels_ns(self) -> int:
        """What is left for the kernels; may be negative."""
        return self.budget_ns - self.overhead_ns

    @property
    def decodes_exceed(self) -> bool:
        """Whether the budget is impossible: the decodes alone take longer."""
        return self.decodes_ns > self.kernels_ns

    def slowed_ns(self, token_ns: int) -> int:
        """What the kernels may take where not one token of a prompt fits: an 8th more than for the decodes, or
        `token_ns`, the bound with one token, so that prompts always advance."""
        return max(token_ns, self.decodes_ns + self.decodes_ns // DELAY_PARTS)


class HostTime:
    """Learns how long passes between the kernels of two successive steps: results, plans, sending.

    After a step that gave first tokens it is longer: the engine's host pauses, so that they reach their clients before
    the next step takes all cores. Learned apart, hence part of what is planned with, whoever hosts the loop.
    """

    SMOOTHING = 1 / 16
    DEVIATIONS = 3.0
    """Of the bound, above the mean."""
    MOST = 4
    """A value above so many bounds counts as that: one long pause says little about the next."""

    def __init__(self) -> None:
        self._means = [200_000.0, 1_200_000.0]
        """After other steps, and after those that gave first tokens; in ns, first guesses."""
        self._deviations = [100_000.0, 100_000.0]

    def bound_ns(self, *, after_first_tokens: bool) -> int:
        return int(self._means[after_first_tokens] + self.DEVIATIONS * self._deviations[after_first_tokens])

    def observe(self, took_ns: int, *, after_first_tokens: bool) -> None:
        """The kernels paused for `took_ns` between the step before and this one."""
        which = after_first_tokens
        value = min(max(0, took_ns), self.MOST * self.bound_ns(after_first_tokens=which))
        error = value - self._means[which]
        self._means[which] += self.SMOOTHING * error
        self._deviations[which] += self.SMOOTHING * (abs(error) - self._deviations[which])
