"""Timelines made up at random, replies around outputs, and what every latency breakdown has to satisfy."""

import random
from collections.abc import Sequence
from itertools import pairwise

from twostep.core.reasons import Reason, Why
from twostep.engine.outputs import (
    ChoiceOutput,
    ChunkTime,
    DecodeTime,
    FinishReason,
    PreemptionTime,
    RequestOutput,
    Timeline,
    WaitTime,
)
from twostep.server.observe.finished_requests import Reply
from twostep.server.observe.latency_breakdown import ChoiceBreakdown, choice_breakdowns, latency_breakdown

REASONS = (
    Reason(Why.NO_SLOT, (4,)),
    Reason(Why.NO_BLOCKS, (0, 9, 3, 1)),
    Reason(Why.NO_BUDGET),
    Reason(Why.SHARES_PREFIX, (7,)),
)


def reply(
    *outputs: RequestOutput,
    id: str = "cmpl-1",
    received_ns: int | None = None,
    submitted_ns: int | None = None,
    sent_ns: int | None = None,
    status: int = 200,
    awaited: tuple[str, ...] = (),
    form_ns: int | None = None,
) -> Reply:
    """Around these outputs; times that are not given are a little before the first event and after the last."""
    lines = [choice.timeline for output in outputs for choice in output.choices]
    first_ns = min((line.arrival_ns for line in lines), default=0)
    last_ns = max((line.finish_ns or line.arrival_ns for line in lines), default=0)
    return Reply(
        id=id,
        endpoint="/v1/completions",
        model="small",
        stream=False,
        arrived_s=1_700_000_000.25,
        received_ns=first_ns - 3000 if received_ns is None else received_ns,
        submitted_ns=first_ns - 1000 if submitted_ns is None else submitted_ns,
        sent_ns=last_ns + 500 if sent_ns is None else sent_ns,
        status=status,
        outputs=outputs,
        prompt_ids=(*(output.id for output in outputs), *awaited),
        awaited=awaited,
        form_ns=form_ns,
    )


def output(*timelines: Timeline, id: str = "cmpl-1", reason: FinishReason = "length", cached: int = 0) -> RequestOutput:
    """One choice for each timeline."""
    choices = tuple(
        ChoiceOutput(index, "text", [5] * len(line.token_ns), reason, line) for index, line in enumerate(timelines)
    )
    return RequestOutput(id, [1, 2, 3, 4], choices, cached)


def random_timeline(rng: random.Random) -> Timeline:
    """What the engine might tell of one choice: any number of chunks, decodes and preemptions, cut off anywhere."""
    made = _Made(rng)
    for _ in range(rng.randint(0, 4)):
        made.seated()
        if rng.random() < 0.2:
            break
        made.preempted()
    return made.timeline()


