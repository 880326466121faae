"""Forked children of a process with an engine: they end, they are told what to do, and they disturb nobody."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from twostep.processes import Owner

BEGIN = """
import gc, multiprocessing, os, signal, sys, time
from pathlib import Path
from twostep import LLM, SamplingParams
from twostep.errors import TwostepError
from twostep.processes import ForkedError

HELLO = [{"role": "user", "content": "Say hello."}]
SHORT = SamplingParams(temperature=0, max_tokens=4)

def make():
    return LLM(sys.argv[1], max_num_seqs=2, kv_memory="64 blocks", threads=2)

def in_child(work, *, orderly=True):
    "Exit status of a fork that does `work` and ends as Python programs do; 142 if it hangs for a minute."
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)
        try:
            work()
        except SystemExit:
            raise
        except BaseException as error:
            print("child failed:", repr(error), flush=True)
            os._exit(1)
        if orderly:
            sys.exit(0)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def refused(call):
    try:
        call()
    except ForkedError as error:
        assert "belongs to process" in str(error) and "spawn" in str(error), error
    else:
        raise AssertionError("nothing was raised")
"""


def run(program: str, model: Path) -> None:
    """A fork inherits all of pytest, so each case has a program of its own. It must end well and say nothing."""
    command = [
        sys.executable,
        "-W",
        "error",
        "-W",
        "ignore::ResourceWarning",
        "-c",
        BEGIN + textwrap.dedent(program),
        str(model),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


@pytest.mark.parametrize("closed", [False, True])
def test_a_child_that_does_nothing_with_it_ends(default_model_path: Path, closed: bool) -> None:
    program = f"""
    llm = make()
    before = llm.chat(HELLO, SHORT, progress=False)[0].choices[0].text
    if {closed}:
        llm.close()
    assert in_child(lambda: None) == 0
    assert in_child(lambda: sys.exit(3)) == 3
    assert in_child(gc.collect) == 0
    def drop():
        global llm
        del llm
        gc.collect()
    assert in_child(drop) == 0
    assert in_child(lambda: llm.close()) == 0
    if not {closed}:
        assert llm.chat(HELLO, SHORT, progress=False)[0].choices[0].text == before
        llm.close()
    """
    run(program, default_model_path)


def test_its_use_in_a_child_says_what_to_do_instead(default_model_path: Path) -> None:
    run(
        """
        llm = make()
        llm.chat(HELLO, SHORT, progress=False)
        stream = llm.stream("Once", SamplingParams(max_tokens=200))
        next(stream)
        llm.submit([5], SamplingParams(max_tokens=200), id="mine")
        executor = llm.engine.kernels.executor
        template = llm.model.template

        def use():
            for call in (
                lambda: llm.generate([5], SHORT),
                lambda: llm.chat(HELLO, SHORT),
                lambda: llm.stream("Once"),
                lambda: llm.submit([5], SHORT),
                lambda: llm.abort("mine"),
                lambda: next(llm.run()),
                lambda: next(stream),
                lambda: llm.engine.end(),
                lambda: llm.engine.begin(),
                lambda: executor.forward([]),
                lambda: template.render(HELLO),
            ):
                refused(call)
            gc.collect()

        assert in_child(use) == 0
        assert in_child(use, orderly=False) == 0
        stream.close()
        llm.abort("mine")
        assert [output.id for output in llm.run()] == ["mine"]
        llm.close()
        """,
        default_model_path,
    )


def test_a_child_makes_its_own(default_model_path: Path) -> None:
    run(
        """
        llm = make()
        text = llm.chat(HELLO, SHORT, progress=False)[0].choices[0].text

        def own():
            with make() as mine:
                assert mine.chat(HELLO, SHORT, progress=False)[0].choices[0].text == text

        assert in_child(own) == 0
        assert llm.chat(HELLO, SHORT, progress=False)[0].choices[0].text == text
        llm.close()
        """,
        default_model_path,
    )


def test_a_pool_of_forks(default_model_path: Path) -> None:
    run(
        """
        llm = make()
        llm.chat(HELLO, SHORT, progress=False)

        def use(number):
            gc.collect()
            refused(lambda: llm.chat(HELLO, SHORT))
            return number

        with multiprocessing.get_context("fork").Pool(3) as pool:
            assert pool.map_async(use, range(12)).get(60) == list(range(12))
        assert llm.chat(HELLO, SHORT, progress=False)
        llm.close()
        """,
        default_model_path,
    )


def test_a_fork_in_the_midst_of_other_threads_work(default_model_path: Path) -> None:
    """Locks that those held stay locked in the child for ever."""
    run(
        """
        from threading import Thread
        llm = make()
        ending = []

        def work():
            while not ending:
                llm.chat(HELLO, SHORT, progress=False)

        threads = [Thread(target=work, daemon=True) for _ in range(2)]  # a failure ends the program at once
        for thread in threads:
            thread.start()
        def use():
            refused(lambda: llm.chat(HELLO, SHORT))
            refused(lambda: llm.model.template.render(HELLO))
            llm.close()
        for _ in range(8):
            assert in_child(use) == 0
        ending.append(True)
        for thread in threads:
            thread.join()
        llm.close()
        """,
        default_model_path,
    )


def test_a_child_writes_nothing_to_its_parent_s_files(default_model_path: Path, tmp_path: Path) -> None:
    """Neither to the template's pipe nor to the recording."""
    run(
        f"""
        llm = LLM(sys.argv[1], max_num_seqs=2, kv_memory="64 blocks", record=Path({str(tmp_path / "run")!r}))
        template = llm.model.template
        worker = template._worker._process
        worker.stdin.write(b'{{"messages": [{{"role": "user", "content": "of the parent"}}], ')
        assert in_child(lambda: sys.exit(0)) == 0
        assert in_child(lambda: os.write(worker.stdin.fileno(), b"junk")) == 0
        worker.stdin.write(b'"add_generation_prompt": true, "tools": null}}\\n')
        worker.stdin.flush()
        assert b"of the parent" in worker.stdout.readline()
        assert "hello" in template.render(HELLO).text
        llm.generate([5], SHORT, progress=False)
        buffer = llm.engine._recorder._writer._buffer
        while buffer._size:  # a thread writes the recording
            time.sleep(0.01)
        size = os.path.getsize({str(tmp_path / "run")!r})
        assert in_child(lambda: llm.close()) == 0
        assert os.path.getsize({str(tmp_path / "run")!r}) == size
        llm.close()
        """,
        default_model_path,
    )


