"""`LLM` used by several threads at once: served together, each call with its own outputs, errors and end."""

import gc
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from threading import Barrier, Event, Thread, main_thread
from time import sleep
from typing import Any

import pytest

from twostep import LLM, SamplingParams
from twostep.engine.outputs import Delta, RequestOutput
from twostep.engine.shared_engine import FairLock
from twostep.errors import InvalidParameterError, TwostepError

ENDLESS = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
TIMEOUT_S = 120


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(default_model_path: Path) -> Iterator[LLM]:
    with LLM(default_model_path, max_num_seqs=8, kv_memory="600 blocks") as made:
        yield made


def at_once(count: int, work: Callable[[int], Any]) -> list[Any]:
    """What `work` gave for each number, in as many threads that begin together. Raises what one of them raised."""
    together = Barrier(count)

    def begin(number: int) -> Any:
        together.wait(TIMEOUT_S)
        return work(number)

    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(begin, number) for number in range(count)]
        return [future.result(TIMEOUT_S) for future in futures]


def text(output: RequestOutput) -> str:
    return output.choices[0].text


def prompts(number: int) -> list[str]:
    return [f"Once there were {number} cats and {i} dogs" for i in range(3)]


def assert_idle(llm: LLM) -> None:
    assert llm.engine.outstanding == 0
    llm.engine.scheduler.check()
    assert llm.engine.scheduler.idle


def test_generate_in_many_threads_gives_each_its_own_in_order(llm: LLM) -> None:
    expected = [[text(output) for output in llm.generate(prompts(n), greedy(12), progress=False)] for n in range(8)]

    def work(number: int) -> list[list[str]]:
        return [[text(o) for o in llm.generate(prompts(number), greedy(12), progress=False)] for _ in range(3)]

    assert at_once(8, work) == [[each] * 3 for each in expected]
    assert_idle(llm)


def test_they_are_served_in_the_same_steps(llm: LLM) -> None:
    def steps(work: Callable[[], object]) -> int:
        before = llm.engine.scheduler.counters.steps
        work()
        return llm.engine.scheduler.counters.steps - before

    alone = steps(lambda: llm.generate([5, 6, 7], greedy(60), progress=False))
    together = steps(lambda: at_once(4, lambda number: llm.generate([5 + number, 6], greedy(60), progress=False)))
    assert together < 2 * alone, "four calls that were served one after another take four times the steps"


def test_all_ways_to_ask_at_once(llm: LLM) -> None:
    def stream(number: int) -> str:
        events = list(llm.stream(f"A king of {number}", greedy(20)))
        assert isinstance(events[-1], RequestOutput)
        assert "".join(event.text for event in events if isinstance(event, Delta)) == text(events[-1])
        return text(events[-1])

    def submitted(number: int) -> list[str]:
        for i in range(5):
            llm.submit([10 + i, 11], greedy(10), id=f"mine-{i}")
        return [text(output) for output in sorted(llm.run(), key=lambda output: output.id)]

    def generate(number: int) -> list[str]:
        return [text(output) for output in llm.generate(prompts(number), greedy(15), progress=False)]

    kinds: list[Callable[[int], Any]] = [stream, generate, submitted, stream, generate]
    expected = [kind(number) for number, kind in enumerate(kinds)]
    assert at_once(len(kinds), lambda number: kinds[number](number)) == expected
    assert_idle(llm)


def test_submit_in_other_threads_while_one_runs(llm: LLM) -> None:
    llm.submit([3, 4], ENDLESS, id="first")

    def work(number: int) -> set[str]:
        if number == 0:
            return {output.id for output in llm.run()}
        return {llm.submit([3, number + 5], greedy(5), id=f"other-{number}")}

    seen, *others = at_once(4, work)
    seen |= {output.id for output in llm.run()}  # who came after the first run had ended
    assert seen == {"first"}.union(*others)


def test_an_error_is_for_the_call_that_made_it(llm: LLM) -> None:
    [expected] = llm.generate("Once upon a time", greedy(40), progress=False)

    def work(number: int) -> str:
        if number % 2:
            with pytest.raises(InvalidParameterError, match=r"prompts\[1\]: the prompt has token 99999"):
                llm.generate([[5], [99999]], ENDLESS, progress=False)
            return ""
        return text(llm.generate("Once upon a time", greedy(40), progress=False)[0])

    assert at_once(6, work) == [text(expected), ""] * 3
    assert_idle(llm)


