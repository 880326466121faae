"""Records the server's traffic as a workload: arrivals, lengths and shared prefixes; never text or tokens."""

import logging
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from secrets import token_bytes
from time import monotonic_ns

from twostep.background import BackgroundWriter
from twostep.core.blocks import HASH_BYTES, prompt_hashes, root_hash
from twostep.core.request import BLOCK_TOKENS
from twostep.errors import WorkloadError
from twostep.server.observe.finished_requests import Reply
from twostep.workload.definition import Workload, WorkloadRequest
from twostep.workload.format import BY_END, header_line, request_line

log = logging.getLogger(__name__)

KNOWN_BLOCKS = 1 << 18
"""Blocks whose numbers are remembered, some 60 MB. After 4 million further tokens a prefix counts as new: no cache of
this machine would still contain it."""


BUFFER_BYTES = 16 << 20
"""How far the disk may lag: some hundred thousand answers to short prompts."""


class TrafficRecorder:
    """Writes a new file at `path`, one row per answer when it ends, in a thread: replies never wait for the disk, and
    if the process is killed, the file lacks at most the last moments. `add_reply` is called by `FinishedRequests`.

    Prompts are identified by hashes with a key that never leaves this object: no one can find a prompt by guessing.
    Raises `WorkloadError` if the file cannot be created or exists.
    """

    def __init__(self, path: Path, model: str, known_blocks: int = KNOWN_BLOCKS) -> None:
        self._key = token_bytes(HASH_BYTES)
        self._numbers = BlockNumbers(known_blocks)
        self._begin_ns = monotonic_ns()
        header = header_line(Workload((), BLOCK_TOKENS, path.stem, f"recorded by twostep serve, {model}"), BY_END)
        try:
            with path.open("xb", buffering=0) as file:
                file.write(header.encode())
                self._writer = BackgroundWriter(file.fileno(), BUFFER_BYTES)
        except FileExistsError:
            problem = f"record_workload: {path} exists and is not overwritten; choose another name"
            raise WorkloadError(problem) from None
        except OSError as error:
            raise WorkloadError(f"record_workload: {path}: {error.strerror}") from None
        self._path, self._ended = path, False

    def add_reply(self, reply: Reply) -> None:
        """If an earlier row could not be written, or too many are waiting for the disk, ends the recording."""
        if self._ended:
            return
        rows = "".join(map(request_line, self._rows(reply))).encode()
        if rows and not self._writer.write(rows):
            self._end()

    def _end(self) -> None:
        self._ended = True
        error = self._writer.error
        why = error.strerror if error else "the disk does not keep up"
        log.warning("%s: %s; the recording of the workload ends here", self._path, why)

    def close(self) -> None:
        """Writes the remaining rows, unless the disk is stuck."""
        written = self._writer.close() and not self._writer.error
        if not written and not self._ended:
            self._end()
        self._ended = True

    def _rows(self, reply: Reply) -> Iterator[WorkloadRequest]:
        """One row per answer. A cancelled answer counts with the tokens it had, at least one."""
        root = root_hash("", "", reply.cache_salt, self._key)
        for output in reply.outputs:
            blocks = self._numbers.of(prompt_hashes(root, output.prompt_token_ids))
            for choice in output.choices:
                tokens = max(1, len(choice.token_ids))
                arrival_s = round((reply.received_ns - self._begin_ns) / 1e9, 6)
                yield WorkloadRequest(max(0.0, arrival_s), len(output.prompt_token_ids), tokens, blocks)


class BlockNumbers:
    """Numbers blocks in the order in which they are first seen; remembers the `most` seen last."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._numbers: OrderedDict[bytes, int] = OrderedDict()
        self._unused = 0

    def __len__(self) -> int:
        return len(self._numbers)

    def of(self, hashes: Sequence[bytes]) -> tuple[int, ...]:
        """The numbers of a prompt's blocks. Its end is forgotten before its beginning, as a block is found by the
        blocks before it."""
        numbers = tuple(self._number(name) for name in hashes)
        for name in reversed(hashes):
            self._numbers.move_to_end(name)
        while len(self._numbers) > self._most:
            self._numbers.popitem(last=False)
        return numbers

    def _number(self, name: bytes) -> int:
        if (number := self._numbers.get(name)) is None:
            number = self._numbers[name] = self._unused
            self._unused += 1
        return number
