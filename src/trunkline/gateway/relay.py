"""One worker's answer on its way to the client: head rewritten once, body passed on as it came.

Owns the framing of the answer. It reads the body only as far as it must to know where the message
ends, and writes each received buffer once. An event stream is passed on in whole chunks, so that an
error event, or the rest from another worker, can follow whatever happens; for the latter all that
was passed on is kept, by reference and up to a bound. Must never decode a body. Read `exchange.py`
for who starts and ends it.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import Protocol

from trunkline.gateway.answers import ANTHROPIC_ID
from trunkline.gateway.contracts import InferenceRequest, Pick
from trunkline.gateway.framing import ChunkReader
from trunkline.gateway.head import AnswerHead, BrokenAnswer

TAIL_BYTES = 4 << 10
_CACHED_TOKENS = re.compile(rb'"cache(?:d|_read_input)_tokens"\s*:\s*([0-9]{1,9})')
_USAGE = re.compile(
    rb'"(prompt|input|completion|output|cached|cache_read_input)_tokens"\s*:\s*([0-9]{1,9})'
)
_NUMBER = re.compile(rb'"sequence_number"\s*:\s*([0-9]{1,15})')
_MEANT = {b"input": "prompt", b"output": "completion", b"cache_read_input": "cached"}
"""What Anthropic's words for tokens are in OpenAI's."""
_HELD_BYTES = 64 << 10
"""Longest piece of a chunk held back; a longer chunk is passed on in parts."""


class Framing(Enum):
    """How the worker's body comes, and with it how it is passed on."""

    EMPTY = "empty"
    COUNTED = "counted"
    CHUNKED = "chunked"
    UNCHUNKED = "unchunked"
    """Chunks for a client that knows none: passed on bare, ended by closing."""
    REST = "rest"
    """Until the worker closes; made chunks for a client that knows them."""


# In Python 3.11 a member costs 50 ns more where it is looked up in its class.
EMPTY, COUNTED, CHUNKED, UNCHUNKED, REST = Framing


class Writer(Protocol):
    """Where the answer goes."""

    def write(self, data: bytes) -> None: ...