def test_a_fault_of_the_engine_reaches_somebody_and_hangs_nobody(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    begin, faults = llm.engine.begin, iter([ZeroDivisionError("spoilt")])

    def spoilt() -> Any:
        for fault in faults:
            raise fault
        return begin()

    monkeypatch.setattr(llm.engine, "begin", spoilt)

    def work(number: int) -> str:
        try:
            return text(llm.generate("Once upon a time", greedy(10), progress=False)[0])
        except ZeroDivisionError:
            return "fault"

    results = at_once(3, work)
    assert results.count("fault") == 1
    assert len(set(results)) == 2
    assert_idle(llm)


def test_leaving_a_stream_leaves_others_alone(llm: LLM) -> None:
    [expected] = llm.generate("Once upon a time", greedy(60), progress=False)

    def work(number: int) -> str:
        if number == 0:
            return text(llm.generate("Once upon a time", greedy(60), progress=False)[0])
        for _ in range(5):
            next(llm.stream("A dog", ENDLESS))
        return ""

    assert at_once(3, work) == [text(expected), "", ""]
    assert_idle(llm)


def test_a_stream_that_the_garbage_collector_ends(llm: LLM) -> None:
    """In whichever thread, whatever that is doing."""
    [expected] = llm.generate("Once upon a time", greedy(40), progress=False)

    def work(number: int) -> str:
        if number == 0:
            return text(llm.generate("Once upon a time", greedy(40), progress=False)[0])
        for _ in range(20):
            cycle: list[Any] = [llm.stream("A dog", ENDLESS)]
            cycle.append(cycle)
            del cycle
            gc.collect()
        return ""

    assert at_once(2, work) == [text(expected), ""]
    gc.collect()
    llm.generate([5], greedy(1), progress=False)  # whatever left in the last moment
    assert_idle(llm)


def test_ctrl_c_is_for_the_main_thread_alone(llm: LLM) -> None:
    [expected] = llm.generate("Once upon a time", greedy(80), progress=False)
    begun = Event()

    def other() -> str:
        events = llm.stream("Once upon a time", greedy(80))
        said = []
        for event in events:
            begun.set()
            said.append(event.text if isinstance(event, Delta) else "")
        return "".join(said)

    def interrupt() -> None:
        while llm.engine.outstanding < 100:
            sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    with ThreadPoolExecutor(1) as pool:
        theirs = pool.submit(other)
        assert begun.wait(TIMEOUT_S)  # first, as it would wait behind a hundred endless ones
        Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[5]] * 100, ENDLESS, progress=False)
        assert theirs.result(TIMEOUT_S) == text(expected)
    assert_idle(llm)


@pytest.mark.parametrize("call", ["generate", "stream", "run"])
def test_close_tells_those_who_wait(call: str, default_model_path: Path) -> None:
    llm = LLM(default_model_path, max_num_seqs=2, kv_memory="600 blocks")
    under_way = Barrier(3)

    def work(number: int) -> None:
        if call == "run" and number == 0:
            llm.submit([5], ENDLESS)
            under_way.wait(TIMEOUT_S)
            list(llm.run())
        stream = llm.stream([5], ENDLESS)
        if call != "run" or number:
            under_way.wait(TIMEOUT_S)
        if call == "stream":
            list(stream)
        while True:
            llm.generate([[5]] * 20, ENDLESS, progress=False)

    with ThreadPoolExecutor(2) as pool:
        futures: list[Future[None]] = [pool.submit(work, number) for number in range(2)]
        under_way.wait(TIMEOUT_S)
        llm.close()
        wait(futures, TIMEOUT_S)
        for future in futures:
            with pytest.raises(TwostepError, match=r"this LLM (was closed while the call was under way|is closed)"):
                future.result(0)
    with pytest.raises(TwostepError, match="this LLM is closed"):
        llm.generate([5])


def test_closing_twice_at_once(default_model_path: Path) -> None:
    llm = LLM(default_model_path, max_num_seqs=2, kv_memory="100 blocks")
    assert at_once(3, lambda number: llm.close()) == [None] * 3


class TestTurns:
    def test_they_come_in_order(self) -> None:
        turns, order, threads = FairLock(), [], []

        def work(number: int) -> None:
            with turns:
                order.append(number)

        with turns:
            for number in range(5):
                threads.append(Thread(target=work, args=(number,)))
                threads[-1].start()
                while len(turns._queue) < number + 2:
                    pass
            assert not turns.acquire_if_free()
        for thread in threads:
            thread.join(TIMEOUT_S)
        assert order == [0, 1, 2, 3, 4]
        assert turns.acquire_if_free()
        turns.release()

    def test_who_is_interrupted_while_waiting_blocks_nobody(self) -> None:
        turns = FairLock()

        def interrupt() -> None:
            while len(turns._queue) < 2:
                pass
            signal.pthread_kill(main, signal.SIGINT)

        def wait_in_vain() -> None:
            with turns:
                raise AssertionError("somebody else has the turn")

        assert turns.acquire_if_free()
        main = main_thread().ident or 0
        Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            wait_in_vain()
        turns.release()
        assert turns.acquire_if_free()
