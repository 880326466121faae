"""Requests come, go and fail in any order on tiny caches: the books balance, every plan can be carried out, all end."""

from collections.abc import Callable

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.checked_executor import CheckedExecutor, answer_alone
from support.plan_rules import planned
from support.scheduling import ROOT, TrueModel

from twostep.core.blocks import prompt_hashes
from twostep.core.kv_cache import BlockGroup
from twostep.core.plan import Finished, Plan, Step
from twostep.core.policies import (
    Batching,
    ChunkPolicy,
    Continuous,
    Order,
    ShortestPrefill,
    Static,
    TimeBudget,
    TokenBudget,
    Unchunked,
    by_priority,
    fcfs,
)
from twostep.core.request import FinishReason, Request
from twostep.core.scheduler import NeverFitsError, Scheduler, SchedulerConfig

CONTEXT_TOKENS = 240
LEAST_SHARES = 16 * 16
SHARED_TEXT = [(7 * i) % 251 for i in range(CONTEXT_TOKENS)]
"""Prompts begin with a part of it, so that they share prefixes."""
CHUNKINGS: list[ChunkPolicy] = [
    Unchunked(60),
    TokenBudget(8),
    TokenBudget(50),
    TimeBudget(20_000_000),
    TimeBudget(90_000_000),
]
BATCHINGS: list[Batching] = [Continuous(), Static(3)]
ORDERS: list[Order] = [fcfs, by_priority, ShortestPrefill(CONTEXT_TOKENS)]
DRAFTS: list[Callable[[int, int], int]] = [lambda n, known: 0, lambda n, known: n * known % 5, lambda n, known: 400]


def _begun(prompt: list[int], choice: int, max_tokens: int, most: int) -> list[int]:
    """The begin of this answer, which does not end it."""
    return answer_alone(prompt, choice, max_tokens)[:-1][:most]


