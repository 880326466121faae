"""The format of recordings: converts input and output of the scheduler to compact JSON and back, without loss.

A recording is lines of JSON. The first is an object: format, version, settings, about, costs. Each further line is a
turn of the loop: `[times, before, during, result, plan]`, or `[times, before]` if it ran no step.

    times     ns; each reading of the clock by the loop, as difference to the previous one
    before    requests and aborts received before the step was planned, in order
    during    requests and aborts received while the step ran
    request   ["+", id, prompt tokens, max tokens, hashes, priority, choices, arrived tokens], and if another scheduler
              was serving it, a list of the output tokens that each choice has
    abort     ["-", id, choice or null]
    result    [ns, [[sequence, tokens, finished or null, drafts], ...], [[sequence, hashes], ...], failed, starved ns]
    hashes    base64 of all hashes, concatenated
    plan      the fields of `Plan` in order, without `next_wake_ns`, which only a plan without a step has

`decode_*` and `encode_*` are inverse. Decoding checks every value: `RecordingError` names the field.
"""

from base64 import b64decode, b64encode
from collections.abc import Iterable
from json import JSONEncoder

from twostep.core.blocks import HASH_BYTES
from twostep.core.cost import StepShape
from twostep.core.loop import Abort, Command
from twostep.core.plan import Admission, Chunk, NotAdmitted, Plan, Preemption, SliceOutcome, StepResult
from twostep.core.promise import Promise
from twostep.core.reasons import Reason, Why
from twostep.core.request import FinishReason, Request
from twostep.recording.values import flag, many, record, text, whole, wholes, wrong

FORMAT = 4
"""1 had four numbers for a step's shape, and other names of reasons. 3 had no costs in its header, no promises, and no
time without cores."""

_to_json = JSONEncoder(separators=(",", ":"), check_circular=False).encode


def to_bytes(value: object) -> bytes:
    """Compact ASCII JSON on one line; deterministic."""
    return _to_json(value).encode()


# --- commands -----------------------------------------------------------------------------------------------------


def encode_command(command: Command) -> list[object]:
    if isinstance(command, Abort):
        return ["-", *command]
    c = command
    hashes = _encode_hashes(c.hashes)
    given = [c.given] if c.given else []
    return ["+", c.id, c.prompt_tokens, c.max_tokens, hashes, c.priority, c.choices, c.arrived_tokens, *given]


def decode_command(value: object) -> Command:
    match value:
        case ["+", *fields]:
            return _decode_request(fields)
        case ["-", id_, choice]:
            return Abort(text(id_, "abort: id"), None if choice is None else whole(choice, "abort: choice"))
    wrong("command", value, 'a request ["+", ...] or an abort ["-", id, choice]')


def _decode_request(value: list[object]) -> Request:
    given = value.pop() if len(value) == 8 else []
    id_, prompt_tokens, max_tokens, hashes, priority, choices, arrived_tokens = record(value, "request", 7)
    return Request(
        text(id_, "request: id"),
        whole(prompt_tokens, "request: prompt tokens", 1),
        whole(max_tokens, "request: max tokens", 1),
        _decode_hashes(hashes, "request: hashes"),
        whole(priority, "request: priority", None),
        whole(choices, "request: choices", 1),
        whole(arrived_tokens, "request: arrived tokens"),
        wholes(many(given, "request: given"), "request: given"),
    )


def _encode_hashes(hashes: Iterable[bytes]) -> str:
    """Raises `ValueError` for a hash of the wrong length, which would shift all following hashes."""
    hashes = tuple(hashes)
    if any(len(name) != HASH_BYTES for name in hashes):
        raise ValueError(f"a block hash must have {HASH_BYTES} bytes")
    return b64encode(b"".join(hashes)).decode()


def _decode_hashes(value: object, name: str) -> tuple[bytes, ...]:
    encoded = text(value, name)
    try:
        joined = b64decode(encoded, validate=True)
    except ValueError:
        wrong(name, value, "base64")
    if len(joined) % HASH_BYTES or b64encode(joined).decode() != encoded:
        wrong(name, value, f"base64 of hashes of {HASH_BYTES} bytes")
    return tuple(joined[i : i + HASH_BYTES] for i in range(0, len(joined), HASH_BYTES))


# --- results ------------------------------------------------------------------------------------------------------


def encode_result(result: StepResult) -> list[object]:
    outcomes = [
        (number, tokens, finished and finished.value, drafts)
        for number, (tokens, finished, drafts) in result.outcomes.items()
    ]
    hashes = [(number, _encode_hashes(names)) for number, names in result.hashes.items()]
    return [result.step_ns, outcomes, hashes, int(result.failed), result.starved_ns]


