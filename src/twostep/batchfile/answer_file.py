"""The answer file: grows by complete lines, and tells which requests an earlier run has answered."""

import fcntl
import json
import os
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, BinaryIO, Self

from twostep.batchfile.request_lines import BatchFileError, json_line
from twostep.engine.refusals import shown

ANSWER_BEGINS = b'{"id": "batch_req_'
"""How an answer begins. Only an incomplete last line that begins like this is cut off."""
SYNC_EVERY_S = 1.0
"""Interval of `fsync`: a power failure loses the answers of this time. A killed process loses none."""


class AnswerFile:
    """The answer file of one run, locked against other processes; a context manager.

    An incomplete last line, which a process leaves if it is killed while it writes, is cut off.
    """

    def __init__(self, path: Path, custom_ids: Collection[str], *, without_errors: bool = False) -> None:
        """Creates the file if it does not exist. `without_errors` removes error answers, so that their requests are
        answered again. Raises `BatchFileError` if the file contains anything but answers to these requests."""
        if path.exists() and not path.is_file():
            raise BatchFileError(f"{path} is not a regular file; answers cannot be written to it")
        self._path = path
        self._file: BinaryIO = path.open("a+b")
        self._synced_s = monotonic()
        self.answered: set[str] = set()
        """Ids with an answer when the file was opened."""
        self.errors: dict[str, str] = {}
        """Messages of error answers by id, including those of `write`, in the file's order."""
        try:
            self._lock()
            self._read(frozenset(custom_ids))
            if without_errors and self.errors:
                self._drop_errors()
        except BaseException:
            self._file.close()
            raise

    def write(self, answer: Mapping[str, Any]) -> None:
        """Appends one answer. When this returns it is in the file, even if the process is killed."""
        self._file.write(json.dumps(answer, allow_nan=False).encode() + b"\n")
        self._file.flush()
        self._note_error(answer)
        if monotonic() - self._synced_s >= SYNC_EVERY_S:
            os.fsync(self._file.fileno())
            self._synced_s = monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._file:
            os.fsync(self._file.fileno())

    def _lock(self) -> None:
        """Locks the file. A file that was replaced meanwhile counts as locked: another process is working on it."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ours = os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())
        except BlockingIOError:
            ours = False
        if not ours:
            raise BatchFileError(f"{self._path}: another process is writing answers to it")

    def _read(self, custom_ids: frozenset[str]) -> None:
        """Reads the answers and truncates the file after its last complete line."""
        whole_bytes = 0
        self._file.seek(0)
        for number, raw in enumerate(self._file, 1):
            if raw.endswith(b"\n"):
                self._note(number, raw, custom_ids)
                whole_bytes += len(raw)
            elif raw[: len(ANSWER_BEGINS)] != ANSWER_BEGINS[: len(raw)]:
                raise BatchFileError(
                    f"{self._path}, line {number}: {shown(raw.decode(errors='replace'))} is not an answer"
                )
        self._file.truncate(whole_bytes)

    def _note(self, number: int, raw: bytes, custom_ids: frozenset[str]) -> None:
        answer = json_line(self._path, number, raw)
        if not isinstance(answer, dict) or not {"custom_id", "response", "error"} <= answer.keys():
            raise BatchFileError(f"{self._path}, line {number}: {shown(answer)} is not an answer to a request")
        custom_id = answer["custom_id"]
        if not isinstance(custom_id, str) or custom_id not in custom_ids:
            problem = f"custom_id {shown(custom_id)} is not among the requests; these answers belong to another file"
            raise BatchFileError(f"{self._path}, line {number}: {problem}")
        self.answered.add(custom_id)
        self._note_error(answer)

    def _note_error(self, answer: Mapping[str, Any]) -> None:
        if (error := _error(answer)) is not None:
            self.errors[answer["custom_id"]] = error

    def _drop_errors(self) -> None:
        """Replaces the file atomically by one without error answers, which is locked too."""
        path = self._path.resolve()
        new = path.with_name(f".{path.name}.without-errors")
        file: BinaryIO = new.open("w+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            self._file.seek(0)
            file.writelines(raw for raw in self._file if json.loads(raw)["custom_id"] not in self.errors)
            file.flush()
            os.fsync(file.fileno())
            shutil.copymode(path, new)
            new.replace(path)
        except BaseException:
            file.close()
            new.unlink()
            raise
        self._file.close()
        self._file = file
        self.answered -= self.errors.keys()
        self.errors.clear()


def _error(answer: Mapping[str, Any]) -> str | None:
    """The message of an error answer in OpenAI's form; None for other answers."""
    response, error = answer["response"], answer["error"]
    if error is None and isinstance(response, Mapping) and response.get("status_code") == 200:
        return None
    body = response.get("body") if isinstance(response, Mapping) else None
    reported = error or (body.get("error") if isinstance(body, Mapping) else None)
    return str(reported.get("message")) if isinstance(reported, Mapping) else shown(response)
