"""A whole workload on simulated replicas: each is the real loop and scheduler with a modelled executor, all on one
virtual clock, behind one front end and one router."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from twostep.config.configs import SchedulerSettings
from twostep.core.cost import CostModel
from twostep.core.loop import Clock, EngineLoop, Inbox, Observer
from twostep.core.plan import Plan
from twostep.core.request import BLOCK_TOKENS, Request, blocks_for
from twostep.core.routing import ReplicaLoad, place, prefill_ns
from twostep.core.scheduler import Counters, Scheduler
from twostep.errors import InvalidParameterError
from twostep.recording.writer import RecordedSurroundings, Recorder
from twostep.sim.events import EventQueue, LoopHost
from twostep.sim.modelled import (
    Arrival,
    ChoiceTimes,
    ModelledExecutor,
    SimulatedClient,
    SimulatedStep,
    VirtualClock,
)
from twostep.sim.noise import Noise, Sample
from twostep.sim.prompt_blocks import PromptBlocks
from twostep.workload.definition import Workload
from twostep.workload.schedule import Mode, Schedule, schedule


@dataclass(frozen=True)
class FrontEndCosts:
    """What a front end needs, in nanoseconds: measured, or stated by whoever simulates. It reads one request at a
    time, in the order in which they were sent."""

    request_ns: int = 0
    """To read a request."""
    prompt_token_ns: int = 0
    """More of the same, for each prompt token."""
    reply_ns: int = 0
    """From the end of a step until the client has its tokens."""


@dataclass(frozen=True)
class ReplicaSpec:
    """One kind of replica.

    `cost`: how long the kernels of a step take. `planner_cost`: makes the model that a scheduler plans with and
    teaches; None: `cost` itself, which knows. `host_ns`: between the kernels of two steps. `residuals`: relative errors
    of predicted steps, measured less predicted, from which the noise of each step is drawn; empty: no noise.
    """

    settings: SchedulerSettings
    cost: CostModel
    planner_cost: Callable[[], CostModel] | None = None
    host_ns: int = 0
    residuals: Sequence[float] = ()

    @property
    def longest(self) -> int:
        """Most tokens of prompt and answer together: those of the context, of all KV blocks (the last token of an
        answer needs none), or of a step if prompts are never cut."""
        settings = self.settings
        full = [blocks for blocks, window in zip(settings.blocks, settings.windows, strict=True) if not window]
        limits = [settings.max_model_len, *(blocks * BLOCK_TOKENS + 1 for blocks in full)]
        return min(limits if settings.chunking.least_tokens else [*limits, settings.max_num_batched_tokens])


@dataclass(slots=True)
class SimulatedRequest:
    """What the client of one request would have seen; nanoseconds since the start of the run."""

    number: int
    due_ns: int
    sent_ns: int
    replica: int | None = None
    """None: still in the front end."""
    token_ns: tuple[int, ...] = ()
    ended_ns: int | None = None
    """None: the run was over first."""
    cached_tokens: int = 0
    refusal: str | None = None
    preemptions: int = 0


@dataclass(frozen=True)
class ReplicaRun:
    """One replica at the end of a run."""

    steps: Sequence[SimulatedStep]
    counters: Counters
    waiting: int
    """Requests without a slot at the end."""
    running: int
    """Requests with one."""
    most_blocks: int
    """Most KV blocks of full attention in use after a step."""


@dataclass(frozen=True)
class Simulation:
    """A whole run. `requests`: those that were sent, by number."""

    requests: Sequence[SimulatedRequest]
    replicas: Sequence[ReplicaRun]
    ended_ns: int
    whole: bool
    """All requests of the workload were sent and have ended."""
    in_front_end: int = 0
    """Requests that had not reached a replica at the end."""


WithRecorder = Callable[[Clock, Inbox, Observer], tuple[Clock, Inbox, Observer]]
"""Wraps a loop's surroundings, to record what passes between them and the loop."""


def unrecorded(clock: Clock, inbox: Inbox, observer: Observer) -> tuple[Clock, Inbox, Observer]:
    """Leaves them as they are."""
    return clock, inbox, observer


def recorded_by(recorder: Recorder) -> WithRecorder:
    """Records the loop, for `twostep replay`."""

    def recorded(clock: Clock, inbox: Inbox, observer: Observer) -> tuple[Clock, Inbox, Observer]:
        around = RecordedSurroundings(clock, inbox, observer, recorder)
        return around, around, around

    return recorded


