"""Compiles forms of structured output in a worker process before the engine gets them (see `form_worker`)."""

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
"""Number of forms that passed and are not checked again."""


class StructuredOutputCheck:
    """For one event loop. Checking a new form takes a tenth of a second; one is checked at a time."""

    def __init__(self) -> None:
        self._passed: dict[StructuredOutput, None] = {}
        self._lock = asyncio.Lock()

    async def check(self, form: StructuredOutput | None, field: str) -> None:
        """Raises `InvalidParameterError`, which names `field`, if the engine must not compile this form, and
        `WorkerFailedError` if the check failed."""
        if form is None or form in self._passed:
            return
        library()
        async with self._lock:
            if problem := await _problem(form):
                raise refused(form, problem, field)
            self._passed[form] = None
            if len(self._passed) > REMEMBERED:
                del self._passed[next(iter(self._passed))]


async def _problem(form: StructuredOutput) -> str:
    task = json.dumps({"kind": form.kind, "text": grammar_text(form), "limits": LIMITS})
    command = python(form_worker.__file__)
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=environment()
        )
    except OSError as error:
        raise _failed(error.strerror or str(error)) from error
    try:
        output, complaints = await process.communicate(task.encode())
    finally:
        with suppress(ProcessLookupError):
            process.kill()
    return _result(process.returncode, output.decode(), complaints.decode(errors="replace"))


def _result(status: int | None, output: str, complaints: str) -> str:
    """What is wrong with the form; empty if it is valid. Raises `WorkerFailedError` for a fault of the worker."""
    ready, _, problem = output.partition("\n")
    began = ready == form_worker.READY
    if began and status == 0:
        return str(json.loads(problem))
    if status == -signal.SIGXCPU:
        return f"it takes more than {form_worker.CPU_S} s to compile"
    if began and status in _TOO_LARGE:
        return "it is too deep or too large to compile"
    raise _failed((complaints.strip().splitlines() or [f"it ended with status {status}"])[-1])


_TOO_LARGE = (form_worker.NO_MEMORY, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT)
"""Exit statuses of a started worker that reached its limits of memory or stack."""


def _failed(why: str) -> WorkerFailedError:
    problem = "the form of the answer could not be checked because its worker process failed"
    return WorkerFailedError(f"{problem}: {why:.300}")