class _Made:
    """A timeline in the making."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._arrival_ns = self._now = rng.randrange(10**12)
        self._first_ns: int | None = None
        self._held: tuple[WaitTime, ...] = ()
        self._chunks: list[ChunkTime] = []
        self._tokens: list[int] = []
        self._decodes: list[DecodeTime] = []
        self._preemptions: list[PreemptionTime] = []

    def _pass(self) -> int:
        """Time goes on, or not."""
        took_ns = self._rng.choice([0, 0, self._rng.randrange(5), self._rng.randrange(10**8)])
        self._now += took_ns
        return took_ns

    def _part(self, whole_ns: int) -> int:
        return self._rng.randint(0, whole_ns)

    def _reasons(self, waited_ns: int) -> tuple[WaitTime, ...]:
        held = []
        for reason in self._rng.sample(REASONS, self._rng.randint(0, 3)):
            held.append(WaitTime(reason, self._part(waited_ns), 1))
            waited_ns -= held[-1].ns
        return tuple(held)

    def seated(self) -> None:
        held = self._reasons(self._pass())
        if self._preemptions:
            last = self._preemptions.pop()
            self._preemptions.append(PreemptionTime(last.at_ns, last.tokens_lost, last.reason, held))
        else:
            self._held, self._first_ns = held, self._now
        for number in range(self._rng.randint(1, 5)):
            self._chunk(self._part(self._pass()) if number else 0)
        if self._rng.random() < 0.7:
            self._decode()

    def _chunk(self, without_ns: int) -> None:
        start_ns, took_ns = self._now, self._pass()
        kernel_ns = self._part(took_ns)
        alone_ns = self._part(kernel_ns)
        tokens, position = self._rng.randint(1, 512), self._rng.randint(0, 99)
        times = {"kernel_ns": kernel_ns, "alone_ns": alone_ns, "without_ns": without_ns}
        times["starved_ns"] = self._part(kernel_ns)
        step = len(self._chunks)
        self._chunks.append(ChunkTime(start_ns, self._now, tokens, step, position, **times))  # type: ignore[arg-type]

    def _decode(self) -> None:
        """The last chunk gave a token; decodes give more."""
        self._tokens.append(self._now)
        start_ns, steps = self._now, self._rng.randint(0, 6)
        for _ in range(steps):
            self._pass()
            self._tokens.append(self._now)
        if self._now > start_ns:
            kernel_ns = self._part(self._now - start_ns)
            alone_ns = self._part(kernel_ns)
            estimates = alone_ns, self._part(kernel_ns - alone_ns), self._part(kernel_ns)
            self._decodes.append(DecodeTime(start_ns, self._now, steps, 0, kernel_ns, 2 * steps, *estimates))

    def preempted(self) -> None:
        self._pass()
        why = self._rng.choice([Why.OUT_OF_BLOCKS, Why.STEP_FAILED])
        self._preemptions.append(PreemptionTime(self._now, self._rng.randint(0, 99), Reason(why, (3,))))

    def timeline(self) -> Timeline:
        self._pass()
        return Timeline(
            arrival_ns=self._arrival_ns,
            first_scheduled_ns=self._first_ns,
            chunks=tuple(self._chunks),
            token_ns=tuple(self._tokens),
            preemptions=tuple(self._preemptions),
            finish_ns=self._tokens[-1] if self._tokens and self._rng.random() < 0.5 and self._ended() else self._now,
            waits=self._held,
            decodes=tuple(self._decodes),
        )

    def _ended(self) -> bool:
        """Whether the last thing was a token."""
        events = [*(chunk.end_ns for chunk in self._chunks), *(one.at_ns for one in self._preemptions)]
        return self._tokens[-1] >= max(events)


# --- what every latency breakdown has to satisfy --------------------------------------------------------------------


def assert_exact(made: Reply) -> list[ChoiceBreakdown]:
    """Lines tile the time from the first stamp to the last, parts add up to them, to TTFT and to E2E: to the ns."""
    breakdowns = choice_breakdowns(made)
    timelines = [one.timeline for _, out in made.by_prompt() for one in out.choices]
    for breakdown, line in zip(breakdowns, timelines, strict=True):
        end_ns = max(made.sent_ns, line.finish_ns or 0)
        _assert_tiles(breakdown, made.received_ns, end_ns)
        for at_ns in (breakdown.first_token_ns, breakdown.last_token_ns):
            if at_ns is not None:
                assert sum(breakdown.parts(at_ns).values()) == at_ns - made.received_ns
        assert sum(breakdown.parts().values()) == end_ns - made.received_ns
    _assert_json_adds_up(latency_breakdown(made))
    return breakdowns


def _assert_tiles(breakdown: ChoiceBreakdown, start_ns: int, end_ns: int) -> None:
    lines = breakdown.lines
    assert breakdown.end_ns == end_ns
    if not lines:
        assert start_ns == end_ns
        return
    assert (lines[0].start_ns, lines[-1].end_ns) == (start_ns, end_ns)
    assert all(line.end_ns == later.start_ns for line, later in pairwise(lines))
    for line in lines:
        assert line.end_ns > line.start_ns
        assert sum(line.parts.values()) == line.end_ns - line.start_ns
        assert min(line.parts.values()) >= 0
        if held := line.details.get("held"):
            assert sum(one["ns"] for one in held) == line.end_ns - line.start_ns


def _assert_json_adds_up(whole: dict[str, object]) -> None:
    choices = whole["choices"]
    assert isinstance(choices, Sequence)
    for choice in choices:
        assert sum(line["ns"] for line in choice["lines"]) == choice["total"]["ns"]
        for span in (choice["ttft"], choice["e2e"], choice["total"]):
            assert span is None or sum(span["parts_ns"].values()) == span["ns"]
        limits_ns = choice["verdict"]["limits_ns"].values()
        assert sum(limits_ns) == choice["total"]["ns"]
        assert min(limits_ns) >= 0