class Relay:
    """The body of one answer. The exchange calls `pass_on` for each buffer behind the head."""

    __slots__ = (
        "_client",
        "_forgotten_bytes",
        "_held",
        "_held_bytes",
        "_is_mid_chunk",
        "_keeps_all",
        "_kept",
        "_kept_before",
        "_kept_bytes",
        "_most_kept_bytes",
        "_reader",
        "_remaining",
        "framing",
        "is_chunked_out",
        "is_events",
    )  # fmt: skip

    def __init__(
        self, client: Writer, head: AnswerHead, *, takes_chunks: bool, most_kept_bytes: int = 0
    ) -> None:
        """`most_kept_bytes`: of a stream, so much is kept in case that it has to go on elsewhere; 0
        for an answer that cannot.
        """
        self._client = client
        self._remaining = head.content_length or 0
        self._reader: ChunkReader | None = None
        self.is_events = head.is_event_stream
        """Whether this is a stream of events that we may add one to."""
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._is_mid_chunk = False
        self._kept: list[bytes] = []
        """All that was passed on, or of that the latest."""
        self._kept_before = b""
        self._kept_bytes = 0
        self._forgotten_bytes = 0
        self.framing = _framing(head, takes_chunks=takes_chunks)
        is_whole_events = self.is_events and self.framing is CHUNKED
        self._keeps_all = is_whole_events and most_kept_bytes > TAIL_BYTES
        self._most_kept_bytes = most_kept_bytes if self._keeps_all else TAIL_BYTES
        is_openended = self.framing is CHUNKED or self.framing is REST
        self.is_chunked_out = takes_chunks and is_openended
        if head.is_chunked:
            collects = self.framing is UNCHUNKED
            self._reader = ChunkReader(takes_trailers=True, collects=collects)

    @property
    def ends_by_closing(self) -> bool:
        """Whether the client learns the end only from the closed connection."""
        return self.framing is UNCHUNKED or (self.framing is REST and not self.is_chunked_out)

    @property
    def events_delivered(self) -> int:
        """Whole chunks so far: in a stream of an engine one event, and so one token, each."""
        return self._reader.whole_chunks if self._reader is not None else 0

    def next_number(self) -> int:
        """Behind the last event that was passed on, where events bear numbers."""
        found = _NUMBER.findall(self.tail())
        return int(found[-1]) + 1 if found else self.events_delivered

    @property
    def bytes_out(self) -> int:
        """Of the body, as it was passed on."""
        return self._forgotten_bytes + self._kept_bytes

    @property
    def forwarded(self) -> list[bytes] | None:
        """All that was passed on of a stream, in chunks; None where it was not kept, or where the
        client stands inside a chunk.
        """
        return self._kept if self._keeps_all and not self._is_mid_chunk else None

    @property
    def leaves_link_clean(self) -> bool:
        """Whether the worker's connection is behind the end of its answer, and open."""
        return self.framing is not REST

    def begin(self, head: bytes, body: bytes) -> bool:
        """Write the head, with whatever of the body came along. True where the answer is whole."""
        is_counted = self.framing is COUNTED
        if self.framing is EMPTY or (is_counted and self._remaining == 0):
            if body:
                raise BrokenAnswer("the worker sent bytes behind the end of its answer")
            self._client.write(head)
            return True
        if not body:
            self._client.write(head)
            return False
        return self._pass(body, head)

    def pass_on(self, data: bytes) -> bool:
        """Pass one buffer on. True where it ended the answer. Raises BrokenAnswer,
        BrokenFraming.
        """
        if self.framing is not CHUNKED:
            return self._pass(data, b"")
        reader = self._reader
        assert reader is not None, "a chunked relay without a reader"
        end = reader.feed(data)
        if end >= 0 or self._held or (self.is_events and reader.boundary != len(data)):
            return self._pass_chunks(data, b"", end)
        self._is_mid_chunk = False
        self._client.write(data)
        self._kept.append(data)  # `_keep`, without the call: this is done for each token
        self._kept_bytes += len(data)
        if self._kept_bytes > self._most_kept_bytes:
            self._forget()
        return False

    def end_of_worker(self) -> bool:
        """The worker closed. True where that is how its answer ends."""
        if self.framing is not REST:
            return False
        if self.is_chunked_out:
            self._client.write(b"0\r\n\r\n")
        return True

    def break_off(self, event: bytes) -> bool:
        """End a broken event stream with `event`. False where the client stands inside a chunk."""
        if not self.is_events or self._is_mid_chunk:
            return False
        if self.framing is COUNTED:
            return False
        self._held = []
        if not self._ended_an_event():
            event = b"\n\n" + event  # the event in hand is lost, and must not swallow ours
        if self.is_chunked_out:
            event = b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event)
        self._client.write(event)
        return True

    def tail(self) -> bytes:
        """The last few KiB of the body, framing included."""
        pieces: list[bytes] = []
        size = 0
        for data in reversed(self._kept):
            pieces.append(data[-TAIL_BYTES:])
            size += len(data)
            if size >= TAIL_BYTES:
                break
        pieces.append(self._kept_before)
        return b"".join(reversed(pieces))[-TAIL_BYTES:]

    def cached_tokens(self) -> int | None:
        """What the worker's usage said of reuse, if anything."""
        return cached_tokens_in(self.tail())

    def usage(self) -> dict[str, int]:
        """All that the worker's usage said: prompt, completion and cached tokens."""
        found = _USAGE.findall(self.tail())
        return {_MEANT.get(name) or name.decode("ascii"): int(count) for name, count in found}

    # -- inside ----------------------------------------------------------------------------------
    # `head` is what must go out in front, in the same write.

    def _pass(self, data: bytes, head: bytes) -> bool:
        match self.framing:
            case Framing.CHUNKED:
                assert self._reader is not None, "a chunked relay without a reader"
                return self._pass_chunks(data, head, self._reader.feed(data))
            case Framing.COUNTED:
                self._remaining -= len(data)
                if self._remaining < 0:
                    raise BrokenAnswer("the worker sent bytes behind the end of its answer")
                self._client.write(head + data if head else data)
                self._keep(data)
                return self._remaining == 0
            case Framing.UNCHUNKED:
                return self._pass_bare(data, head)
            case Framing.REST:
                framed = b"%x\r\n%b\r\n" % (len(data), data) if self.is_chunked_out else data
                self._client.write(head + framed if head else framed)
                self._keep(data)
                return False
            case Framing.EMPTY:
                raise BrokenAnswer("the worker sent a body where none belongs")

    def _pass_bare(self, data: bytes, head: bytes) -> bool:
        reader = self._reader
        assert reader is not None, "an unchunking relay without a reader"
        assert reader.pieces is not None, "an unchunking relay that does not collect"
        end = reader.feed(data)
        payload = b"".join(reader.pieces)
        reader.pieces.clear()
        self._client.write(head + payload)
        self._keep(payload)
        return self._is_end(end, data)

    def _pass_chunks(self, data: bytes, head: bytes, end: int) -> bool:
        """The careful way: hold back what belongs to a chunk, or an end, that is not whole yet."""
        assert self._reader is not None, "a chunked relay without a reader"
        boundary = self._reader.boundary
        is_end = self._is_end(end, data)
        if is_end or not self.is_events or (self._is_mid_chunk and boundary <= 0):
            out, rest = data, b""
        elif boundary <= 0:
            out, rest = b"", data
        else:
            out, rest = data[:boundary], data[boundary:]
            self._is_mid_chunk = False
        if out and self._held:
            out = b"".join(self._held) + out
            self._held = []
            self._held_bytes = 0
        if rest:
            self._held.append(rest)
            self._held_bytes += len(rest)
            if self._held_bytes > _HELD_BYTES:
                out += b"".join(self._held)
                self._held = []
                self._held_bytes = 0
                self._is_mid_chunk = True
        if head or out:
            self._client.write(head + out)
            self._keep(out)
        return is_end

    def _is_end(self, end: int, data: bytes) -> bool:
        if end < 0:
            return False
        if end != len(data):
            raise BrokenAnswer("the worker sent bytes behind the end of its answer")
        return True

    def _keep(self, data: bytes) -> None:
        self._kept.append(data)
        self._kept_bytes += len(data)
        if self._kept_bytes > self._most_kept_bytes:
            self._forget()

    def _forget(self) -> None:
        """Keep no more than the end of what was passed on."""
        self._kept_before = self.tail()
        self._forgotten_bytes += self._kept_bytes
        self._keeps_all = False
        self._most_kept_bytes = TAIL_BYTES
        self._kept = []
        self._kept_bytes = 0

    def _ended_an_event(self) -> bool:
        tail = self.tail()
        if not tail:
            return True
        if self.framing is CHUNKED:
            tail = tail[:-2]  # the CRLF of the chunk
        return tail.endswith((b"\n\n", b"\r\n\r\n", b"\r\r"))


