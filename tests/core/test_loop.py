"""The loop that serves: when it plans, what it tells whom, what a request that comes in mid-step meets."""

import pytest
from support.scheduling import MS, Session, config, text

from twostep.core.plan import Plan
from twostep.core.scheduler import Scheduler


class Counting(Scheduler):
    plans = 0

    def plan(self, now: int) -> Plan:
        self.plans += 1
        return super().plan(now)


def test_while_only_decodes_run_each_plan_is_made_once_beside_the_step_before() -> None:
    settings = config()
    session = Session(settings, scheduler=Counting)
    for i in range(8):
        session.ask(text(20, i), 100)
    for _ in range(10):
        session.turn()
    scheduler = session.scheduler
    assert isinstance(scheduler, Counting)
    before, steps = scheduler.plans, scheduler.counters.steps
    for _ in range(80):
        session.turn()
    assert (scheduler.plans - before, scheduler.counters.steps - steps) == (80, 80)


def test_who_comes_while_a_step_runs_is_in_the_next() -> None:
    session = Session(config())
    session.ask(text(200), 50)
    session.turn()
    newcomer = session.ask(text(20, 1), 1, at_ns=session.clock_ns + MS)
    session.turn()
    session.turn()
    assert [admission.number for admission in session.steps[-1].plan.admissions] == [2]
    assert session.life(newcomer).arrival_ns < session.clock_ns


def test_with_nothing_to_do_it_says_so_and_begins_no_step() -> None:
    session = Session(config())
    assert not session.turn()
    assert session.steps == []
    session.ask(text(20), 1)
    assert session.turn()
    assert not session.turn()
    assert len(session.steps) == 1


def test_a_step_that_was_interrupted_is_taken_up_again() -> None:
    session = Session(config())
    name = session.ask(text(20), 10)
    poll = session.executor.poll

    def interrupted() -> None:
        session.executor.poll = poll  # type: ignore[method-assign]
        raise KeyboardInterrupt

    session.turn()
    session.executor.poll = interrupted  # type: ignore[assignment, method-assign]
    with pytest.raises(KeyboardInterrupt):
        session.turn()
    session.run()
    session.check_answers()
    assert len(session.life(name).token_ns) == 10
