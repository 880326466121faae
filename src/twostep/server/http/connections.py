"""uvicorn's connection to one client, with time limits: uvicorn alone waits for some clients for ever."""

import json
import select
from contextlib import suppress
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from twostep.openai_api.api_error import ApiError

CHECK_S = 0.3
"""Interval at which `check` has to be called; a client that left is noticed within it."""

HEAD_S = 20.0
"""Time limit for a request's head, from connecting or from the first byte of a further request."""

STALLED_S = 30.0
"""A client that reads nothing for this long, or only some tens of KB while more is waiting, is disconnected."""

ABORT = "abort"
"""Key of the scope's `state`: a function that closes the connection at once."""

_HUNG_UP = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)  # POLLRDHUP exists only on Linux


class Connection(H11Protocol):
    """The protocol object that uvicorn makes for each client."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.app_state = {**self.app_state, ABORT: self.abort}
        self._head_since_s: float | None = self.loop.time()
        self._paused_since_s: float | None = None
        self._unsent, self._moved_s = 0, 0.0

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def abort(self) -> None:
        """Closes the connection at once; unsent data is dropped."""
        self.transport.abort()
        if self._answering:
            self.cycle.disconnected = True  # takes effect at once, not in the event loop's next iteration

    def check(self) -> None:
        """Aborts the connection if the client left, takes too long to send a request head or does not read."""
        now_s = self.loop.time()
        slow_head = self._head_since_s is not None and now_s - self._head_since_s > HEAD_S
        if slow_head or self._stalled(now_s) or (self.flow.read_paused and self._hung_up()):
            self.abort()

    def _stalled(self, now_s: float) -> bool:
        """Whether the client has stopped reading: more is written only once most of the buffer has been sent, and a
        completed response must keep draining."""
        unsent = self.transport.get_write_buffer_size()
        if not unsent or unsent != self._unsent:
            self._unsent, self._moved_s = unsent, now_s
        since_s = self._moved_s if self._paused_since_s is None else min(self._moved_s, self._paused_since_s)
        return now_s - since_s > STALLED_S

    def _hung_up(self) -> bool:
        """Detects a hang-up behind unread bytes: uvicorn stops reading when another request follows."""
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket"), _HUNG_UP)
        return bool(poll.poll(0))

    # --- callbacks of asyncio and uvicorn -------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if not self._answering and self._head_since_s is None:
            self._head_since_s = self.loop.time()
        super().data_received(data)
        if self._answering:
            self._head_since_s = None

    def pause_writing(self) -> None:
        self._paused_since_s = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._paused_since_s = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Answers invalid HTTP with OpenAI's error object; if a reply has begun, only closes the connection."""
        body = json.dumps(ApiError(f"{msg} Only HTTP/1.1 and 1.0 are supported.").body()).encode()
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body))), ("Connection", "close")]
        reply = h11.Response(status_code=400, headers=headers, reason=b"Bad Request"), h11.Data(data=body)
        with suppress(h11.LocalProtocolError):
            for part in (*reply, h11.EndOfMessage()):
                self.transport.write(self.conn.send(part))
        self.transport.close()
