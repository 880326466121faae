"""Tries forms of structured output in a process of their own before the engine gets them (see `form_worker`)."""

import asyncio
import json
import signal
from asyncio.subprocess import PIPE
from contextlib import suppress

from twostep.engine.text import form_worker
from twostep.engine.text.constraint import LIMITS, grammar_text, library, refused
from twostep.engine.text.structured_output import StructuredOutput
from twostep.errors import WorkerFailedError
from twostep.processes import environment, python

REMEMBERED = 256
"""Forms that passed."""


class FormCheck:
    """For one event loop. A form that is new takes a tenth of a second; one at a time."""

    def __init__(self) -> None:
        self._passed: dict[StructuredOutput, None] = {}
        self._turn = asyncio.Lock()

    async def check(self, form: StructuredOutput | None, field: str) -> None:
        """Raises `InvalidParameterError` for a form, asked for by this field, that the engine shall not compile, and
        `WorkerFailedError` where that cannot be found out."""
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
    command = python(form_worker.__file__)
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=environment()
        )
    except OSError as error:
        raise _failed(error.strerror or str(error)) from error
    try:
        said, complaints = await process.communicate(asked.encode())
    finally:
        with suppress(ProcessLookupError):
            process.kill()
    return _verdict(process.returncode, said.decode(), complaints.decode(errors="replace"))


def _verdict(status: int | None, said: str, complaints: str) -> str:
    """What is wrong with the form; empty if nothing is. Raises `WorkerFailedError` where the worker is to blame."""
    ready, _, problem = said.partition("\n")
    began = ready == form_worker.READY
    if began and status == 0:
        return str(json.loads(problem))
    if status == -signal.SIGXCPU:
        return f"it takes more than {form_worker.CPU_S} s to compile"
    if began and status in _TOO_LARGE:
        return "it is too deep or too large to compile"
    raise _failed((complaints.strip().splitlines() or [f"it ended with status {status}"])[-1])


_TOO_LARGE = (form_worker.NO_MEMORY, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT)
"""How the worker ends, once it has begun, at the limits of its memory and stack."""


def _failed(why: str) -> WorkerFailedError:
    return WorkerFailedError(f"the form of the answer could not be checked, its worker failed: {why:.300}")
