"""Several processes: how child processes of this Python are started, and what a fork must leave alone."""

import os
import sys
from collections.abc import Mapping
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
    """An object was used in a forked child of the process that it belongs to."""


# --- child processes ----------------------------------------------------------------------------------------------


def python(*arguments: str) -> list[str]:
    """The command that runs this Python without the working directory and the script's folder in its import path.

    Start it with `environment()`, which keeps them out of `PYTHONPATH` too.
    """
    return [sys.executable, "-P", *arguments]


def twostep_module(name: str, *arguments: str) -> list[str]:
    """`python` for a module of this very package, wherever it was imported from; no other `twostep` can take its
    place."""
    return python("-c", _RUN, str(Path(twostep.__file__)), name, *arguments)


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment and `more`, for a child that runs Python.

    Entries of `PYTHONPATH` that depend on the working directory are left out: the empty one, `.`, and other relative
    paths. `PYTHONSAFEPATH` is for what the child starts in turn.
    """
    variables = {**os.environ, **(more or {}), "PYTHONSAFEPATH": "1"}
    if fixed := [folder for folder in _python_path(variables) if os.path.isabs(folder)]:
        variables["PYTHONPATH"] = os.pathsep.join(fixed)
    else:
        variables.pop("PYTHONPATH", None)
    return variables


def forget_relative_paths() -> None:
    """Removes from `sys.path` what relative entries of `PYTHONPATH` put there. For commands: they run in any folder."""
    relative = [folder for folder in _python_path(os.environ) if not os.path.isabs(folder)]
    unwanted = {"", *map(os.path.abspath, relative)} if relative else {""}
    sys.path[:] = [folder for folder in sys.path if folder not in unwanted]


def _python_path(variables: Mapping[str, str]) -> list[str]:
    value = variables.get("PYTHONPATH")
    return value.split(os.pathsep) if value else []


# --- forks --------------------------------------------------------------------------------------------------------


class Owner:
    """Marks the process that made an object with threads, pipes or children, which do not follow into a fork."""

    def __init__(self, what: str) -> None:
        """`what` names the object in errors, such as "this LLM"."""
        self._what = what
        self._pid = os.getpid()

    @property
    def here(self) -> bool:
        """Whether this is that process, not a fork of it."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raises `ForkedError` in a fork."""
        if not self.here:
            raise ForkedError(
                f"{self._what} belongs to process {self._pid}, which made it, and cannot be used in its forked child "
                f"{os.getpid()}: make another one in the child, or start children with the multiprocessing method "
                "'spawn'"
            )


class _File(Protocol):
    @property
    def closed(self) -> bool: ...

    def fileno(self) -> int: ...


_private: "WeakSet[_File]" = WeakSet()


def keep_from_forks(file: _File) -> None:
    """From now on a forked child has the null device in place of `file`: it can neither read what comes for its parent,
    nor write there what the parent had not written yet, nor keep the other end open."""
    _private.add(file)


def _cut_off() -> None:
    """In a forked child. Descriptors are replaced, not closed: their numbers would be given to other files."""
    if not _private:
        return
    null = os.open(os.devnull, os.O_RDWR)
    for file in list(_private):
        if not file.closed:
            os.dup2(null, file.fileno(), inheritable=False)
    os.close(null)


os.register_at_fork(after_in_child=_cut_off)
