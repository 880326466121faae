"""Child processes: how they are started, and which objects a fork must not use."""

import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol
from weakref import WeakSet

import twostep
from twostep.errors import TwostepError

_RUN = """
import runpy, sys
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location("twostep", sys.argv.pop(1))
sys.modules["twostep"] = package = module_from_spec(spec)
spec.loader.exec_module(package)
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


class ForkedError(TwostepError):
    """An object was used in a forked child of its process."""


# --- child processes ----------------------------------------------------------------------------------------------


def python(*arguments: str) -> list[str]:
    """The command that runs this Python without the working directory and the script folder in its import path.

    Use it with `environment()`, which also removes them from `PYTHONPATH`.
    """
    return [sys.executable, "-P", *arguments]


def twostep_module(name: str, *arguments: str) -> list[str]:
    """`python` for a module of this package, from where it was imported; another installed `twostep` is never used."""
    return python("-c", _RUN, str(Path(twostep.__file__)), name, *arguments)


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of this process and `more`, for a child that runs Python.

    Removes entries of `PYTHONPATH` that depend on the working directory: empty ones, `.`, and other relative paths.
    `PYTHONSAFEPATH` covers processes that the child starts.
    """
    variables = {**os.environ, **(more or {}), "PYTHONSAFEPATH": "1"}
    if fixed := [folder for folder in _python_path(variables) if os.path.isabs(folder)]:
        variables["PYTHONPATH"] = os.pathsep.join(fixed)
    else:
        variables.pop("PYTHONPATH", None)
    return variables


@contextmanager
def signals_held(*numbers: signal.Signals) -> Iterator[None]:
    """Within it, these signals wait. A child started meanwhile holds them back for good: one that reaches the whole
    process group, such as Ctrl-C, does not end it while it imports its modules."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def forget_relative_paths() -> None:
    """Removes relative entries of `PYTHONPATH` from `sys.path`. For commands, which run in any folder."""
    relative = [folder for folder in _python_path(os.environ) if not os.path.isabs(folder)]
    unwanted = {"", *map(os.path.abspath, relative)} if relative else {""}
    sys.path[:] = [folder for folder in sys.path if folder not in unwanted]


def _python_path(variables: Mapping[str, str]) -> list[str]:
    value = variables.get("PYTHONPATH")
    return value.split(os.pathsep) if value else []


# --- forks --------------------------------------------------------------------------------------------------------


class Owner:
    """The process that owns an object with threads, pipes or children, which do not survive a fork."""

    def __init__(self, what: str) -> None:
        """`what` names the object in errors, such as "this LLM"."""
        self._what = what
        self._pid = os.getpid()

    @property
    def here(self) -> bool:
        """Whether this is the owning process, not a fork of it."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raises `ForkedError` in a fork."""
        if not self.here:
            raise ForkedError(
                f"{self._what} belongs to process {self._pid} and cannot be used in its forked child "
                f"{os.getpid()}: create another one in the child, or start children with the multiprocessing method "
                "'spawn'"
            )


class _Descriptor(Protocol):
    @property
    def closed(self) -> bool: ...

    def fileno(self) -> int: ...


_private: "WeakSet[_Descriptor]" = WeakSet()


def keep_from_forks(file: _Descriptor) -> None:
    """Replaces `file` by the null device in forked children: they cannot read input of their parent, write its buffered
    output, or keep the other end open."""
    _private.add(file)


def _cut_off() -> None:
    """Runs in a forked child. Replaces descriptors instead of closing them, as their numbers would be reused."""
    if not _private:
        return
    null = os.open(os.devnull, os.O_RDWR)
    for file in list(_private):
        if not file.closed:
            os.dup2(null, file.fileno(), inheritable=False)
    os.close(null)


os.register_at_fork(after_in_child=_cut_off)