class RequestChurn(RuleBasedStateMachine):
    """`plan`, `advance` and `resolve` are apart, so that requests come and go at any moment of a step."""

    make_executor = CheckedExecutor

    @initialize(
        blocks=st.sampled_from([8, 14, 40]),
        window=st.sampled_from([None, None, (16, 8), (40, 0), (16, 0)]),
        spare_tokens=st.sampled_from([0, 0, 120]),
        slots=st.sampled_from([1, 3, 8]),
        chunking=st.sampled_from(CHUNKINGS),
        batching=st.sampled_from(BATCHINGS),
        order=st.sampled_from(ORDERS),
        preempts=st.booleans(),
        drafts=st.sampled_from(DRAFTS),
        cached=st.booleans(),
    )
    def settle(
        self,
        blocks: int,
        window: tuple[int, int] | None,
        spare_tokens: int,
        slots: int,
        chunking: ChunkPolicy,
        batching: Batching,
        order: Order,
        preempts: bool,
        drafts: Callable[[int, int], int],
        cached: bool,
    ) -> None:
        step_tokens = slots + spare_tokens + (LEAST_SHARES if chunking.least_tokens else CONTEXT_TOKENS)
        groups: tuple[BlockGroup, ...] = (BlockGroup(blocks),)
        if window:
            reach, spare_blocks = window
            groups = (*groups, BlockGroup(-(-(reach + step_tokens + 16) // 16) + spare_blocks, reach))
        config = SchedulerConfig(
            groups=groups,
            max_num_seqs=slots,
            max_num_batched_tokens=step_tokens,
            max_model_len=CONTEXT_TOKENS,
            chunking=chunking,
            batching=batching,
            order=order,
            priority_preempts=preempts and order is not fcfs,
        )
        self.scheduler = Scheduler(config, TrueModel())
        self.executor = self.make_executor(groups, hashing=cached, drafts=drafts)
        self.cached = cached
        self.now = 0
        self.requests: dict[int, tuple[Request, list[int], int]] = {}
        self.finished: dict[int, Finished] = {}
        self.under_way: Step | None = None
        self.early: Plan | None = None

    # --- what happens ---------------------------------------------------------------------------------------------

    @rule(
        shared=st.integers(0, CONTEXT_TOKENS),
        own=st.sampled_from([1, 2, 15, 16, 17, 40]),
        max_tokens=st.sampled_from([1, 2, 3, 17, 60]),
        priority=st.sampled_from([0, 0, 1]),
        choices=st.sampled_from([1, 1, 1, 2, 4]),
        arrived=st.sampled_from([0.0, 0.0, 0.5, 1.0]),
        number=st.integers(0, 250),
        given=st.sampled_from([0, 0, 0, 1, 16]),
    )
    def add(
        self,
        shared: int,
        own: int,
        max_tokens: int,
        priority: int,
        choices: int,
        arrived: float,
        number: int,
        given: int,
    ) -> None:
        """`given`: most tokens that choices have from another scheduler, some of them none."""
        prompt = SHARED_TEXT[: shared // 2] + [(number + i) % 256 for i in range(own)]
        begun = [_begun(prompt, choice, max_tokens, given >> choice) for choice in range(choices)]
        has_begun = any(begun)
        request = Request(
            id=str(len(self.requests)),
            prompt_tokens=len(prompt),
            max_tokens=max_tokens,
            hashes=prompt_hashes(ROOT, prompt) if self.cached else (),
            priority=priority,
            choices=choices,
            arrived_tokens=0 if has_begun else int(arrived * (len(prompt) - 1)),
            given=tuple(map(len, begun)) if has_begun else (),
        )
        try:
            numbers = self.scheduler.add(request, self.now)
        except NeverFitsError:
            return
        for choice, n in enumerate(numbers):
            self.requests[n] = (request, prompt, choice)
            self.executor.add(n, prompt + begun[choice], choice, request.hashes)

    @precondition(lambda self: self.scheduler.live)
    @rule(data=st.data(), only_choice=st.sampled_from([None, None, 0, 1]))
    def abort(self, data: st.DataObject, only_choice: int | None) -> None:
        number = data.draw(st.sampled_from(sorted(self.scheduler.live)))
        self.note(self.scheduler.abort(self.requests[number][0].id, only_choice))

    @precondition(lambda self: self.under_way is None)
    @rule()
    def begin(self) -> None:
        self.now += 1000
        plan = planned(self.scheduler, self.now)
        if self.early and self.early.changes == plan.changes:
            assert self.early == plan, "a plan made while the step ran still holds, but reads otherwise"
        if plan.empty:
            assert self.scheduler.idle, "somebody waits and nothing runs"
            assert plan.next_wake_ns is None
            return
        self.under_way = self.scheduler.advance(plan)
        self.executor.start(self.under_way)

    @precondition(lambda self: self.under_way is not None)
    @rule()
    def plan_early(self) -> None:
        self.early = planned(self.scheduler, self.now)

    @precondition(lambda self: self.under_way is not None)
    @rule()
    def end(self) -> None:
        self.now += 1000
        self.under_way = None
        self.note(self.scheduler.resolve(self.executor.result()).finished)

    @precondition(lambda self: self.under_way is None and self.scheduler.live)
    @rule(data=st.data(), blame=st.booleans())
    def fail_next_step(self, data: st.DataObject, blame: bool) -> None:
        self.executor.fail_step = True
        self.executor.failing = {data.draw(st.sampled_from(sorted(self.scheduler.live)))} if blame else set()

    @rule(steps=st.integers(1, 12))
    def go_on(self, steps: int) -> None:
        """Several steps on end, each with the next plan made early."""
        for _ in range(steps):
            if self.under_way is None:
                self.begin()
            if self.under_way is not None:
                self.plan_early()
                self.end()
            self.scheduler.check()

    def note(self, finished: tuple[Finished, ...]) -> None:
        for end in finished:
            assert end.number not in self.finished, "ended twice"
            self.finished[end.number] = end

    # --- what is always true --------------------------------------------------------------------------------------

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check()

    def teardown(self) -> None:
        """Left to itself, everything ends: with the right tokens, and all blocks free."""
        if not hasattr(self, "scheduler"):
            return
        self.executor.fail_step = False
        most_steps = 60 * (2 + sum(r.max_tokens + 15 for r, _, _ in self.requests.values()))
        for _ in range(most_steps):
            if self.scheduler.idle and self.under_way is None:
                break
            self.go_on(1)
        assert self.scheduler.idle, "no progress"
        assert self.finished.keys() == self.requests.keys()
        assert self.scheduler.cache.free == tuple(group.blocks for group in self.scheduler.config.groups)
        for number, (request, prompt, choice) in self.requests.items():
            self.check_answer(self.finished[number], prompt, answer_alone(prompt, choice, request.max_tokens))

    def check_answer(self, end: Finished, prompt: list[int], expected: list[int]) -> None:
        answer = self.executor.tokens[end.number][len(prompt) :]
        if end.reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert answer[: end.known - len(prompt)] == expected
        else:
            assert answer[: end.known - len(prompt)] == expected[: end.known - len(prompt)]
            assert end.known <= len(self.executor.tokens[end.number]), "it counts tokens that never came"
