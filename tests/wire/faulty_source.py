"""A source that speaks the protocol right but for one planted fault.

Written by hand beside `kv/server.py`, so that a fault can be put at any byte. It serves one
connection after the other, and moves the test's clock where it lets the other end wait.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from enum import Enum

from pull_desk import KEY, STALL_MS, Ends, identity, wait_until

from trunkline.core.records import Instant
from trunkline.core.transfer import Reason, read_grant
from trunkline.kv.peers import Source
from trunkline.kv.records import Block
from trunkline.kv.ring import SLOTS, Ring
from trunkline.kv.wire import (
    MAX_MESSAGE_BYTES,
    PROTOCOL,
    Announced,
    Channel,
    ChunkHead,
    ChunkKind,
    Fault,
    Hello,
    Pull,
    Refused,
    Welcome,
    early_decoder,
    encoded,
    greeting_mac,
    packed_stop,
    request_decoder,
    sealed_manifests,
)

FOREVER = Instant(1e12)


class Planted(Enum):
    """What goes wrong at the chosen chunk; the last ones go wrong before any chunk."""

    NOTHING = "nothing"
    FLIP = "flip"
    MIX = "mix"
    """The slot was given to another block while it was being read."""
    TRUNCATE = "truncate"
    STALL = "stall"
    DRIP = "drip"
    CLOSE = "close"
    DUPLICATE = "duplicate"
    OUT_OF_ORDER = "out-of-order"
    SHORT_CHUNK = "short-chunk"
    LONG_CHUNK = "long-chunk"
    EMPTY_CHUNK = "empty-chunk"
    RUBBISH = "rubbish"
    OTHER_KIND = "other-kind"
    WRONG_SLOT = "wrong-slot"
    STOP = "stop"
    WRONG_REVISION = "wrong-revision"
    WRONG_LENGTH = "wrong-length"
    EMPTY_BLOCK = "empty-block"
    TOO_FEW_DIGESTS = "too-few-digests"
    TOO_MANY_BLOCKS = "too-many-blocks"
    FEWER_WITHOUT_REASON = "fewer-without-reason"
    FORGED_MANIFEST = "forged-manifest"
    OTHER_GRANTS_MANIFEST = "other-grants-manifest"
    HUGE_MESSAGE = "huge-message"
    ENDLESS_MESSAGE = "endless-message"
    NO_MESSAGE = "no-message"
    SILENT = "silent"
    """Not even a greeting."""
    OTHER_LIFE = "other-life"
    OTHER_KEY = "other-key"
    REFUSES_AS_WE = "refuses-as-we"
    """Says that we have given up."""
    REFUSES_EARLY = "refuses-early"
    """Says that it has nothing, before it has proved who it is."""


class FaultySource:
    """Listens on loopback, or on a unix socket with a ring."""

    def __init__(self, ends: Ends, planted: Planted, at_chunk: int = 0) -> None:
        self._ends = ends
        self._planted = planted
        self._at = at_chunk
        self.pulls_begun = 0
        if ends.is_local:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._local = f"trunkline-test-{ends.draw.randbytes(8).hex()}"
            self._listener.bind(f"\0{self._local}")
            self._listener.listen()
            self._port = 1
        else:
            self._listener = socket.create_server(("127.0.0.1", 0))
            self._local = ""
            self._port = self._listener.getsockname()[1]
        self._channel: Channel | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def source(self) -> Source:
        return Source(
            worker="w1", incarnation="i1", host="127.0.0.1", port=self._port, local=self._local
        )

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        channel = self._channel
        if channel is not None:
            with contextlib.suppress(OSError):
                channel.socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        while True:
            try:
                connected, _ = self._listener.accept()
            except OSError:
                return
            channel = self._channel = Channel(connected, self._ends.clock, tick_ms=5)
            with contextlib.suppress(Fault, OSError):
                self._serve(channel)
            channel.close()

    def _serve(self, channel: Channel) -> None:
        if self._planted is Planted.SILENT:
            self._make_late(channel)
        self._greet(channel)
        ring = Ring(channel.socket, self._ends.layout) if channel.is_local else None
        try:
            while channel.wait_request(FOREVER):
                request = channel.receive_message(request_decoder, MAX_MESSAGE_BYTES, FOREVER)
                assert isinstance(request, Pull)
                self._pull(channel, ring, request)
        finally:
            if ring is not None:
                ring.close()

    def _greet(self, channel: Channel) -> None:
        hello = channel.receive_message(early_decoder, 4_096, FOREVER)
        assert isinstance(hello, Hello)
        me = identity("w1", "i0" if self._planted is Planted.OTHER_LIFE else "i1")
        ours = Hello(
            protocol=PROTOCOL,
            worker=me.worker,
            incarnation=me.incarnation,
            scheme=me.scheme,
            layout=self._ends.layout.digest,
            nonce=b"s" * 16,
        )
        if self._planted is Planted.REFUSES_EARLY:
            channel.send([encoded(Refused(reason=Reason.MISS))], FOREVER)
            raise Fault(Reason.PROTOCOL)
        key = b"x" * 32 if self._planted is Planted.OTHER_KEY else KEY
        mac = greeting_mac(key, b"source", hello, ours)
        channel.send([encoded(Welcome(hello=ours, mac=mac))], FOREVER)
        channel.receive_message(early_decoder, 4_096, FOREVER)

    def _pull(self, channel: Channel, ring: Ring | None, request: Pull) -> None:
        self.pulls_begun += 1
        grant = read_grant(request.grant, KEY)
        assert grant is not None
        keys = [request.keys[at : at + 32] for at in range(0, len(request.keys), 32)]
        store = self._ends.source.store
        pins = store.pin(grant.ns, keys, until=FOREVER, is_verified=False)
        try:
            if self._planted is Planted.REFUSES_AS_WE:
                channel.send([encoded(Refused(reason=Reason.CLIENT))], FOREVER)
                return
            self._announce(channel, list(pins.blocks), grant.nonce, pins.reason)
            self._send(channel, ring, list(pins.blocks))
        finally:
            store.unpin(pins.token)

    def _announce(
        self, channel: Channel, blocks: list[Block], nonce: bytes, rest: Reason | None
    ) -> None:
        planted = self._planted
        announced = Announced(
            nonce=nonce,
            layout=self._ends.layout.digest,
            chunk_bytes=self._ends.layout.chunk_bytes,
            sizes=[block.manifest.size_bytes for block in blocks],
            generations=[block.manifest.generation for block in blocks],
            digests=b"".join(d for block in blocks for d in block.manifest.digests),
            rest=rest,
        )
        match planted:
            case Planted.WRONG_REVISION:
                announced.layout = b"r" * 16
            case Planted.WRONG_LENGTH:
                announced.sizes[-1] -= 1
            case Planted.EMPTY_BLOCK:
                announced.sizes[0] = 0
            case Planted.TOO_FEW_DIGESTS:
                announced.digests = announced.digests[:-16]
            case Planted.TOO_MANY_BLOCKS:
                announced.sizes.append(announced.sizes[0])
            case Planted.FEWER_WITHOUT_REASON:
                announced.sizes.pop()
                announced.generations.pop()
                announced.digests = announced.digests[: -16 * len(self._ends.layout.spans)]
            case Planted.OTHER_GRANTS_MANIFEST:
                announced.nonce = b"o" * 16
            case _:
                pass
        key = b"x" * 32 if planted is Planted.FORGED_MANIFEST else KEY
        message = encoded(sealed_manifests(key, announced))
        match planted:
            case Planted.HUGE_MESSAGE:
                channel.send([b"\xff\xff\xff\xff", b"x" * 100], FOREVER)
            case Planted.ENDLESS_MESSAGE:
                channel.send([(1 << 20).to_bytes(4, "little")], FOREVER)
                self._drip(channel, b"x" * ((1 << 20) - 1))
            case Planted.NO_MESSAGE:
                channel.send([b"\x05\0\0\0hello"], FOREVER)
            case _:
                channel.send([message], FOREVER)

    def _send(self, channel: Channel, ring: Ring | None, blocks: list[Block]) -> None:
        spans = self._ends.layout.spans
        order = [(block, chunk) for block in range(len(blocks)) for chunk in range(len(spans))]
        owed = 0
        for number, (block, chunk) in enumerate(order):
            begin, end = spans[chunk]
            data = blocks[block].data[begin:end]
            slot = number % SLOTS
            kind = ChunkKind.DATA if ring is None else ChunkKind.SLOT
            head = ChunkHead(kind, block, chunk, len(data), slot)
            if owed == SLOTS:
                channel.receive_into(memoryview(bytearray(1)), FOREVER)
                owed -= 1
            if number == self._at:
                # The other end asks its host after each chunk: it has seen all before this one.
                wait_until(lambda: self._ends.host.asked > self._at)
                if ring is not None:
                    ring.put(slot, data)
                head, data = self._spoil(channel, head, data, order)
            if ring is None:
                channel.send([head.packed(), data], FOREVER)
            else:
                ring.put(number % SLOTS, data)
                channel.send([head.packed()], FOREVER)
                owed += 1
        for _ in range(owed):
            channel.receive_into(memoryview(bytearray(1)), FOREVER)

    def _spoil(
        self, channel: Channel, head: ChunkHead, data: memoryview, order: list[tuple[int, int]]
    ) -> tuple[ChunkHead, memoryview]:
        """What is sent in place of the right chunk; most faults end the connection here."""
        place = order.index((head.block, head.chunk))
        wrong = bytearray(data)
        kind, slot, length = head.kind, head.slot, head.length_bytes
        match self._planted:
            case Planted.FLIP:
                wrong[length // 2] ^= 1
            case Planted.MIX:
                wrong[length // 2 :] = b"\xaa" * (length - length // 2)
            case Planted.TRUNCATE:
                cut = head.packed()[:8] if channel.is_local else head.packed() + data[: length // 2]
                channel.send([cut], FOREVER)
                raise Fault(Reason.LOST)
            case Planted.CLOSE:
                raise Fault(Reason.LOST)
            case Planted.STALL:
                self._make_late(channel)
            case Planted.DRIP:
                self._drip(channel, head.packed() + bytes(data))
            case Planted.DUPLICATE:
                block, chunk = order[place - 1] if place else order[0]
                head = ChunkHead(kind, block, chunk, length, slot)
                if place == 0:  # there is none before it: send the first one twice
                    self._send_one(channel, head, data)
            case Planted.OUT_OF_ORDER:
                block, chunk = order[(place + 1) % len(order)]
                head = ChunkHead(kind, block, chunk, length, slot)
            case Planted.SHORT_CHUNK:
                head = ChunkHead(kind, head.block, head.chunk, length - 1, slot)
                wrong = wrong[:-1]
            case Planted.LONG_CHUNK:
                head = ChunkHead(kind, head.block, head.chunk, 2**32 - 1, slot)
            case Planted.EMPTY_CHUNK:
                head = ChunkHead(kind, head.block, head.chunk, 0, slot)
                wrong = bytearray()
            case Planted.RUBBISH:
                channel.send([b"\xee" * 16], FOREVER)
                raise Fault(Reason.PROTOCOL)
            case Planted.OTHER_KIND:
                other = ChunkKind.SLOT if kind is ChunkKind.DATA else ChunkKind.DATA
                head = ChunkHead(other, head.block, head.chunk, length, slot)
            case Planted.WRONG_SLOT:
                head = ChunkHead(kind, head.block, head.chunk, length, 65_535)
            case Planted.STOP:
                channel.send([packed_stop(Reason.EPOCH)], FOREVER)
                raise Fault(Reason.EPOCH)
            case _:
                return head, data
        return head, memoryview(wrong)

    def _send_one(self, channel: Channel, head: ChunkHead, data: memoryview) -> None:
        channel.send([head.packed()] if channel.is_local else [head.packed(), data], FOREVER)

    def _make_late(self, channel: Channel) -> None:
        """Send nothing, let the time go by, and stay until the other end has had enough."""
        self._ends.clock.ms += 2 * STALL_MS
        _wait_for_end(channel)
        raise Fault(Reason.TIMEOUT)

    def _drip(self, channel: Channel, data: bytes) -> None:
        """A few bytes at a time, each well within the time for a chunk."""
        step = max(1, len(data) // 16)
        for at in range(0, len(data), step):
            self._ends.clock.ms += STALL_MS / 4
            channel.send([data[at : at + step]], FOREVER)
        _wait_for_end(channel)


def _wait_for_end(channel: Channel) -> None:
    sink = bytearray(64)
    while True:
        try:
            if not channel.socket.recv_into(sink):
                return
        except BlockingIOError:
            continue


@contextlib.contextmanager
def serving(ends: Ends, planted: Planted, at_chunk: int = 0) -> Iterator[FaultySource]:
    faulty = FaultySource(ends, planted, at_chunk)
    try:
        yield faulty
    finally:
        ends.puller.close()
        faulty.close()
