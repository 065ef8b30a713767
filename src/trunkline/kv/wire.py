"""What goes over a connection between two workers' KV stores, and how it is read and written.

    destination                                    source
    Hello(who, scheme, layout, nonce)  ─────────►
                                       ◄─────────  Welcome(the same of the source, MAC of both)
    Proof(MAC of both)                 ─────────►                       unix socket: a ring's handle
    Pull(grant, kv keys)               ─────────►
                                       ◄─────────  Manifests(…, MAC) or Refused(reason)
                                       ◄─────────  chunk, chunk, … or stop(reason)
    Pull | Ping                        ─────────►  …

A message is a little-endian u32 length and msgpack; a chunk is a fixed head and its bytes. Sizes
are judged before memory is taken for them, and small until the peer has proved that it has the
fleet's transfer key. Nothing names an address or an offset in memory.

Must never: wait without an end, or copy the bytes of a chunk. Read `server.py` and `client.py`
next.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, TypeVar

import msgspec

from trunkline.core.records import Instant
from trunkline.core.transfer import (
    LAYOUT_BYTES,
    MAX_GRANT_BLOCKS,
    MAX_NAME_BYTES,
    NONCE_BYTES,
    Reason,
    seal,
)
from trunkline.ports.clock import Clock

PROTOCOL = 1
MAX_MESSAGE_BYTES = 1 << 20
MAX_EARLY_BYTES = 4_096
"""The longest message before the peer has proved who it is."""
MIN_CHUNK_BYTES = 1
MAX_CHUNK_BYTES = 1 << 20
MAX_BUFFERS = 64
"""Pieces that are handed to the system in one call; Linux takes 1024."""

_LENGTH = struct.Struct("<I")
_CHUNK = struct.Struct("<BBHIII")
CHUNK_HEAD_BYTES = _CHUNK.size
_TIMEVAL = struct.Struct("@ll")

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_BYTES)]
_Digest16 = Annotated[bytes, msgspec.Meta(min_length=LAYOUT_BYTES, max_length=LAYOUT_BYTES)]
_Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
_Mac = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class Fault(Exception):
    """A connection, or a pull on it, ends here. Never leaves `kv/`: a pull's end is a value."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason.value)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """One life of one worker, and how it makes kv keys (`core.transfer.hash_scheme`)."""

    worker: str
    incarnation: str
    scheme: bytes


_SOURCE_SAYS = frozenset(
    {
        *(Reason.MISS, Reason.LENGTH, Reason.DIGEST, Reason.NS, Reason.CHAIN, Reason.TIER),
        *(Reason.LAYOUT, Reason.GRANT, Reason.INCARNATION, Reason.EPOCH, Reason.LEASE),
        *(Reason.BUSY, Reason.PINS_FULL, Reason.TOKEN, Reason.TIMEOUT, Reason.FULL),
    }
)


def said_by_source(reason: Reason) -> Reason:
    """What a source may say of its blocks; whatever else it says is not for it to say."""
    return reason if reason in _SOURCE_SAYS else Reason.PROTOCOL


# -- messages --------------------------------------------------------------------------------------


class Hello(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag="hello"):
    protocol: _Count
    worker: _Name
    incarnation: _Name
    scheme: _Digest16
    layout: _Digest16
    nonce: _Nonce


class Welcome(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag="welcome"):
    hello: Hello
    mac: _Mac


class Proof(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag="proof"):
    mac: _Mac


class Pull(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag="pull"):
    grant: str
    keys: bytes
    """Packed."""


class Manifests(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag="manifests"):
    body: bytes
    """An `Announced`."""
    mac: _Mac


class Refused(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag="refused"):
    reason: Reason


class Ping(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag="ping"):
    pass


class Pong(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag="pong"):
    pass


