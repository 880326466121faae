"""One client's connection: uvicorn's, and looked at now and then, as uvicorn leaves some clients alone for ever."""

import json
import select
from contextlib import suppress
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from twostep.openai_api.errors import ApiError

LOOK_S = 0.3
"""So often `look` has to be called: whoever has gone is noticed so soon."""

HEAD_S = 20.0
"""How long a client may take from connecting, or from the first byte of a further request, to the end of its head."""

STALLED_S = 30.0
"""A client that takes nothing for so long, or only some tens of KB while more waits for it, is taken for gone."""

ABORT = "abort"
"""Key of the scope's `state`: call this to end the connection at once."""

_HUNG_UP = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)  # the last is Linux's


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
        """The client has gone, or is taken for gone. What was not sent is dropped."""
        self.transport.abort()
        if self._answering:
            self.cycle.disconnected = True  # as it will be in the event loop's next turn: nothing more is sent

    def look(self) -> None:
        """Ends the connection if its client is gone, does not come to its point or does not take what it asked for."""
        now_s = self.loop.time()
        slow_head = self._head_since_s is not None and now_s - self._head_since_s > HEAD_S
        if slow_head or self._stalled(now_s) or (self.flow.read_paused and self._hung_up()):
            self.abort()

    def _stalled(self, now_s: float) -> bool:
        """More is written only once most of what waits has gone; that which has no more to come has to get on."""
        unsent = self.transport.get_write_buffer_size()
        if not unsent or unsent != self._unsent:
            self._unsent, self._moved_s = unsent, now_s
        since_s = self._moved_s if self._paused_since_s is None else min(self._moved_s, self._paused_since_s)
        return now_s - since_s > STALLED_S

    def _hung_up(self) -> bool:
        """A hang-up lies behind bytes that are not read: uvicorn stops reading where another request follows."""
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket"), _HUNG_UP)
        return bool(poll.poll(0))

    # --- what asyncio and uvicorn call ----------------------------------------------------------------------------

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
        """What is no HTTP gets OpenAI's error object too, unless a reply has begun: then only the end is left."""
        body = json.dumps(ApiError(f"{msg} Only HTTP/1.1 and 1.0 are spoken here.").body()).encode()
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body))), ("Connection", "close")]
        reply = h11.Response(status_code=400, headers=headers, reason=b"Bad Request"), h11.Data(data=body)
        with suppress(h11.LocalProtocolError):
            for part in (*reply, h11.EndOfMessage()):
                self.transport.write(self.conn.send(part))
        self.transport.close()
