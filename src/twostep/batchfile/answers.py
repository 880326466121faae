"""The file of answers: grows by whole lines, and says what an earlier run has answered."""

import fcntl
import json
import os
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, BinaryIO, Self

from twostep.batchfile.lines import BatchFileError, json_line
from twostep.engine.refusals import shown

ANSWER_BEGINS = b'{"id": "batch_req_'
"""Of a line without its end only one that begins so is a torn answer, and may be cut off."""
SYNC_EVERY_S = 1.0
"""After a power cut at most the answers of so long have to be computed again. A killed process loses none."""


class AnswerFile:
    """One run's hold on the file; a second process is refused. To be used in a `with` statement.

    A torn last line, which a kill in the midst of writing leaves, is cut off.
    """

    def __init__(self, path: Path, custom_ids: Collection[str], *, without_errors: bool = False) -> None:
        """Makes the file if there is none; `without_errors` takes those lines out of it, so that their requests have no
        answer. Raises `BatchFileError` if it holds anything but answers to these requests."""
        if path.exists() and not path.is_file():
            raise BatchFileError(f"{path}: not a file that answers can be kept in")
        self._path = path
        self._file: BinaryIO = path.open("a+b")
        self._synced_s = monotonic()
        self.answered: set[str] = set()
        """Ids that had an answer when the file was opened."""
        self.errors: dict[str, str] = {}
        """What the error says, by the ids that have one for an answer, those of `write` too; in the file's order."""
        try:
            self._lock()
            self._read(frozenset(custom_ids))
            if without_errors and self.errors:
                self._drop_errors()
        except BaseException:
            self._file.close()
            raise

    def write(self, answer: Mapping[str, Any]) -> None:
        """Appends one answer; it is in the file when this returns, whatever becomes of the process."""
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
        """A file whose place another one has taken meanwhile is as good as locked: somebody is at work."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ours = os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())
        except BlockingIOError:
            ours = False
        if not ours:
            raise BatchFileError(f"{self._path}: another process is writing answers to it")

    def _read(self, custom_ids: frozenset[str]) -> None:
        """The file ends after its last whole line then."""
        whole_bytes = 0
        self._file.seek(0)
        for number, raw in enumerate(self._file, 1):
            if raw.endswith(b"\n"):
                self._note(number, raw, custom_ids)
                whole_bytes += len(raw)
            elif raw[: len(ANSWER_BEGINS)] != ANSWER_BEGINS[: len(raw)]:
                raise BatchFileError(f"{self._path}, line {number}: {shown(raw.decode(errors='replace'))} is no answer")
        self._file.truncate(whole_bytes)

    def _note(self, number: int, raw: bytes, custom_ids: frozenset[str]) -> None:
        answer = json_line(self._path, number, raw)
        if not isinstance(answer, dict) or not {"custom_id", "response", "error"} <= answer.keys():
            raise BatchFileError(f"{self._path}, line {number}: {shown(answer)} is no answer to a request")
        custom_id = answer["custom_id"]
        if not isinstance(custom_id, str) or custom_id not in custom_ids:
            problem = f"custom_id {shown(custom_id)} is in no line of the requests; these answers belong to others"
            raise BatchFileError(f"{self._path}, line {number}: {problem}")
        self.answered.add(custom_id)
        self._note_error(answer)

    def _note_error(self, answer: Mapping[str, Any]) -> None:
        if (error := _error(answer)) is not None:
            self.errors[answer["custom_id"]] = error

    def _drop_errors(self) -> None:
        """A file without them takes the place of this one, at once and under the same lock."""
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
    """What went wrong, of an answer in OpenAI's form; None if it is none of an error."""
    response, error = answer["response"], answer["error"]
    if error is None and isinstance(response, Mapping) and response.get("status_code") == 200:
        return None
    body = response.get("body") if isinstance(response, Mapping) else None
    told = error or (body.get("error") if isinstance(body, Mapping) else None)
    return str(told.get("message")) if isinstance(told, Mapping) else shown(response)