class Announced(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The manifests of the blocks that follow, the leading ones of the pull."""

    nonce: _Nonce
    """The grant's: this answers no other pull."""
    layout: _Digest16
    chunk_bytes: Annotated[int, msgspec.Meta(ge=MIN_CHUNK_BYTES, le=MAX_CHUNK_BYTES)]
    sizes: Annotated[list[_Count], msgspec.Meta(max_length=MAX_GRANT_BLOCKS)]
    generations: Annotated[list[_Count], msgspec.Meta(max_length=MAX_GRANT_BLOCKS)]
    digests: bytes
    """16 bytes for each chunk of each block, in order."""
    rest: Reason | None = None
    """Why the blocks after these do not come."""


Early = Hello | Welcome | Proof | Refused
Request = Pull | Ping
Reply = Manifests | Refused | Pong
_Message = TypeVar("_Message")

early_decoder: msgspec.msgpack.Decoder[Early] = msgspec.msgpack.Decoder(Early)
request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
_announced_decoder = msgspec.msgpack.Decoder(Announced)


def encoded(message: msgspec.Struct) -> bytes:
    """With its length before it."""
    body = msgspec.msgpack.encode(message)
    assert len(body) <= MAX_MESSAGE_BYTES, len(body)
    return _LENGTH.pack(len(body)) + body


def greeting_mac(transfer_key: bytes, role: bytes, hello: Hello, answer: Hello) -> bytes:
    """What only a holder of the transfer key can say about these two nonces, in its own role."""
    pair = msgspec.msgpack.encode([hello, answer])
    return seal(transfer_key, b"hello", role + pair)


def pair_fault(ours: Identity, layout_digest: bytes, theirs: Hello) -> Reason | None:
    """Why the two may not exchange blocks."""
    if theirs.protocol != PROTOCOL:
        return Reason.PROTOCOL
    if theirs.scheme != ours.scheme or theirs.layout != layout_digest:
        return Reason.LAYOUT
    return None


def sealed_manifests(transfer_key: bytes, announced: Announced) -> Manifests:
    body = msgspec.msgpack.encode(announced)
    return Manifests(body=body, mac=seal(transfer_key, b"manifest", body))


def opened_manifests(transfer_key: bytes, manifests: Manifests, nonce: bytes) -> Announced:
    """Raises Fault where they are not genuine, or answer another grant."""
    wanted = seal(transfer_key, b"manifest", manifests.body)
    if not hmac.compare_digest(wanted, manifests.mac):
        raise Fault(Reason.PROTOCOL)
    try:
        announced = _announced_decoder.decode(manifests.body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Fault(Reason.PROTOCOL) from error
    if announced.nonce != nonce:
        raise Fault(Reason.PROTOCOL)
    return announced


# -- chunks ----------------------------------------------------------------------------------------


class ChunkKind(IntEnum):
    DATA = 1
    """Its bytes follow."""
    SLOT = 2
    """Its bytes lie in a slot of the ring."""
    STOP = 3
    """No more blocks come."""


@dataclass(frozen=True, slots=True)
class ChunkHead:
    kind: ChunkKind
    block: int
    chunk: int
    length_bytes: int
    slot: int = 0

    def packed(self) -> bytes:
        return _CHUNK.pack(self.kind, 0, self.slot, self.block, self.chunk, self.length_bytes)


# Numbers are part of the wire contract: never renumber, only append.
_STOP_NUMBERS = {
    Reason.EPOCH: 1,
    Reason.LEASE: 2,
    Reason.TIMEOUT: 3,
    Reason.TOKEN: 4,
    Reason.NS: 5,
    Reason.TIER: 6,
}
_STOPS = {number: reason for reason, number in _STOP_NUMBERS.items()}


def packed_stop(reason: Reason) -> bytes:
    """Reasons that have no number of their own are told as a token that ended."""
    number = _STOP_NUMBERS.get(reason, _STOP_NUMBERS[Reason.TOKEN])
    return _CHUNK.pack(ChunkKind.STOP, number, 0, 0, 0, 0)


def read_chunk_head(raw: bytes | bytearray) -> ChunkHead:
    """Raises Fault: with the source's reason where it stops, PROTOCOL for rubbish."""
    kind, number, slot, block, chunk, length = _CHUNK.unpack(raw)
    if kind == ChunkKind.STOP:
        raise Fault(_STOPS.get(number, Reason.PROTOCOL))
    if kind not in (ChunkKind.DATA, ChunkKind.SLOT):
        raise Fault(Reason.PROTOCOL)
    return ChunkHead(ChunkKind(kind), block, chunk, length, slot)


# -- channels --------------------------------------------------------------------------------------


def interrupt(connected: socket.socket) -> None:
    """End every wait on a socket, from any thread."""
    try:
        connected.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it has ended already


def nothing_against() -> None:
    """The guard of a wait that only its end cuts short."""


class Channel:
    """A blocking socket whose every wait ends: at an instant, or when a guard raises.

    The system wakes a wait each `tick_ms`, so that a peer that sends nothing, or a byte at a time,
    is noticed by our own clock.
    """

    __slots__ = ("_clock", "is_local", "socket")

    def __init__(self, connected: socket.socket, clock: Clock, *, tick_ms: float) -> None:
        self.socket = connected
        self.is_local = connected.family == getattr(socket, "AF_UNIX", None)
        self._clock = clock
        connected.setblocking(True)
        tick = _TIMEVAL.pack(int(tick_ms // 1_000), max(1, int(tick_ms % 1_000 * 1_000)))
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, tick)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, tick)
        if not self.is_local:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def receive_into(
        self, view: memoryview, due: Instant, guard: Callable[[], None] = nothing_against
    ) -> None:
        """Fill all of `view`. Raises Fault (TIMEOUT, LOST)."""
        while len(view):
            guard()
            if self._clock.now() >= due:
                raise Fault(Reason.TIMEOUT)
            try:
                count = self.socket.recv_into(view, 0, socket.MSG_WAITALL)
            except BlockingIOError:
                continue
            except OSError as error:
                guard()
                raise Fault(Reason.LOST) from error
            if count == 0:
                guard()
                raise Fault(Reason.LOST)
            view = view[count:]

    def send(
        self,
        buffers: Sequence[bytes | memoryview],
        due: Instant,
        guard: Callable[[], None] = nothing_against,
    ) -> None:
        """Send all of them, without a copy. Raises Fault (TIMEOUT, LOST)."""
        rest = [memoryview(buffer) for buffer in buffers]
        while rest:
            guard()
            if self._clock.now() >= due:
                raise Fault(Reason.TIMEOUT)
            try:
                count = self.socket.sendmsg(rest[:MAX_BUFFERS])
            except BlockingIOError:
                continue
            except OSError as error:
                guard()
                raise Fault(Reason.LOST) from error
            rest = _after(rest, count)

    def receive_message(
        self,
        decoder: msgspec.msgpack.Decoder[_Message],
        limit_bytes: int,
        due: Instant,
        guard: Callable[[], None] = nothing_against,
    ) -> _Message:
        """Raises Fault; PROTOCOL for a message that is too long or makes no sense."""
        head = bytearray(_LENGTH.size)
        self.receive_into(memoryview(head), due, guard)
        (length,) = _LENGTH.unpack(head)
        if not 0 < length <= limit_bytes:
            raise Fault(Reason.PROTOCOL)
        body = bytearray(length)
        self.receive_into(memoryview(body), due, guard)
        try:
            return decoder.decode(body)
        except (msgspec.DecodeError, RecursionError) as error:
            raise Fault(Reason.PROTOCOL) from error

    def receive_handle(
        self, offer: bytes, due: Instant, guard: Callable[[], None] = nothing_against
    ) -> int:
        """The one file handle that comes with `offer`, to be closed by the caller. Raises Fault."""
        while True:
            guard()
            if self._clock.now() >= due:
                raise Fault(Reason.TIMEOUT)
            try:
                data, handles, _, _ = socket.recv_fds(self.socket, len(offer), 1)
            except BlockingIOError:
                continue
            except OSError as error:
                raise Fault(Reason.LOST) from error
            if data == offer and len(handles) == 1:
                return handles[0]
            for handle in handles:
                os.close(handle)
            raise Fault(Reason.PROTOCOL if data else Reason.LOST)

    def wait_request(self, due: Instant, guard: Callable[[], None] = nothing_against) -> bool:
        """Whether a message begins before `due`; False where the peer closed, or nothing came."""
        while True:
            guard()
            if self._clock.now() >= due:
                return False
            try:
                return bool(self.socket.recv(1, socket.MSG_PEEK))
            except BlockingIOError:
                continue
            except OSError:
                return False

    def has_left(self) -> bool:
        """Whether the peer closed, where nothing but that may come from it now. Does not wait."""
        try:
            return not self.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        self.socket.close()


def _after(buffers: list[memoryview], count: int) -> list[memoryview]:
    """What is left of the buffers after their first `count` bytes."""
    for number, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[number + 1 :]]
        count -= len(buffer)
    return []
