"""Bodies that come compressed, with a bound on what becomes of them."""

import asyncio
import zlib
from collections.abc import AsyncIterator

from twostep.openai_api.errors import ApiError

PART_BYTES = 64 << 10
"""Decompressed at a time: a few hundred bytes can become as many KB, and the event loop waits meanwhile."""

WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
"""By the name of the encoding, as `zlib` wants it."""


class Inflater:
    """Decompresses one body."""

    def __init__(self, encoding: str) -> None:
        """`encoding` is one of `WINDOW_BITS`."""
        self._encoding = encoding
        self._stream = zlib.decompressobj(WINDOW_BITS[encoding])

    async def parts(self, piece: bytes) -> AsyncIterator[bytes]:
        """What the next bytes of the body become, at most `PART_BYTES` at a time. Raises `ApiError`."""
        part = b""
        while piece or (len(part) == PART_BYTES and not self._stream.eof):
            if self._stream.eof:
                raise self._damaged("bytes follow its end")
            try:
                part = self._stream.decompress(piece, PART_BYTES)
            except zlib.error as error:
                raise self._damaged(str(error)) from None
            piece = self._stream.unconsumed_tail or self._stream.unused_data
            yield part
            await asyncio.sleep(0)

    def end(self) -> None:
        """The body has ended. Raises `ApiError` if it is not whole."""
        if not self._stream.eof:
            raise self._damaged("it ends too early")

    def _damaged(self, why: str) -> ApiError:
        return ApiError(f"the body cannot be decompressed, Content-Encoding says {self._encoding}: {why}")


def inflater(encoding: str) -> Inflater | None:
    """For a body with this `Content-Encoding`; None: it is not compressed. Raises `ApiError` with status 415."""
    encoding = encoding.strip().lower()
    if encoding in ("", "identity"):
        return None
    if encoding not in WINDOW_BITS:
        problem = f"Content-Encoding {encoding[:60]!r} is not supported; send the body as gzip, deflate or uncompressed"
        raise ApiError(problem, status=415, code="unsupported_encoding")
    return Inflater(encoding)