def decode_result(value: object) -> StepResult:
    step_ns, outcomes, hashes, failed, starved_ns = record(value, "result", 5)
    return StepResult(
        whole(step_ns, "result: ns"),
        dict(_decode_outcome(item) for item in many(outcomes, "result: outcomes")),
        dict(_decode_filled(item) for item in many(hashes, "result: hashes")),
        flag(failed, "result: failed"),
        whole(starved_ns, "result: starved ns"),
    )


def _decode_outcome(value: object) -> tuple[int, SliceOutcome]:
    number, tokens, finished, drafts = record(value, "outcome", 4)
    reason = None if finished is None else _decode_finish(finished)
    return (
        whole(number, "outcome: sequence", 1),
        SliceOutcome(whole(tokens, "outcome: tokens", 1), reason, whole(drafts, "outcome: drafts")),
    )


def _decode_finish(value: object) -> FinishReason:
    try:
        return FinishReason(value)
    except ValueError:
        wrong("outcome: finished", value, ", ".join(reason.value for reason in FinishReason))


def _decode_filled(value: object) -> tuple[int, tuple[bytes, ...]]:
    number, names = record(value, "filled blocks", 2)
    return whole(number, "filled blocks: sequence", 1), _decode_hashes(names, "filled blocks: hashes")


# --- plans --------------------------------------------------------------------------------------------------------


def encode_plan(plan: Plan) -> list[object]:
    return [
        plan.step,
        plan.changes,
        plan.decoding,
        plan.open,
        [(number, lost, _encode_reason(reason)) for number, lost, reason in plan.preemptions],
        plan.admissions,
        [(*chunk[:3], int(chunk.samples), _encode_reason(chunk.reason), *chunk[5:]) for chunk in plan.chunks],
        [(number, _encode_reason(reason)) for number, reason in plan.not_admitted],
        plan.shape,
        plan.predicted_ns,
        plan.promise,
    ]


def decode_plan(value: object) -> Plan:
    *fields, shape, predicted_ns, promise = record(value, "plan", 11)
    step, changes, decoding, open_, preemptions, admissions, chunks, not_admitted = fields
    return Plan(
        whole(step, "plan: step", 1),
        whole(changes, "plan: changes"),
        whole(decoding, "plan: decoding"),
        whole(open_, "plan: open"),
        tuple(_decode_preemption(item) for item in many(preemptions, "plan: preemptions")),
        tuple(_decode_admission(item) for item in many(admissions, "plan: admissions")),
        tuple(_decode_chunk(item) for item in many(chunks, "plan: chunks")),
        tuple(_decode_not_admitted(item) for item in many(not_admitted, "plan: not admitted")),
        StepShape(*(whole(count, "plan: shape") for count in record(shape, "plan: shape", len(StepShape._fields)))),
        None if predicted_ns is None else whole(predicted_ns, "plan: predicted ns"),
        None if promise is None else Promise(*wholes(record(promise, "plan: promise", 3), "plan: promise")),
    )


def _encode_reason(reason: Reason) -> list[object]:
    return [reason.why.name, *reason.numbers]


def _decode_reason(value: object) -> Reason:
    """Decodes a reason and the numbers of its message."""
    match value:
        case [str(name), *numbers] if name in Why.__members__:
            why = Why[name]
            return Reason(why, wholes(record(numbers, f"reason {name}", why.value.count("{")), f"reason {name}"))
    wrong("reason", value, f"one of {', '.join(Why.__members__)}, and its numbers")


def _decode_preemption(value: object) -> Preemption:
    number, lost, reason = record(value, "preemption", 3)
    return Preemption(whole(number, "preemption: sequence"), whole(lost, "preemption: lost"), _decode_reason(reason))


def _decode_admission(value: object) -> Admission:
    return Admission(*wholes(record(value, "admission", 4), "admission"))


def _decode_chunk(value: object) -> Chunk:
    number, start, tokens, samples, reason, drafts, forks = record(value, "chunk", 7)
    return Chunk(
        whole(number, "chunk: sequence"),
        whole(start, "chunk: start"),
        whole(tokens, "chunk: tokens", 1),
        flag(samples, "chunk: samples"),
        _decode_reason(reason),
        whole(drafts, "chunk: drafts"),
        wholes(forks, "chunk: forks"),
    )


def _decode_not_admitted(value: object) -> NotAdmitted:
    number, reason = record(value, "not admitted", 2)
    return NotAdmitted(whole(number, "not admitted: sequence"), _decode_reason(reason))