def test_a_child_does_not_keep_the_template_s_process(default_model_path: Path) -> None:
    """That ends when its parent is gone, though forks of the parent live on."""
    run(
        """
        ours, theirs = os.pipe()
        parent = os.fork()
        if not parent:
            llm = make()
            llm.chat(HELLO, SHORT, progress=False)
            worker = llm.model.template._worker._process.pid
            if not os.fork():
                signal.alarm(120)
                for standard in (1, 2):  # this test's pipes, which it would hold open
                    os.close(standard)
                signal.pause()
            os.write(theirs, str(worker).encode())
            os._exit(0)  # as if it were killed: nothing is closed
        os.waitpid(parent, 0)
        worker = int(os.read(ours, 100))
        import time
        deadline = time.monotonic() + 60
        while Path(f"/proc/{worker}").exists() and time.monotonic() < deadline:
            if Path(f"/proc/{worker}/stat").read_text().split()[2] == "Z":
                break
            time.sleep(0.02)
        else:
            assert not Path(f"/proc/{worker}").exists()
        """,
        default_model_path,
    )


def test_an_owner_knows_a_fork() -> None:
    owner = Owner("this thing")
    owner.check()
    child = os.fork()
    if not child:
        os._exit(7 if not owner.here else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert owner.here
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
