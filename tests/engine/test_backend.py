"""What every backend promises (`engine.backend.Backend`), checked against the local one and the tests' fake."""

import asyncio
import os
import signal
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, TypeVar

import pytest
from support.engines import STORIES
from support.fake_backend import FakeBackend

from twostep.config.configs import EngineConfig
from twostep.config.values import MemoryBlocks
from twostep.engine.backend import Accepted, Backend, Submit
from twostep.engine.outputs import Delta, RequestOutput
from twostep.engine.params import SamplingParams
from twostep.engine.process.local_backend import LocalBackend
from twostep.errors import ContextLengthError, EngineDiedError, MemoryPlanError

T = TypeVar("T")
KINDS = ("local", "fake")


def local(**settings: Any) -> LocalBackend:
    config = EngineConfig(
        **{"skip_tokenizer_init": True, "kv_memory": "64 blocks", "threads": 1, "max_num_seqs": 4, **settings}
    )
    return LocalBackend.of(STORIES, config, lambda event, line: None)


class Letters:
    """Instead of a tokenizer."""

    def decode(self, token_ids: list[int]) -> str:
        return "".join(chr(97 + id_ % 26) for id_ in token_ids)


MAKE: dict[str, Callable[[], Backend]] = {"local": local, "fake": lambda: FakeBackend(Letters(), step_s=0.002)}


class Running:
    """A backend that is ready, and the event loop that it runs in."""

    def __init__(self, backend: Backend, loop: asyncio.AbstractEventLoop) -> None:
        self.backend, self._loop = backend, loop

    def run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)


