"""What is always true of a scheduler between its calls; tests ask after each."""

from typing import TYPE_CHECKING

from twostep.core.request import Stage

if TYPE_CHECKING:
    from twostep.core.scheduler import Scheduler


def check_books(scheduler: "Scheduler") -> None:
    """Raises `AssertionError` that names what is broken."""
    _check_places(scheduler)
    _check_counts(scheduler)
    scheduler.standing.check()
    scheduler.cache.check(list(scheduler.live.values()))
    assert scheduler.running <= scheduler.config.seats, "more run than there are seats"


def _check_places(scheduler: "Scheduler") -> None:
    """Each live sequence is in exactly the one place that its stage names."""
    places = {
        Stage.WAITING: list(scheduler.waiting),
        Stage.PREFILL: list(scheduler.prefill.values()),
        Stage.STANDING: list(scheduler.standing.members),
        Stage.PENDING: list(scheduler.pending.values()),
        Stage.ATTACHED: [sibling for seq in scheduler.live.values() for sibling in seq.siblings],
    }
    found = [seq.number for sequences in places.values() for seq in sequences]
    assert sorted(found) == sorted(scheduler.live), "a live sequence is in no place, or in two"
    assert all(seq.stage is stage for stage, here in places.items() for seq in here), "a stage is not the place"


def _check_counts(scheduler: "Scheduler") -> None:
    """No negative counts, no token computed that is not known, and blocks for all that is computed."""
    for seq in scheduler.live.values():
        if seq.stage in (Stage.WAITING, Stage.ATTACHED):
            assert (seq.computed, seq.tables) == (0, ()), f"{seq.number} waits, but holds blocks"
            continue
        computed = scheduler.computed(seq)
        known = computed + 1 if seq.stage is Stage.STANDING else seq.known
        assert 0 <= computed <= known + seq.drafts <= seq.limit + seq.drafts, f"{seq.number}: counts"
        assert computed <= scheduler.cache.capacity(seq), f"{seq.number}: positions without a block"
