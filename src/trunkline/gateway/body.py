"""One message's body on its way in: taken from the inbox piece by piece, handed on whole.

Owns what of it has come. Must never hold more than the limit, or take what belongs to the next
message. Read `client.py` next.
"""

from __future__ import annotations

from trunkline.gateway.contracts import ClientError, Refusal
from trunkline.gateway.framing import BrokenFraming, ChunkReader
from trunkline.gateway.head import RequestHead
from trunkline.gateway.inbox import Inbox

_PIECE_BYTES = 64 << 10
"""Most bytes of a chunked body that are looked at together."""


class Body:
    """The body that a head announces, an empty one included."""

    __slots__ = ("_left_bytes", "_limit_bytes", "_pieces", "_reader")

    def __init__(self, head: RequestHead, limit_bytes: int) -> None:
        """Raises ClientError where it is announced to be larger than the limit."""
        if head.content_length > limit_bytes:
            raise _too_large(f"has {head.content_length} bytes; the limit is {limit_bytes}")
        self._limit_bytes = limit_bytes
        self._left_bytes = head.content_length
        self._pieces: list[bytes] = []
        self._reader: ChunkReader | None = None
        if head.is_chunked:
            self._reader = ChunkReader(takes_trailers=False, collects=True)

    def take(self, inbox: Inbox) -> bytes | None:
        """Take what is there of it; the whole, or None while something is missing. Raises
        ClientError for what is broken or too large.
        """
        if self._reader is not None:
            return self._take_chunks(inbox, self._reader)
        data = inbox.take(self._left_bytes)
        self._left_bytes -= len(data)
        if self._left_bytes > 0:
            self._pieces.append(data)
            return None
        return b"".join((*self._pieces, data)) if self._pieces else data

    def _take_chunks(self, inbox: Inbox, reader: ChunkReader) -> bytes | None:
        assert reader.pieces is not None, "a request reader that does not collect"
        end = -1
        while end < 0 and inbox.left:
            data = inbox.take(_PIECE_BYTES)
            try:
                end = reader.feed(data)
            except BrokenFraming as error:
                refusal = Refusal(code="invalid_framing", message=str(error))
                raise ClientError(refusal) from error
            self._left_bytes += sum(map(len, reader.pieces))  # counts upwards here
            self._pieces += reader.pieces
            reader.pieces.clear()
            if self._left_bytes > self._limit_bytes:
                raise _too_large(f"has more than {self._limit_bytes} bytes")
            if 0 <= end < len(data):
                inbox.put_back(data[end:])
        return b"".join(self._pieces) if end >= 0 else None


def _too_large(what: str) -> ClientError:
    return ClientError(Refusal(status=413, code="body_too_large", message=f"the body {what}"))
