"""How the promise of a time budget was kept, as the engine counts it and says it."""

import pytest
from support.scheduling import MS, TrueModel

from twostep.core.cost import StepShape, decode_shape
from twostep.core.plan import Chunk, Plan
from twostep.core.promise import Promise
from twostep.core.reasons import WHOLE
from twostep.engine.timing.meter import StepMeter
from twostep.engine.timing.promises import Promised, PromiseMeter

DECODES = decode_shape(4, 400)
DECODES_NS = TrueModel().estimate(DECODES).bound_ns
"""7.4 ms."""


def plan(budget_ns: int, chunk: int = 0, decoding: int = 4) -> Plan:
    shape = DECODES.with_slice(0, chunk, 0) if chunk else DECODES
    return Plan(
        9,
        0,
        decoding,
        chunks=(Chunk(7, 0, chunk, False, WHOLE),) if chunk else (),
        shape=shape,
        predicted_ns=TrueModel().estimate(shape).bound_ns,
        promise=Promise(budget_ns, MS, DECODES_NS),
    )


def test_steps_that_kept_it_or_were_late() -> None:
    meter = PromiseMeter(TrueModel())
    for took_ns, starved_ns in ((39 * MS, 0), (40 * MS, 0), (41 * MS, 0), (41 * MS, 9 * MS)):
        meter.add(plan(40 * MS), took_ns, starved_ns, took_ns)
    meter.add(Plan(1, 0, 0, shape=StepShape(20)), 500 * MS, 0, 500 * MS)
    assert meter.promised() == Promised(budget_ns=40 * MS, steps=4, late=2, late_starved=1)
    assert meter.take_notes() == []


def test_a_budget_below_the_decodes_is_said_once_for_a_batch_of_this_size() -> None:
    meter = PromiseMeter(TrueModel())
    for _ in range(10):
        meter.add(plan(5 * MS), 8 * MS, 0, 8 * MS)
    assert meter.take_notes() == [
        "the ITL budget of 5.0 ms cannot be kept on this machine: a step takes up to 8.4 ms where 4 sequences decode; "
        "the least possible for this batch is 8.4 ms. Prompts advance slowly meanwhile"
    ]
    assert meter.take_notes() == []
    meter.add(plan(5 * MS, decoding=5), 8 * MS, 0, 8 * MS)
    assert meter.take_notes() == [], "about as many"
    meter.add(plan(5 * MS, decoding=8), 8 * MS, 0, 8 * MS)
    assert len(meter.take_notes()) == 1
    assert meter.promised().over_decodes == 12
    assert meter.promised().least_ns == DECODES_NS + MS


def test_a_budget_without_time_for_a_token_of_a_prompt_is_another_situation() -> None:
    """The least possible budget holds one token, though the step has a share of 16."""
    meter = PromiseMeter(TrueModel())
    meter.add(plan(9 * MS, chunk=16), 24 * MS, 0, 24 * MS)
    [note] = meter.take_notes()
    assert "4 sequences decode, which leaves no time for a token of a prompt; the least possible" in note
    assert "is 9.3 ms." in note
    found = meter.promised()
    assert (found.over_decodes, found.over_prompts, found.late) == (0, 1, 0)
    one_token = TrueModel().estimate(DECODES.with_slice(0, 1, 0)).bound_ns
    assert found.least_ns == one_token + MS


@pytest.mark.parametrize(("failed", "steps"), [(False, 1), (True, 0)])
def test_the_meter_counts_steps_that_did_not_fail(failed: bool, steps: int) -> None:
    meter = StepMeter(TrueModel())
    meter.add(plan(40 * MS), 8 * MS, 0, 100 * MS, failed=failed)
    assert meter.measured().promised.steps == steps
