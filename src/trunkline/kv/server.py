"""The source of pulls: gives granted blocks to workers that prove who they are, and nothing else.

A thread for each connection, as many as there may be and no more. Before a peer has proved that it
has the transfer key it costs one thread, 4 KiB and a second. A pull pins what it sends, renews the
pin while bytes move, and gives it back whatever happens; it ends no later than its grant, and stops
in the middle where the host says that its owner is revoked.

Must never: send a block that the grant does not name, or serve a grant twice. Read `client.py` for
the other end.
"""

from __future__ import annotations

import hmac
import socket
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from trunkline.core.records import Instant
from trunkline.core.transfer import (
    NONCE_BYTES,
    Grant,
    Reason,
    UsedGrants,
    read_grant,
)
from trunkline.kv.loans import Loan, batches, chunks
from trunkline.kv.records import Layout, Pins, always
from trunkline.kv.ring import CREDIT, SLOTS, Ring, is_supported
from trunkline.kv.wire import (
    MAX_CHUNK_BYTES,
    MAX_EARLY_BYTES,
    MAX_MESSAGE_BYTES,
    PROTOCOL,
    Announced,
    Channel,
    ChunkHead,
    ChunkKind,
    Fault,
    Hello,
    Identity,
    Ping,
    Pong,
    Proof,
    Pull,
    Refused,
    Welcome,
    early_decoder,
    encoded,
    greeting_mac,
    interrupt,
    packed_stop,
    pair_fault,
    request_decoder,
    sealed_manifests,
)
from trunkline.ports.clock import Clock

_ACCEPT_TICK_S = 0.5
"""How often a listener looks whether it is to end, should nothing wake it for that."""
_ACCEPT_PAUSE_S = 0.05


class Host(Protocol):
    """The worker around the store. Asked often, from many threads: it must not wait."""

    def fault(self, grant: Grant) -> Reason | None:
        """Why nothing may be given or taken under this grant now (no lease, a revision not seen, an
        epoch raised); None when it may.
        """
        ...