def simulate(
    workload: Workload,
    mode: Mode,
    replicas: Sequence[ReplicaSpec],
    *,
    front_end: FrontEndCosts = FrontEndCosts(),
    prefix_caching: bool = True,
    seed: int = 0,
    limit_s: float | None = None,
    recorded: WithRecorder = unrecorded,
    progress: Callable[[int, int], None] = lambda ended, now_ns: None,
) -> Simulation:
    """Runs `workload` to its end, or until `limit_s` of virtual time. The same arguments give the same result.

    `recorded` wraps the surroundings of the first replica. `progress` is called now and then with the number of
    requests that have ended and the virtual time.

    Raises `InvalidParameterError` for a workload without requests, or with one that no replica could serve.
    """
    _check(workload, replicas)
    queue = EventQueue(VirtualClock())
    engines = [
        _Replica(spec, queue, f"{seed} noise {i}", *([recorded] if i == 0 else [])) for i, spec in enumerate(replicas)
    ]
    blocks = PromptBlocks(workload.block_tokens) if prefix_caching else None
    run = _Run(workload, schedule(workload.requests, mode), engines, queue, _FrontEnd(front_end), blocks, progress)
    return run.run(None if limit_s is None else round(limit_s * 1e9))


def _check(workload: Workload, replicas: Sequence[ReplicaSpec]) -> None:
    if not replicas:
        raise InvalidParameterError("replicas is 0; it has to be at least 1", "replicas")
    if not workload.requests:
        raise InvalidParameterError("workload: it has no requests, so that there is nothing to simulate", "workload")
    longest = min(spec.longest for spec in replicas)
    too_long = [n for n, one in enumerate(workload.requests) if one.input_tokens + one.output_tokens > longest]
    if too_long:
        first = workload.requests[too_long[0]]
        most = max(one.input_tokens + one.output_tokens for one in workload.requests)
        raise InvalidParameterError(
            f"workload: {len(too_long)} of {len(workload.requests)} requests do not fit. The first is request "
            f"{too_long[0]} with {first.input_tokens} + {first.output_tokens} tokens, the longest has {most}; a "
            f"replica holds at most {longest}. Clip with --max-input and --max-output, or raise --max-model-len or "
            "--kv-memory",
            "workload",
        )


class _Replica:
    """One simulated engine, and what a router knows of it."""

    def __init__(
        self,
        spec: ReplicaSpec,
        queue: EventQueue,
        noise_seed: str,
        recorded: WithRecorder = unrecorded,
    ) -> None:
        self.spec, self._queue = spec, queue
        self.on_end: Callable[[ChoiceTimes], None] = lambda times: None
        """Called when a request has ended here or was refused."""
        noise = (
            Noise([Sample(1.0 + residual) for residual in spec.residuals]).draws(noise_seed) if spec.residuals else None
        )
        executor = ModelledExecutor(spec.cost, queue.clock, spec.host_ns, noise)
        self.client = SimulatedClient(executor, self._ended, self._step_ended)
        self.scheduler = Scheduler(spec.settings.config(), spec.planner_cost() if spec.planner_cost else spec.cost)
        clock, inbox, observer = recorded(queue.clock, self.client, self.client)
        loop = EngineLoop(self.scheduler, executor, clock=clock, inbox=inbox, observer=observer)
        self._host = LoopHost(queue, loop, executor, self.client)
        self._queued_ns: dict[str, int] = {}
        """Predicted prefill of the requests without a first token."""
        self._ended_count = 0
        self.most_blocks = 0

    def load(self) -> ReplicaLoad:
        scheduler, now_ns = self.scheduler, self._queue.clock.now_ns
        return ReplicaLoad(
            sum(self._queued_ns.values()),
            len(scheduler.decode_batch),
            len(scheduler.waiting),
            0 if self._lacks_blocks() else self.spec.settings.max_num_seqs - scheduler.running,
            now_ns // self._ended_count if self._ended_count else 0,
        )

    def _lacks_blocks(self) -> bool:
        """Whether the first waiting prompt has to wait until others return their blocks."""
        scheduler = self.scheduler
        first = next(iter(scheduler.waiting), None)
        if first is None:
            return False
        needed, kept = blocks_for(first.known), scheduler.reserved_blocks()
        return any(free - reserve < needed for free, reserve in zip(scheduler.cache.free, kept, strict=True))

    def prefill_ns(self, request: Request) -> int:
        """Predicted for this prompt here."""
        most = (request.prompt_tokens - 1) // BLOCK_TOKENS
        cached = self.scheduler.cache.match(request.hashes, min(most, len(request.hashes))) * BLOCK_TOKENS
        return prefill_ns(self.spec.cost, request.prompt_tokens, cached)

    def submit(self, arrival: Arrival, request: Request, predicted_ns: int) -> None:
        """Puts the request into the inbox, and counts its prefill as queued."""
        self._queued_ns[request.id] = predicted_ns
        self._host.arrive(arrival)

    def _step_ended(self, plan: Plan) -> None:
        pool = self.scheduler.cache.pools[0]
        self.most_blocks = max(self.most_blocks, pool.count - pool.free)
        for chunk in plan.chunks:
            if chunk.samples and (seq := self.scheduler.live.get(chunk.number)):
                self._queued_ns.pop(seq.request.id, None)

    def _ended(self, times: ChoiceTimes) -> None:
        self._queued_ns.pop(times.request_id, None)
        self._ended_count += 1
        self.on_end(times)

    def result(self) -> ReplicaRun:
        scheduler = self.scheduler
        waiting = len(scheduler.waiting) + self.client.unread
        return ReplicaRun(self.client.steps, scheduler.counters, waiting, scheduler.running, self.most_blocks)


