"""Writes a recording while the loop runs."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from twostep.background import BackgroundWriter
from twostep.config.configs import SchedulerSettings
from twostep.core.loop import Clock, Command, Inbox, Observer
from twostep.core.plan import Finished, Plan, Resolved, Step, StepResult
from twostep.core.request import Request
from twostep.errors import RecordingError
from twostep.recording.codec import encode_command, encode_plan, encode_result, to_bytes
from twostep.recording.header import encode_header, new_header

BUFFER_BYTES = 64 << 20
"""Buffer for a slow disk: some hundred thousand steps with few sequences."""


class Recorder:
    """Writes a recording to a new file at `path`. `about` describes the run: model, machine. `costs`: the calibrated
    costs that its steps are planned with, as JSON; None: it learns from the first step on.

    A separate thread writes one line per turn: the loop never waits for the disk, and if the process is killed, only
    the last moments are lost. Raises `RecordingError` if the file exists, `OSError` if it cannot be written.
    """

    def __init__(
        self,
        path: Path,
        settings: SchedulerSettings,
        about: Mapping[str, str],
        costs: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            file = path.open("xb", buffering=0)
        except FileExistsError as error:
            problem = f"{path} exists; a recording is never overwritten, give --record another name"
            raise RecordingError(problem) from error
        self._path = path
        self._last_ns = 0
        self._failed = False
        with file:
            file.write(to_bytes(encode_header(new_header(settings, about, costs))) + b"\n")
            self._writer = BackgroundWriter(file.fileno(), BUFFER_BYTES)

    def turn(self, times_ns: Sequence[int], before: Sequence[Command]) -> None:
        """Records a turn that received commands but ran no step."""
        self._write([self._differences(times_ns), [*map(encode_command, before)]])

    def step(
        self,
        times_ns: Sequence[int],
        before: Sequence[Command],
        during: Sequence[Command],
        result: StepResult,
        plan: Plan,
    ) -> None:
        """Records a turn that ran a step."""
        commands = [*map(encode_command, before)], [*map(encode_command, during)]
        self._write([self._differences(times_ns), *commands, encode_result(result), encode_plan(plan)])

    def _differences(self, times_ns: Sequence[int]) -> list[int]:
        differences = [after - before for before, after in pairwise((self._last_ns, *times_ns))]
        self._last_ns = times_ns[-1]
        return differences

    def _write(self, value: object) -> None:
        """Raises `RecordingError` once if an earlier line could not be written, or the buffer is full. The recording
        then ends, and the run can continue without it."""
        if not self._failed and not self._writer.write(to_bytes(value) + b"\n"):
            self._fail()

    def _fail(self) -> NoReturn:
        self._failed = True
        error = self._writer.error
        why = error.strerror if error else "the disk is too slow"
        raise RecordingError(f"{self._path}: {why}; the recording ends here") from error

    def close(self) -> None:
        """Writes the rest, unless the disk is stuck. Raises `RecordingError` if it is incomplete and no earlier call
        has reported that."""
        written = self._writer.close() and not self._writer.error
        if not written and not self._failed:
            self._fail()

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class RecordedSurroundings:
    """Wraps clock, inbox and observer of a loop, and passes its input and decisions to the recorder.

    Turns without commands and without a step are not recorded, as they change nothing. A turn that was interrupted by
    an exception and continued is recorded as one turn.
    """

    def __init__(self, clock: Clock, inbox: Inbox, observer: Observer, recorder: Recorder) -> None:
        self._clock, self._inbox, self._observer, self._recorder = clock, inbox, observer, recorder
        self._times_ns: list[int] = []
        self._settled = 1
        """Number of times that are final: those of the first plan, of commands, and of the step start. Later ones
        belong to plans that may be made again."""
        self._before: list[Command] = []
        self._during: list[Command] = []
        self._computing = False

    def now(self) -> int:
        now = self._clock.now()
        self._times_ns.append(now)
        return now

    def receive(self) -> Iterator[Command]:
        """Passes on commands: the loop receives them before it plans a step, and again while the step runs."""
        del self._times_ns[self._settled :]
        received = self._during if self._computing else self._before
        for command in self._inbox.receive():
            received.append(command)
            yield command
            self._settled = len(self._times_ns)

    def added(self, request: Request, numbers: tuple[int, ...], now: int) -> None:
        self._observer.added(request, numbers, now)

    def refused(self, request: Request, why: str, now: int) -> None:
        self._observer.refused(request, why, now)

    def aborted(self, finished: tuple[Finished, ...], now: int) -> None:
        self._observer.aborted(finished, now)

    def began(self, step: Step, now: int) -> None:
        self._computing = True
        self._settled = len(self._times_ns)
        self._observer.began(step, now)

    def catch_up(self) -> None:
        """Without a running step, this is the end of a turn that ran none."""
        self._observer.catch_up()
        if self._before and not self._computing:
            try:
                self._recorder.turn(self._times_ns, self._before)
            finally:
                self._begin_turn()

    def ended(self, step: Step, result: StepResult, resolved: Resolved, now: int) -> None:
        self._observer.ended(step, result, resolved, now)
        try:
            self._recorder.step(self._times_ns, self._before, self._during, result, step.plan)
        finally:
            self._begin_turn()

    def _begin_turn(self) -> None:
        self._times_ns.clear()
        self._before.clear()
        self._during.clear()
        self._settled = 0
        self._computing = False