class Lender(Protocol):
    """A store, as far as a source needs it; `BlockStore` is one. Used from many threads."""

    def pin(
        self,
        ns: bytes,
        keys: Sequence[bytes],
        *,
        until: Instant,
        holder: str = "",
        is_verified: bool = True,
        is_wanted: Callable[[], bool] = always,
    ) -> Pins:
        """It may wait, as long as `is_wanted` says that the peer does."""
        ...

    def unpin(self, token: bytes) -> bool: ...
    def renew(self, token: bytes, until: Instant) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Bounds of one source."""

    host: str = "127.0.0.1"
    port: int = 0
    """0 lets the kernel pick."""
    is_local_offered: bool = True
    """Whether peers on this host may use shared memory."""
    max_connections: int = 64
    max_pulls: int = 16
    """At a time, over all connections."""
    hello_ms: float = 1_000.0
    """Within it a peer has proved who it is."""
    idle_ms: float = 60_000.0
    """A connection on which nothing happens is closed."""
    stall_ms: float = 2_000.0
    """Less than one chunk in this time, and the pull ends."""
    lease_ms: float = 5_000.0
    """A pin ends this long after bytes moved last."""
    batch_bytes: int = 1 << 18
    """Small chunks are sent together, up to so many bytes."""
    tick_ms: float = 50.0
    """How often a wait looks at the clock."""

    def __post_init__(self) -> None:
        # What blocks for longer than its lease would send memory that may be another's by then.
        assert self.stall_ms + self.tick_ms < self.lease_ms, (self.stall_ms, self.lease_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFigures:
    connections: int
    open_pulls: int
    refused_connections: int
    """Beyond the bound, or where the system had nothing for them."""
    pulls_served: int
    """To their last block."""
    bytes_out: int
    ended: dict[Reason, int]
    """Connections and pulls that did not come to their end, by reason."""


class PullServer:
    """One worker's source of pulls. `start` listens; `close` ends everything it started."""

    def __init__(
        self,
        store: Lender,
        layout: Layout,
        identity: Identity,
        transfer_key: bytes,
        clock: Clock,
        options: ServerOptions,
        *,
        host: Host,
        draw: Callable[[int], bytes],
    ) -> None:
        """`draw` gives that many bytes nobody can guess."""
        assert layout.chunk_bytes <= MAX_CHUNK_BYTES, layout.chunk_bytes
        self._store = store
        self._layout = layout
        self._identity = identity
        self._transfer_key = transfer_key
        self._clock = clock
        self._options = options
        self._host = host
        self._draw = draw
        self._used = UsedGrants()
        self._lock = threading.Lock()
        self._connections: dict[Channel, threading.Thread] = {}
        self._open_pulls = 0
        self._refused_connections = 0
        self._pulls_served = 0
        self._bytes_out = 0
        self._ended: Counter[Reason] = Counter()
        self._listeners: list[tuple[socket.socket, threading.Thread]] = []
        self._closing = threading.Event()
        self.address: tuple[str, int] = ("", 0)
        """Host and port, once started."""
        self.local_address = ""
        """The name of the abstract unix socket; empty where there is none."""

    @property
    def figures(self) -> ServerFigures:
        with self._lock:
            return ServerFigures(
                connections=len(self._connections),
                open_pulls=self._open_pulls,
                refused_connections=self._refused_connections,
                pulls_served=self._pulls_served,
                bytes_out=self._bytes_out,
                ended=dict(self._ended),
            )

    def start(self) -> None:
        """Raises OSError where the address cannot be listened on."""
        tcp = socket.create_server((self._options.host, self._options.port), backlog=64)
        self.address = (self._options.host, tcp.getsockname()[1])
        self._listen(tcp, "kv-accept")
        if self._options.is_local_offered and is_supported():
            self.local_address = f"trunkline-kv-{self._draw(8).hex()}"
            unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            unix.bind(f"\0{self.local_address}")
            unix.listen(64)
            self._listen(unix, "kv-accept-local")

    def close(self) -> None:
        """End connections and running pulls, and wait for their threads."""
        with self._lock:
            self._closing.set()
            connections = list(self._connections.items())
        for listener, _ in self._listeners:
            _wake(listener)
        for listener, thread in self._listeners:
            thread.join()
            listener.close()
        for channel, _ in connections:
            interrupt(channel.socket)
        for _, thread in connections:
            thread.join()
        assert not self._connections

    # -- connections -------------------------------------------------------------------------------

    def _listen(self, listener: socket.socket, name: str) -> None:
        listener.settimeout(_ACCEPT_TICK_S)
        thread = threading.Thread(target=self._accept, args=(listener,), name=name, daemon=True)
        self._listeners.append((listener, thread))
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connected, _ = listener.accept()
            except TimeoutError:
                connected = None
            except OSError:  # a peer that has gone again, or no file is left for it
                connected = None
                self._closing.wait(_ACCEPT_PAUSE_S)
            if connected is not None:
                self._admit(connected)
            if self._closing.is_set():
                return

    def _admit(self, connected: socket.socket) -> None:
        channel = Channel(connected, self._clock, tick_ms=self._options.tick_ms)
        with self._lock:
            is_room = len(self._connections) < self._options.max_connections
            if is_room and not self._closing.is_set():
                thread = threading.Thread(
                    target=self._serve, args=(channel,), name="kv-pull", daemon=True
                )
                self._connections[channel] = thread
                try:
                    thread.start()
                except RuntimeError:  # the system has no thread for it
                    del self._connections[channel]
                else:
                    return
            self._refused_connections += 1
        channel.close()

    def _serve(self, channel: Channel) -> None:
        ring: Ring | None = None
        try:
            peer = self._greet(channel)
            if channel.is_local:
                ring = Ring(channel.socket, self._layout)
            while self._wait(channel):
                self._answer(channel, peer, ring)
        except Fault as fault:
            self._count_end(fault.reason)
        except OSError:
            self._count_end(Reason.LOST)
        finally:
            if ring is not None:
                ring.close()
            with self._lock:
                del self._connections[channel]
            channel.close()

    def _greet(self, channel: Channel) -> Hello:
        """Who the peer is, proved. Raises Fault."""
        due = Instant(self._clock.now() + self._options.hello_ms)
        hello = channel.receive_message(early_decoder, MAX_EARLY_BYTES, due, self._guard)
        if not isinstance(hello, Hello):
            raise Fault(Reason.PROTOCOL)
        reason = pair_fault(self._identity, self._layout.digest, hello)
        if reason is not None:
            channel.send([encoded(Refused(reason=reason))], due, self._guard)
            raise Fault(reason)
        ours = Hello(
            protocol=PROTOCOL,
            worker=self._identity.worker,
            incarnation=self._identity.incarnation,
            scheme=self._identity.scheme,
            layout=self._layout.digest,
            nonce=self._draw(NONCE_BYTES),
        )
        mac = greeting_mac(self._transfer_key, b"source", hello, ours)
        channel.send([encoded(Welcome(hello=ours, mac=mac))], due, self._guard)
        proof = channel.receive_message(early_decoder, MAX_EARLY_BYTES, due, self._guard)
        wanted = greeting_mac(self._transfer_key, b"destination", hello, ours)
        if not isinstance(proof, Proof) or not hmac.compare_digest(proof.mac, wanted):
            raise Fault(Reason.PROTOCOL)
        return hello

    def _wait(self, channel: Channel) -> bool:
        """Whether a further request came; False where the connection ends in good order."""
        due = Instant(self._clock.now() + self._options.idle_ms)
        return channel.wait_request(due, self._guard)

    def _answer(self, channel: Channel, peer: Hello, ring: Ring | None) -> None:
        due = Instant(self._clock.now() + self._options.stall_ms)
        request = channel.receive_message(request_decoder, MAX_MESSAGE_BYTES, due, self._guard)
        if isinstance(request, Ping):
            channel.send([encoded(Pong())], due, self._guard)
            return
        reason = self._pull(channel, peer, ring, request)
        if reason is not None:
            self._count_end(reason)
            if reason is Reason.LOST:
                return  # nobody is there to be told; the next wait sees that too
            due = Instant(self._clock.now() + self._options.stall_ms)  # the lender may have waited
            channel.send([encoded(Refused(reason=reason))], due, self._guard)

    def _guard(self) -> None:
        if self._closing.is_set():
            raise Fault(Reason.CLOSING)

    def _count_end(self, reason: Reason) -> None:
        with self._lock:
            self._ended[reason] += 1

    # -- pulls -------------------------------------------------------------------------------------

    def _pull(
        self, channel: Channel, peer: Hello, ring: Ring | None, request: Pull
    ) -> Reason | None:
        """Serve it; or why it is refused, before a byte of a block was sent."""
        grant = read_grant(request.grant, self._transfer_key)
        if grant is None:
            return Reason.GRANT
        reason = self._refusal(grant, peer, request.keys)
        if reason is not None:
            return reason
        with self._lock:
            if self._open_pulls >= self._options.max_pulls:
                return Reason.BUSY
            wall_ms = self._clock.wall() * 1_000.0
            reason = self._used.use(grant, wall_ms)
            if reason is not None:
                return reason
            self._open_pulls += 1
        try:
            until = Instant(self._clock.now() + grant.deadline_ms - wall_ms)
            return self._lend(channel, ring, Loan(grant, request.keys, until, peer.worker))
        finally:
            with self._lock:
                self._open_pulls -= 1

    def _refusal(self, grant: Grant, peer: Hello, packed_keys: bytes) -> Reason | None:
        """What the grant is not for."""
        if (grant.destination, grant.destination_incarnation) != (peer.worker, peer.incarnation):
            return Reason.GRANT
        if grant.source != self._identity.worker:
            return Reason.GRANT
        if grant.source_incarnation != self._identity.incarnation:
            return Reason.INCARNATION
        if grant.layout != self._layout.digest:
            return Reason.LAYOUT
        if not grant.covers(packed_keys):
            return Reason.GRANT
        if grant.block_count * self._layout.block_bytes > grant.max_bytes:
            return Reason.GRANT
        return self._host.fault(grant)

    def _lend(self, channel: Channel, ring: Ring | None, loan: Loan) -> Reason | None:
        lease = Instant(min(loan.until, self._clock.now() + self._options.lease_ms))
        # What is read is compared by who receives it, against digests of when it was made.
        pins = self._store.pin(
            loan.grant.ns,
            loan.keys,
            until=lease,
            holder=f"pull:{loan.peer}",
            is_verified=False,
            is_wanted=lambda: not channel.has_left(),
        )
        if not pins.blocks:
            return pins.reason or Reason.MISS
        loan.take(pins)
        try:
            if not loan.blocks:
                return loan.rest
            self._send_run(channel, ring, loan)
        finally:
            self._store.unpin(pins.token)
        with self._lock:
            self._pulls_served += 1
        return None

    def _send_run(self, channel: Channel, ring: Ring | None, loan: Loan) -> None:
        """The manifests and the bytes. Raises Fault; the connection is of no use after that."""
        announced = Announced(
            nonce=loan.grant.nonce,
            layout=self._layout.digest,
            chunk_bytes=self._layout.chunk_bytes,
            sizes=[block.manifest.size_bytes for block in loan.blocks],
            generations=[block.manifest.generation for block in loan.blocks],
            digests=b"".join(digest for block in loan.blocks for digest in block.manifest.digests),
            rest=loan.rest,
        )
        due = self._due(loan)
        channel.send([encoded(sealed_manifests(self._transfer_key, announced))], due, self._guard)
        try:
            if ring is None:
                self._send_chunks(channel, loan)
            else:
                self._lay_chunks(channel, ring, loan)
        except _Stopped as stopped:
            due = Instant(self._clock.now() + self._options.stall_ms)
            channel.send([packed_stop(stopped.reason)], due, self._guard)
            raise Fault(stopped.reason) from stopped

    def _send_chunks(self, channel: Channel, loan: Loan) -> None:
        for buffers, size in batches(loan.blocks, self._layout, self._options.batch_bytes):
            channel.send(buffers, self._hold_on(loan), self._still(loan))
            self._count_bytes(size)

    def _still(self, loan: Loan) -> Callable[[], None]:
        """Asked for each part that the system takes. What is sent then ends in mid-frame."""
        asks = count()

        def guard() -> None:
            self._guard()
            reason = self._host.fault(loan.grant) if next(asks) else None  # `_hold_on` just asked
            if reason is not None:
                raise Fault(reason)

        return guard

    def _lay_chunks(self, channel: Channel, ring: Ring, loan: Loan) -> None:
        """The same through the ring: a slot is used again when the peer has given it back."""
        credit = memoryview(bytearray(len(CREDIT)))
        owed = 0
        slot = 0
        for block, chunk, data in chunks(loan.blocks, self._layout):
            if owed == SLOTS:
                channel.receive_into(credit, self._due(loan), self._guard)
                owed -= 1
            due = self._hold_on(loan)
            ring.put(slot, data)
            head = ChunkHead(ChunkKind.SLOT, block, chunk, len(data), slot)
            channel.send([head.packed()], due, self._guard)
            self._count_bytes(len(data))
            slot = (slot + 1) % SLOTS
            owed += 1
        for _ in range(owed):
            channel.receive_into(credit, self._due(loan), self._guard)
        # The peer has its copy. The connection may stay warm for long, the blocks be revoked.
        ring.wipe()

    def _due(self, loan: Loan) -> Instant:
        """Until when the next chunk must be gone."""
        return Instant(min(loan.until, self._clock.now() + self._options.stall_ms))

    def _hold_on(self, loan: Loan) -> Instant:
        """Renew the pin while bytes move; until when they must be gone, which is before the pin
        ends however late that is acted upon. Raises _Stopped where nothing more may be sent.
        """
        reason = self._host.fault(loan.grant)
        if reason is not None:
            raise _Stopped(reason)
        now = self._clock.now()
        if now >= loan.until:
            raise _Stopped(Reason.TIMEOUT)
        until = Instant(min(loan.until, now + self._options.lease_ms))
        if not self._store.renew(loan.token, until):
            raise _Stopped(Reason.TOKEN)
        # The system may hold on to a send for a tick beyond that.
        return Instant(min(until - self._options.tick_ms, now + self._options.stall_ms))

    def _count_bytes(self, size: int) -> None:
        with self._lock:
            self._bytes_out += size


def _wake(listener: socket.socket) -> None:
    """Let its thread come out of `accept`: a shutdown does not, everywhere."""
    with socket.socket(listener.family, socket.SOCK_STREAM) as visitor, suppress(OSError):
        visitor.setblocking(False)
        visitor.connect(listener.getsockname())


class _Stopped(Exception):
    """The source itself ends a pull that runs."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason.value)
        self.reason = reason
