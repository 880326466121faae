"""Tries forms of structured output in a process of their own before the engine gets them (see `form_worker`)."""

import asyncio
import json
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE
from contextlib import suppress

from twostep.engine import form_worker
from twostep.engine.constraint import LIMITS, grammar_text, library, refused
from twostep.engine.structured import StructuredOutput

REMEMBERED = 256
"""Forms that passed."""


class FormCheck:
    """For one event loop. A form that is new takes a tenth of a second; one at a time."""

    def __init__(self) -> None:
        self._passed: dict[StructuredOutput, None] = {}
        self._turn = asyncio.Lock()

    async def check(self, form: StructuredOutput | None, field: str) -> None:
        """Raises `InvalidParameterError` for a form, asked for by this field, that the engine shall not compile."""
        if form is None or form in self._passed:
            return
        library()
        async with self._turn:
            if problem := await _problem(form):
                raise refused(form, problem, field)
            self._passed[form] = None
            if len(self._passed) > REMEMBERED:
                del self._passed[next(iter(self._passed))]


async def _problem(form: StructuredOutput) -> str:
    asked = json.dumps({"kind": form.kind, "text": grammar_text(form), "limits": LIMITS})
    command = sys.executable, "-P", form_worker.__file__
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL)
    try:
        said, _ = await process.communicate(asked.encode())
    finally:
        with suppress(ProcessLookupError):
            process.kill()
    if process.returncode == 0:
        return str(json.loads(said))
    slow = process.returncode in (-signal.SIGKILL, -signal.SIGXCPU)
    return f"it takes more than {form_worker.CPU_S} s to compile" if slow else "it is too deep or too large to compile"