@contextmanager
def running(make: Callable[[], Backend]) -> Iterator[Running]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> tuple[Backend, "asyncio.Task[Any]"]:
        backend, ready = make(), asyncio.Event()
        assert (backend.phase, backend.capabilities, backend.outstanding) == ("loading", None, 0)
        task = asyncio.create_task(backend.run(ready.set))
        await asyncio.wait_for(ready.wait(), 60)
        return backend, task

    async def end() -> None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await backend.stop()
        await loop.shutdown_default_executor()

    backend, task = asyncio.run_coroutine_threadsafe(start(), loop).result(60)
    try:
        yield Running(backend, loop)
    finally:
        asyncio.run_coroutine_threadsafe(end(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture(scope="module", params=KINDS)
def served(request: pytest.FixtureRequest) -> Iterator[Running]:
    with running(MAKE[request.param]) as made:
        yield made


@pytest.fixture(params=KINDS)
def doomed(request: pytest.FixtureRequest) -> Iterator[Running]:
    """For one test, which ends it."""
    with running(MAKE[request.param]) as made:
        yield made


def request(id_: str, tokens: int = 5, prompt: int = 3, n: int = 1, stream: bool = True) -> Submit:
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, n=n)
    return Submit(id_, list(range(5, 5 + prompt)), params, stream=stream)


async def all_of(events: AsyncGenerator[Any]) -> list[Any]:
    return [event async for event in events]


def test_a_backend_that_is_ready_says_what_it_can(served: Running) -> None:
    capabilities = served.backend.capabilities
    assert served.backend.phase == "ready"
    assert served.backend.error is None
    assert capabilities is not None
    assert capabilities.max_num_seqs == 4
    assert 2 <= capabilities.max_sequence_tokens <= capabilities.kv_blocks * 16 + 1
    assert capabilities.description


@pytest.mark.parametrize("n", [1, 3])
def test_events_come_in_order(served: Running, n: int) -> None:
    """Accepted, the deltas, the output, whose text the deltas make up."""
    first, *deltas, output = served.run(all_of(served.backend.submit([request("a", n=n)])))
    assert first == Accepted("a")
    assert all(isinstance(delta, Delta) and delta.id == "a" for delta in deltas)
    assert isinstance(output, RequestOutput)
    for choice in output.choices:
        own = [delta for delta in deltas if delta.index == choice.index]
        assert "".join(delta.text for delta in own) == choice.text
        assert [id_ for delta in own for id_ in delta.token_ids] == list(choice.token_ids)
        assert (len(choice.token_ids), choice.finish_reason) == (5, "length")


def test_without_a_stream_only_the_output_comes(served: Running) -> None:
    [output] = served.run(all_of(served.backend.submit([request("a", stream=False)])))
    assert (output.id, len(output.choices[0].token_ids)) == ("a", 5)


def test_several_requests_of_a_call_end_each(served: Running) -> None:
    events = served.run(all_of(served.backend.submit([request("a"), request("b", 9)])))
    for id_ in "ab":
        own = [event for event in events if event.id == id_]
        assert isinstance(own[0], Accepted)
        assert isinstance(own[-1], RequestOutput)
        assert all(isinstance(event, Delta) for event in own[1:-1])
    assert served.backend.outstanding == 0


def test_what_cannot_be_served_is_refused_and_cancels_the_rest(served: Running) -> None:
    longest = served.backend.capabilities.max_sequence_tokens  # type: ignore[union-attr]
    with pytest.raises(ContextLengthError) as caught:
        served.run(all_of(served.backend.submit([request("one"), request("two", tokens=longest)])))
    assert caught.value.param == "max_tokens"
    assert served.backend.outstanding == 0
    assert served.run(all_of(served.backend.submit([request("a")])))


def test_closing_early_cancels(served: Running) -> None:
    """The output comes late, with what was generated."""
    late: list[RequestOutput] = []

    async def leave() -> None:
        arrived = asyncio.Event()

        def note(output: RequestOutput) -> None:
            late.append(output)
            arrived.set()

        async with aclosing(served.backend.submit([request("a", 300)], note)) as events:
            async for event in events:
                if isinstance(event, Delta):
                    break
        assert served.backend.outstanding == 0
        await asyncio.wait_for(arrived.wait(), 30)

    served.run(leave())
    [output] = late
    assert (output.id, output.choices[0].finish_reason) == ("a", "abort")
    assert 1 <= len(output.choices[0].token_ids) < 300


def test_cancelling_brings_the_output_soon(served: Running) -> None:
    async def cancel() -> list[Any]:
        seen = []
        async with aclosing(served.backend.submit([request("c", 300)])) as events:
            async for event in events:
                seen.append(event)
                if isinstance(event, Delta):
                    served.backend.cancel("c")
        return seen

    *_, output = served.run(cancel())
    assert (output.choices[0].finish_reason, served.backend.outstanding) == ("abort", 0)
    assert len(output.choices[0].token_ids) < 300


def test_cancelling_what_is_not_there_does_nothing(served: Running) -> None:
    async def cancel() -> None:
        served.backend.cancel("unknown")

    served.run(cancel())
    assert served.run(all_of(served.backend.submit([request("a", stream=False)])))


def test_workers_count_steps(served: Running) -> None:
    """The snapshot is that of the last message, so it has the last event's step."""
    served.run(all_of(served.backend.submit([request("a")])))
    [before] = served.backend.workers()
    served.run(all_of(served.backend.submit([request("a", 7)])))
    [after] = served.backend.workers()
    assert before.up
    assert (after.name, after.restarts, after.stalled_s < 5) == (before.name, 0, True)
    assert before.snapshot is not None
    assert after.snapshot is not None
    assert after.snapshot.steps >= before.snapshot.steps + 7


def test_a_backend_that_is_stopped_tells_its_callers(doomed: Running) -> None:
    async def stop() -> None:
        async with aclosing(doomed.backend.submit([request("a", 300)])) as events:
            async for event in events:
                if isinstance(event, Delta) and not stopping:
                    stopping.append(asyncio.create_task(doomed.backend.stop()))

    stopping: list[asyncio.Task[None]] = []
    with pytest.raises(EngineDiedError):
        doomed.run(stop())
    assert doomed.backend.phase != "ready"
    assert doomed.backend.error is not None
    with pytest.raises(EngineDiedError):
        doomed.run(all_of(doomed.backend.submit([request("b")])))


# --- the local one ------------------------------------------------------------------------------------------------


def test_a_local_engine_that_dies_is_replaced_and_its_request_goes_on() -> None:
    with running(local) as made:
        backend = made.backend
        assert isinstance(backend, LocalBackend)

        async def kill() -> list[Any]:
            got = []
            async with aclosing(backend.submit([request("a", 300)])) as events:
                async for event in events:
                    got.append(event)
                    if isinstance(event, Delta) and backend.client and backend.restarts == 0:
                        os.kill(backend.client.pid, signal.SIGKILL)
            return got

        async def ready_again() -> None:
            while backend.restarts == 0 or backend.phase != "ready":
                await asyncio.sleep(0.01)

        first, *deltas, output = made.run(kill())
        assert first == Accepted("a")
        [whole] = [
            one for one in made.run(all_of(backend.submit([request("b", 300)]))) if isinstance(one, RequestOutput)
        ]
        assert [id_ for delta in deltas for id_ in delta.token_ids] == output.choices[0].token_ids
        assert output.choices[0].token_ids == whole.choices[0].token_ids
        made.run(asyncio.wait_for(ready_again(), 50))
        assert made.run(all_of(backend.submit([request("a")])))
        [worker] = backend.workers()
        assert (worker.up, worker.restarts, worker.resumed) == (True, 1, 1)


def test_bytes_that_are_no_message_end_a_local_engine() -> None:
    """The front end cannot know what else is lost; a new engine is started."""
    with running(local) as made:
        backend = made.backend
        assert isinstance(backend, LocalBackend)
        backend.drain()

        async def garble() -> EngineDiedError:
            assert backend.client is not None
            backend.client.data_received(b"\xff\0\0\0\0")
            return await backend.client.wait_until_dead()

        assert "ended: a message has version 255 of the format" in str(made.run(garble()))


def test_a_message_of_another_version_ends_the_engine_with_the_reason() -> None:
    with running(local) as made:
        backend = made.backend
        assert isinstance(backend, LocalBackend)
        backend.drain()

        async def garble() -> EngineDiedError:
            assert backend.client is not None
            backend.client._transport.write(b"\xff\0\0\0\0")
            return await backend.client.wait_until_dead()

        assert "this end reads version" in str(made.run(garble()))


def test_an_answer_that_is_too_large_fails_its_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the engine's process; here the host runs in this one."""
    from support.engines import engine
    from support.messages import whole_output

    from twostep.engine.process import wire
    from twostep.engine.process.engine_host import EngineHost
    from twostep.engine.process.messages import Refused, StepEnded

    sent: list[StepEnded] = []

    class Ends:
        def send(self, message: StepEnded) -> None:
            wire.framed(message)
            sent.append(message)

    with engine() as made:
        host = EngineHost(made, Ends())  # type: ignore[arg-type]
        outputs = whole_output("small"), whole_output("large", tokens=2000), whole_output("next")
        monkeypatch.setattr(wire, "MAX_MESSAGE_BYTES", 4000)
        host._send(outputs)
    assert [event.id for message in sent for event in message.events] == ["small", "large", "next"]
    refused = sent[1].events[0]
    assert isinstance(refused, Refused)
    assert "the answer cannot be sent: a message has" in refused.error.message


def test_a_first_start_that_fails_is_raised() -> None:
    async def start() -> None:
        await local(kv_memory=MemoryBlocks(10**9)).run(lambda: None)

    with pytest.raises(MemoryPlanError):
        asyncio.run(start())
