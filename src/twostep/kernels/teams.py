"""Native objects with threads, and what becomes of them in a forked child, which has them without the threads."""

import ctypes
import os
from weakref import WeakSet

_teams: "WeakSet[Team]" = WeakSet()


class Team:
    """Holds a native object that has threads, as long as its owner does.

    In a forked child the object is never destroyed: its destructor would wait for ever for threads that are not there.
    Its memory is shared with the parent until one of them writes it.
    """

    def __init__(self, native: object) -> None:
        self._native = native
        _teams.add(self)

    def keep(self) -> None:
        """Not even the end of the interpreter destroys it."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._native))


def _keep_all() -> None:
    for team in list(_teams):
        team.keep()


os.register_at_fork(after_in_child=_keep_all)
