"""The file of answers: grows by whole lines, and says what an earlier run has answered."""

import fcntl
import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, Self

from twostep.batchfile.lines import BatchFileError, json_line
from twostep.engine.refusals import shown

SYNC_EVERY_S = 1.0
"""After a power cut at most the answers of so long have to be computed again. A killed process loses none."""


class AnswerFile:
    """One run's hold on the file; a second process is refused. To be used in a `with` statement.

    A torn last line, which a kill in the midst of writing leaves, is cut off.
    """

    def __init__(self, path: Path, custom_ids: Collection[str]) -> None:
        """Makes the file if there is none. Raises `BatchFileError` if it holds anything but answers to these
        requests."""
        self._path = path
        self._file = path.open("a+b")
        self._synced_s = monotonic()
        try:
            self._lock()
            self.answered = self._read(frozenset(custom_ids))
        except BaseException:
            self._file.close()
            raise

    def write(self, answer: Mapping[str, Any]) -> None:
        """Appends one answer; it is in the file when this returns, whatever becomes of the process."""
        self._file.write(json.dumps(answer, allow_nan=False).encode() + b"\n")
        self._file.flush()
        if monotonic() - self._synced_s >= SYNC_EVERY_S:
            os.fsync(self._file.fileno())
            self._synced_s = monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._file:
            os.fsync(self._file.fileno())

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BatchFileError(f"{self._path}: another process is writing answers to it") from None

    def _read(self, custom_ids: frozenset[str]) -> set[str]:
        """Ids that have an answer. The file ends after its last whole line then."""
        answered: set[str] = set()
        whole_bytes = 0
        self._file.seek(0)
        for number, raw in enumerate(self._file, 1):
            if raw.endswith(b"\n"):
                answered.add(self._answered_id(number, raw, custom_ids))
                whole_bytes += len(raw)
        self._file.truncate(whole_bytes)
        return answered

    def _answered_id(self, number: int, raw: bytes, custom_ids: frozenset[str]) -> str:
        answer = json_line(self._path, number, raw)
        if not isinstance(answer, dict) or not {"custom_id", "response", "error"} <= answer.keys():
            raise BatchFileError(f"{self._path}, line {number}: {shown(answer)} is no answer to a request")
        custom_id = answer["custom_id"]
        if not isinstance(custom_id, str) or custom_id not in custom_ids:
            problem = f"custom_id {shown(custom_id)} is in no line of the requests; these answers belong to others"
            raise BatchFileError(f"{self._path}, line {number}: {problem}")
        return str(custom_id)
