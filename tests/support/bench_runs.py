"""Runs of a benchmark as they might have been: a server with one line and given rates, without any server."""

from collections.abc import Sequence
from datetime import UTC, datetime
from random import Random

from twostep.bench.client.outcome import Failure, FailureKind, Outcome
from twostep.bench.load.run_record import End, RunRecord, Server
from twostep.bench.load.sweep import Verdict
from twostep.bench.report.result import ClientMachine, EngineStep, Result, Run, WorkloadFacts
from twostep.metrics.load import Limits
from twostep.metrics.summary import Summary, summarise
from twostep.workload.schedule import Closed, Mode, Open

S = 1_000_000_000
MS = 1_000_000
STARTED = datetime(2026, 11, 29, 12, 0, 0, 123456, tzinfo=UTC)
CLIENT = ClientMachine("A <fast> CPU & more", 2, "Linux 6.1", "3.11.2", "0.1.0")


def outcome(number: int, due_ns: int, *token_ns: int, failure: Failure | None = None, **changes: object) -> Outcome:
    """Sent when due; over with its last token."""
    members = {
        "number": number, "due_ns": due_ns, "sent_ns": due_ns, "token_ns": token_ns,
        "ended_ns": token_ns[-1] if token_ns else due_ns + S, "asked_input_tokens": 100,
        "asked_output_tokens": len(token_ns), "failure": failure,
    }  # fmt: skip
    return Outcome(**(members | changes))  # type: ignore[arg-type]


def queue(rate: float, requests: int = 60, seed: int = 1, fail: float = 0.0) -> list[Outcome]:
    """Poisson arrivals, one prefill of 50 ms at a time, 20 tokens of 20 ms each; some fail."""
    random, made = Random(seed), list[Outcome]()
    due = free = 0.0
    for number in range(requests):
        due += random.expovariate(rate)
        free = max(due, free) + 0.05
        gaps = [free * S, *(S * random.uniform(0.015, 0.04) for _ in range(19))]
        tokens = [int(sum(gaps[: i + 1])) for i in range(20)]
        if random.random() < fail:
            failure = Failure(random.choice([FailureKind.DROPPED, FailureKind.STALLED]), "after 7 tokens: <b>gone</b>")
            made.append(outcome(number, int(due * S), *tokens[:7], failure=failure, asked_output_tokens=20))
        else:
            made.append(outcome(number, int(due * S), *tokens))
    return made


def run(
    outcomes: Sequence[Outcome],
    rate: float | None = 4.0,
    mode: Mode = Open(),  # noqa: B008, it is frozen
    limits: Limits = Limits(),  # noqa: B008
    late: Summary | None = None,
    model: str = "small",
    steps: tuple[EngineStep, ...] = (),
) -> Run:
    lateness = late or summarise((one.sent_ns - one.due_ns) / S for one in outcomes)
    server = Server("http://127.0.0.1:8000/v1", "completions", model, "twostep")
    record = RunRecord(server, "chat", "made up", mode, STARTED, tuple(outcomes), End.WHOLE, lateness, None, "salt")
    inputs = sum(one.asked_input_tokens for one in outcomes)
    facts = WorkloadFacts(len(outcomes), inputs, 64, sum(one.asked_output_tokens for one in outcomes))
    return Run(record, facts, limits, None if isinstance(mode, Closed) else rate, steps)


def result(*runs: Run, sweep: Verdict | None = None) -> Result:
    return Result(("twostep", "bench", "--url", "http://127.0.0.1:8000"), CLIENT, runs, sweep)
