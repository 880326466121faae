"""A backend without an engine: it answers every request with the same tokens, in the event loop of the front end."""

import asyncio

from support.messages import FAKE_CAPABILITIES, snapshot

from twostep.engine.backend import Accepted, Worker
from twostep.engine.outputs import ChoiceOutput, Delta, RequestOutput, Timeline
from twostep.errors import EngineDiedError


class FakeBackend:
    def __init__(self, tokenizer, step_s=0.001):
        self.phase, self.error, self.capabilities = "loading", None, None
        self.outstanding = self._steps = 0
        self._tokenizer, self._step_s, self._cancelled, self._end = tokenizer, step_s, set(), asyncio.Event()

    async def run(self, on_ready):
        self.phase, self.capabilities = "ready", FAKE_CAPABILITIES
        on_ready()
        await self._end.wait()

    def drain(self): ...

    async def stop(self):
        self.phase, self.error = "failed", EngineDiedError("the fake engine was stopped")
        self._end.set()

    async def submit(self, requests, on_late_output=lambda output: None):
        left, self.outstanding = {request.id: [] for request in requests}, self.outstanding + len(requests)
        try:
            for request in requests:
                ids, n = left[request.id], request.params.n if request.stream else 0
                limit = request.params.answer_limit(len(request.prompt), self.capabilities.max_sequence_tokens)
                if n:
                    yield Accepted(request.id)
                while len(ids) < limit and request.id not in self._cancelled and not self.error:
                    await asyncio.sleep(self._step_s)
                    self._steps, ids[:] = self._steps + 1, [*ids, 300 + len(ids) % 100]
                    for index in range(n):
                        yield Delta(request.id, index, self._tokenizer.decode(ids[-1:]), tuple(ids[-1:]))
                if self.error:
                    raise self.error
                yield self._output(request, left.pop(request.id))
        finally:
            self.outstanding -= len(requests)
            [on_late_output(self._output(one, left[one.id])) for one in requests if one.id in left]

    def _output(self, request, ids):
        reason = "abort" if len(ids) < (request.params.max_tokens or 1) else "length"
        text = "".join(self._tokenizer.decode([id_]) for id_ in ids)
        choices = (ChoiceOutput(index, text, ids, reason, Timeline(1, 2)) for index in range(request.params.n))
        return RequestOutput(request.id, request.prompt, tuple(choices), 0)

    def cancel(self, id):
        self._cancelled.add(id)

    def workers(self):
        return [Worker("fake", self.phase == "ready", snapshot=snapshot(self._steps))]
