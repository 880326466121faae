"""What `LLM` takes, it gives back at once: no garbage collection is needed, also after an exception."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

BEGIN = """
import gc, os, sys, weakref
from pathlib import Path
gc.disable()
from twostep import LLM, SamplingParams
from twostep.errors import TwostepError

MIB = 1 << 20
SHORT = SamplingParams(temperature=0, max_tokens=4)
HELLO = [{"role": "user", "content": "Say hello."}]

def resident():
    "Bytes that are this process's own: files that are mapped can be dropped at any time."
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:")]
    return int(line.split()[1]) * 1024

def threads():
    return len(os.listdir("/proc/self/task"))

def children():
    return Path("/proc/self/task", str(os.getpid()), "children").read_text().split()

def make(**settings):
    return LLM(sys.argv[1], **{"max_num_seqs": 4, "kv_memory": "64MiB", "threads": 2, **settings})

def used(llm):
    "Fills the KV cache, so that its memory is really there."
    llm.generate([[n % 1000 + 5] * 150 for n in range(4)], SHORT, progress=False)
    llm.chat(HELLO, SHORT, progress=False)
    return llm

def assert_given_back(before_threads, before_bytes):
    assert threads() == before_threads, os.listdir("/proc/self/task")
    assert children() == [], children()
    # A tokenizer and what malloc keeps, not weights (92 MiB) or the cache (64 MiB).
    assert resident() - before_bytes < 60 * MIB, (resident() - before_bytes) // MIB

with make() as first:  # what is made once for all, such as modules, is there from now on
    used(first)
del first
start = threads(), resident()
assert children() == []
"""


def run(program: str, model: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", BEGIN + textwrap.dedent(program), str(model)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


@pytest.mark.parametrize("executor", ["native", "reference"])
def test_close_gives_all_back_while_the_object_lives(default_model_path: Path, executor: str) -> None:
    run(
        f"""
        llm = make(executor={executor!r}, kv_memory='32MiB')
        llm.chat(HELLO, SHORT, progress=False)
        assert children()
        llm.close()
        assert_given_back(*start)
        assert repr(llm) and llm.model.tokenizer.encode("still of use", special=False)
        """,
        default_model_path,
    )


def test_close_gives_back_a_cache_that_was_used(default_model_path: Path) -> None:
    run(
        """
        llm = used(make())
        assert threads() > start[0] and resident() - start[1] > 80 * MIB
        llm.close()
        assert_given_back(*start)
        """,
        default_model_path,
    )


def test_letting_go_is_enough(default_model_path: Path) -> None:
    """Nothing refers to itself in a circle, which only a garbage collection would find."""
    run(
        """
        from twostep import StructuredOutput
        llm = used(make())
        form = SamplingParams(max_tokens=4, structured=StructuredOutput("regex", "a+"))
        llm.generate([5], form, progress=False)
        next(llm.stream("Once", SHORT))
        parts = [weakref.ref(part) for part in (llm, llm.engine, llm.engine.kernels.executor, llm.model.template)]
        del llm
        assert [part() for part in parts] == [None] * 4
        assert_given_back(*start)
        """,
        default_model_path,
    )


@pytest.mark.parametrize(
    ("settings", "spoil"),
    [
        ("record=Path('/nowhere/at/all')", ""),
        ("kv_memory='1048576TiB'", ""),
        ("", "twostep.engine.engine.KernelExecutor = fail"),
        ("", "twostep.kernels.native.NativeExecutor.reserve = fail"),
        ("", "twostep.kernels.native.fine_weights = fail"),
    ],
    ids=["no file for the recording", "too large a cache", "after the kernels", "in the kernels", "before the weights"],
)
def test_an_exception_while_loading_keeps_nothing(default_model_path: Path, settings: str, spoil: str) -> None:
    """Though it is kept itself, as a debugger or a log does, with all its frames."""
    run(
        f"""
        import twostep.engine.engine, twostep.kernels.native
        def fail(*arguments, **settings):
            raise ZeroDivisionError("spoilt")
        {spoil}
        try:
            make({settings})
        except (TwostepError, OSError, ZeroDivisionError) as error:
            kept = error
        assert kept.__traceback__ is not None
        assert_given_back(*start)
        """,
        default_model_path,
    )


def test_an_exception_while_generating_keeps_nothing(default_model_path: Path) -> None:
    run(
        """
        kept = []
        llm = used(make())
        try:
            with llm:
                llm.submit([5], SamplingParams(max_tokens=200))
                for _ in llm.stream("Once", SamplingParams(max_tokens=200)):
                    1 // 0
        except ZeroDivisionError as error:
            kept.append(error)
        assert kept
        assert_given_back(*start)
        """,
        default_model_path,
    )