class _FrontEnd:
    """Reads one request at a time, in the order in which they were sent."""

    def __init__(self, costs: FrontEndCosts) -> None:
        self.costs = costs
        self.inside = 0
        """Requests in it."""
        self._free_ns = 0

    def passes_ns(self, now_ns: int, prompt_tokens: int) -> int:
        """When a request that is sent now reaches the router."""
        costs = self.costs
        self._free_ns = max(self._free_ns, now_ns) + costs.request_ns + prompt_tokens * costs.prompt_token_ns
        return self._free_ns


class _Run:
    """One run: sends what the schedule says, routes it, and collects what clients see."""

    EVERY_REQUESTS = 256
    """Ended requests between two calls of `progress`."""

    def __init__(
        self,
        workload: Workload,
        schedule: Schedule,
        replicas: Sequence[_Replica],
        queue: EventQueue,
        front_end: _FrontEnd,
        blocks: PromptBlocks | None,
        progress: Callable[[int, int], None],
    ) -> None:
        """`blocks`: None without a prefix cache."""
        self._requests, self._schedule, self._replicas = workload.requests, schedule, replicas
        self._queue, self._front_end, self._blocks, self._progress = queue, front_end, blocks, progress
        self._longest = min(replica.spec.longest for replica in replicas)
        self._sent: dict[int, SimulatedRequest] = {}
        self._ended_count = 0
        self._wake_ns: int | None = None
        for replica in replicas:
            replica.on_end = self._ended

    def run(self, limit_ns: int | None) -> Simulation:
        self._queue.at(0, self._send_due)
        self._queue.run(limit_ns)
        for times in (times for replica in self._replicas for times in replica.client.cut()):
            self._note(times)
        requests = [self._sent[number] for number in sorted(self._sent)]
        whole = len(requests) == len(self._requests) == self._ended_count
        ended_ns = max((one.ended_ns or 0 for one in requests), default=0) if whole else self._queue.clock.now_ns
        results = [replica.result() for replica in self._replicas]
        return Simulation(requests, results, ended_ns, whole, self._front_end.inside)

    # --- requests come ----------------------------------------------------------------------------------------------

    def _send_due(self) -> None:
        now_ns = self._queue.clock.now_ns
        for number, due_ns in self._schedule.take(now_ns):
            self._sent[number] = SimulatedRequest(number, due_ns, now_ns)
            self._front_end.inside += 1
            passes_ns = self._front_end.passes_ns(now_ns, self._requests[number].input_tokens)
            self._queue.at(passes_ns, partial(self._submit, number))
        next_ns = self._schedule.next_ns()
        if next_ns is not None and next_ns != self._wake_ns:
            self._wake_ns = next_ns
            self._queue.at(next_ns, self._send_due)

    def _submit(self, number: int) -> None:
        """Routes a request that has passed the front end. Its scheduler is not told how long the answer will be."""
        self._front_end.inside -= 1
        asked = self._requests[number]
        hashes = self._blocks.names(number, asked) if self._blocks else ()
        request = Request(str(number), asked.input_tokens, self._longest - asked.input_tokens, hashes)
        chosen, predicted_ns = self._place(request)
        self._sent[number].replica = chosen
        arrival = Arrival(self._queue.clock.now_ns, request, (asked.output_tokens,))
        self._replicas[chosen].submit(arrival, request, predicted_ns)

    def _place(self, request: Request) -> tuple[int, int]:
        """The replica for this request, and the predicted time of its prefill there; 0 where there is no choice."""
        if len(self._replicas) == 1:
            return 0, 0
        prefills = [replica.prefill_ns(request) for replica in self._replicas]
        chosen = place([replica.load() for replica in self._replicas], prefills).replica
        return chosen, prefills[chosen]

    # --- requests end -----------------------------------------------------------------------------------------------

    def _ended(self, times: ChoiceTimes) -> None:
        """The engine is done with a request; its client knows a little later."""
        assert times.finish_ns is not None, "it has ended"
        request = self._note(times)
        request.ended_ns = times.finish_ns + self._front_end.costs.reply_ns
        self._ended_count += 1
        if self._ended_count % self.EVERY_REQUESTS == 0:
            self._progress(self._ended_count, times.finish_ns)
        self._queue.at(request.ended_ns, partial(self._client_ended, request.number))

    def _note(self, times: ChoiceTimes) -> SimulatedRequest:
        """Keeps what the client has seen of a request."""
        request, reply_ns = self._sent[int(times.request_id)], self._front_end.costs.reply_ns
        request.token_ns = tuple([at_ns + reply_ns for at_ns in times.token_ns])
        request.cached_tokens, request.preemptions = times.cached_tokens, len(times.preempted_ns)
        request.refusal = times.reason if type(times.reason) is str else None
        return request

    def _client_ended(self, number: int) -> None:
        self._schedule.ended(number, self._queue.clock.now_ns)
        self._send_due()
