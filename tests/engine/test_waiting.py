"""A host of the engine waits instead of asking again and again: for a step, for input, for time to pass."""

import selectors
import socket
import threading
from collections.abc import Iterator
from time import sleep
from unittest.mock import patch

import pytest
from support.engines import STORIES, Asked, engine, prompt, run, submit

from twostep.core.cost import StepShape, decode_shape
from twostep.core.plan import Chunk, Plan
from twostep.core.reasons import WHOLE
from twostep.engine import engine as engine_module
from twostep.engine.backend import Submit
from twostep.engine.engine import Engine
from twostep.engine.params import SamplingParams
from twostep.engine.process.engine_host import EngineHost
from twostep.engine.process.messages import FromEngine, ToEngine
from twostep.engine.step.worker import Worker
from twostep.engine.timing.meter import StepMeter
from twostep.llm import LLM
from twostep.perf.linear import LinearCostModel

ANSWER = SamplingParams(max_tokens=3, ignore_eos=True)


def test_an_engine_says_how_long_its_host_may_wait() -> None:
    """None without requests, nothing while there is work, else until a static batch has waited for 100 ms."""
    now_ns = 7_000_000_000
    with engine(batching="static=2") as made, patch.object(engine_module, "monotonic_ns", lambda: now_ns):
        assert made.idle_s() is None
        submit(made, Asked("a", prompt(5), ANSWER))
        assert made.idle_s() == 0.0
        made.turn()
        assert made.idle_s() == 0.1
        now_ns += 40_000_000
        assert made.idle_s() == 0.06
        submit(made, Asked("b", prompt(5, 1), ANSWER))
        assert made.idle_s() == 0.0
        made.turn()
        assert made.idle_s() == 0.0
        assert run(made).keys() == {"a", "b"}
        assert made.idle_s() is None


def _llm(**settings: str) -> LLM:
    return LLM(str(STORIES), skip_tokenizer_init=True, threads=1, **settings)


def test_a_call_sleeps_while_a_static_batch_waits_to_be_full() -> None:
    """Before, it planned again as fast as it could, for 100 ms."""
    begun = 0
    begin = Engine.begin

    def counted(self: Engine) -> object:
        nonlocal begun
        begun += 1
        return begin(self)

    with patch.object(Engine, "begin", counted), _llm(batching="static=4") as llm:
        llm.generate([prompt(5)], ANSWER)
    assert begun < 12


class Owner:
    """The other end of an engine process's wire: submits one request, waits for its output, and closes."""

    def __init__(self) -> None:
        self.timeouts_s: list[float | None] = []
        self._messages: list[ToEngine] = [Submit("a", prompt(5), ANSWER)]

    def poll(self, timeout_s: float | None) -> bool:
        self.timeouts_s.append(timeout_s)
        if timeout_s is None and not self._messages:
            raise EOFError
        if not self._messages:
            sleep(timeout_s or 0)
        return bool(self._messages)

    def recv(self) -> ToEngine:
        return self._messages.pop()

    def send(self, message: FromEngine) -> None:
        pass


def test_an_engine_process_sleeps_while_a_static_batch_waits_to_be_full() -> None:
    """It listens all the time, so that a request or an abort that arrives meanwhile is taken in at once."""
    owner = Owner()
    with engine(batching="static=4") as made, pytest.raises(EOFError):
        EngineHost(made, owner).run()  # type: ignore[arg-type]
    assert len(owner.timeouts_s) < 20


@pytest.fixture
def pipe() -> Iterator[tuple[socket.socket, socket.socket]]:
    ends = socket.socketpair()
    yield ends
    for end in ends:
        end.close()


def test_a_host_can_wait_for_a_step_and_for_a_socket_at_once(pipe: tuple[socket.socket, socket.socket]) -> None:
    """The worker's call-back writes a byte; what waits on it waits on other things too, and no result is lost."""
    reader, writer = pipe
    other, sender = socket.socketpair()
    may_end = threading.Event()

    def compute(task: int) -> int:
        assert may_end.wait(30)
        return 2 * task

    worker = Worker(compute, overlap=True, notify=lambda: writer.send(b"."))
    with selectors.DefaultSelector() as selector, other, sender:
        selector.register(reader, selectors.EVENT_READ, "step")
        selector.register(other, selectors.EVENT_READ, "input")
        worker.start(21)
        assert not worker.done
        sender.send(b"hello")
        assert [key.data for key, _ in selector.select(30)] == ["input"]
        other.recv(5)
        may_end.set()
        assert [key.data for key, _ in selector.select(30)] == ["step"]
        assert worker.done
        assert worker.result() == 42
    worker.close()


def test_what_the_host_does_between_steps_is_measured() -> None:
    """From the end of one step to the end of the next, less its kernels, where that decodes what the one before left.
    Then the engine was not idle between; before a step with nothing but new requests it may have been."""
    meter = StepMeter(LinearCostModel())
    prompt_step = Plan(1, 0, 0, chunks=(Chunk(1, 0, 5, True, WHOLE),), shape=StepShape().with_slice(0, 5, 1))
    decode_step = Plan(2, 0, 1, shape=decode_shape(1, 6))
    meter.add(prompt_step, 90, 0, 1000, failed=False)
    assert meter.measured().host_ns_per_step == 0
    meter.add(decode_step, 50, 0, 1060, failed=False)  # 10 beside the kernels
    meter.add(decode_step, 50, 0, 1114, failed=False)  # 4
    meter.add(prompt_step, 90, 0, 900_000, failed=False)  # after a pause
    meter.add(decode_step, 50, 0, 900_057, failed=False)  # 7
    measured = meter.measured()
    assert (measured.host_steps, measured.host_ns, measured.host_ns_per_step) == (3, 21, 7.0)


def test_an_engine_measures_its_host() -> None:
    with engine() as made:
        submit(made, Asked("a", prompt(5), SamplingParams(max_tokens=12, ignore_eos=True)))
        run(made)
        measured = made.measured()
    assert measured.host_steps == 11
    assert measured.host_ns > 0