def rewrite(head: AnswerHead, relay: Relay, own: bytes, *, closes: bool) -> bytes:
    """The head for the client: what the worker's passes on, the framing, our `own` lines."""
    framing = b""
    if relay.is_chunked_out:
        framing = b"transfer-encoding: chunked\r\n"
    elif relay.framing is COUNTED:
        framing = b"content-length: %d\r\n" % (head.content_length or 0)
    end = b"connection: close\r\n\r\n" if closes or relay.ends_by_closing else b"\r\n"
    first = b"HTTP/1.1 %d %b\r\n" % (head.status, head.reason)
    return b"".join((first, head.passed, framing, own, end))


def cached_tokens_in(tail: bytes) -> int | None:
    """What a usage in the end of an answer says of reuse, if there is one."""
    found = _CACHED_TOKENS.findall(tail[-TAIL_BYTES:])
    return int(found[-1]) if found else None


def own_fields(request: InferenceRequest, pick: Pick | None) -> tuple[tuple[str, str], ...]:
    """`own_lines` for whoever writes heads in another way."""
    return tuple(fields_in(own_lines(request, pick)))


def fields_in(lines: bytes) -> list[tuple[str, str]]:
    """Header lines of ours as names and values."""
    pairs = (line.partition(": ") for line in lines.decode("latin-1").split("\r\n") if line)
    return [(name, value) for name, _, value in pairs]


def own_lines(request: InferenceRequest, pick: Pick | None, course: str = "") -> bytes:
    """What we say ourselves in the head of an answer. `course`: what is told behind the choice."""
    own = f"x-request-id: {request.request_id}\r\n"
    if request.route.is_anthropic:
        own += f"{ANTHROPIC_ID}: {request.request_id}\r\n"
    if pick is not None and pick.decision_header:
        own += f"x-trunkline-decision: {pick.decision_header}{course}\r\n"
    if request.began_session:
        own += f"x-trunkline-session: {request.began_session}\r\n"
    for name, value in request.limit_headers + request.browser_headers:
        own += f"{name}: {value}\r\n"
    return own.encode("latin-1")


def _framing(head: AnswerHead, *, takes_chunks: bool) -> Framing:
    if head.status in {204, 304}:
        return EMPTY
    if head.is_chunked:
        return CHUNKED if takes_chunks else UNCHUNKED
    return REST if head.content_length is None else COUNTED
