"""Connections from one worker's store to others', kept warm; each proved, and lent to one pull.

A connection belongs to one life of a peer. When another life of it is asked for, those of the
earlier one are closed. Where both are on one host the connection is a unix socket with a ring of
shared memory; where that fails, TCP.

Must never: give one connection to two, or back to the shelf after anything went wrong on it. Read
`client.py` for what is done with them.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

from trunkline.core.records import Instant
from trunkline.core.transfer import NONCE_BYTES, Reason
from trunkline.kv.records import Layout
from trunkline.kv.ring import RingReader, is_supported
from trunkline.kv.wire import (
    MAX_EARLY_BYTES,
    MAX_MESSAGE_BYTES,
    PROTOCOL,
    Channel,
    Fault,
    Hello,
    Identity,
    Ping,
    Pong,
    Proof,
    Refused,
    Welcome,
    early_decoder,
    encoded,
    greeting_mac,
    pair_fault,
    reply_decoder,
)
from trunkline.ports.clock import Clock

_MAX_PORT = 65_535
_NO_RING = {Reason.LOST, Reason.PROTOCOL}
"""How it ends where the source could not make its ring, or makes one that we do not map."""
_EARLY_REFUSALS = {Reason.LAYOUT, Reason.PROTOCOL}
"""What a peer may say before it has proved who it is. Nothing of that is believed of its blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One life of a worker, and where its pull server listens."""

    worker: str
    incarnation: str
    host: str
    """An IP address: names are not looked up, which could take longer than any deadline."""
    port: int
    local: str = ""
    """The abstract unix socket's name, for who is on the same host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerOptions:
    """Bounds of the connections of one worker."""

    connect_ms: float = 500.0
    hello_ms: float = 1_000.0
    warm_per_peer: int = 4
    warm_total: int = 64
    """Idle connections; at the bound the one that was used longest ago is closed."""
    ping_ms: float = 10_000.0
    """An idle connection is asked this often whether it lives."""
    tick_ms: float = 50.0
    is_local_used: bool = True
    """Whether shared memory is used where the peer offers it on this host."""


@dataclass(slots=True, eq=False)
class Connection:
    """One connection that is proved."""

    source: Source
    channel: Channel
    ring: RingReader | None
    used_at: Instant
    is_warm: bool = False
    """It was on the shelf: the peer may have closed it meanwhile."""

    def close(self) -> None:
        if self.ring is not None:
            self.ring.close()
        self.channel.close()


class Peers:
    """The shelf of warm connections. Safe for threads."""

    def __init__(
        self,
        layout: Layout,
        identity: Identity,
        transfer_key: bytes,
        clock: Clock,
        options: PeerOptions,
        *,
        draw: Callable[[int], bytes],
    ) -> None:
        self._layout = layout
        self._identity = identity
        self._transfer_key = transfer_key
        self._clock = clock
        self._options = options
        self._draw = draw
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        """Used longest ago first."""
        self._is_closing = False
        self._wake = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="kv-keeper", daemon=True)
        self._is_kept = False

    @property
    def idle_count(self) -> int:
        with self._lock:
            return len(self._idle)

    def start(self) -> None:
        """Keep idle connections warm from now on."""
        self._is_kept = True
        self._keeper.start()

    def close(self) -> None:
        with self._lock:
            self._is_closing = True
            idle, self._idle = self._idle, []
        self._wake.set()
        if self._is_kept:
            self._keeper.join()
        for connection in idle:
            connection.close()

    def take(self, source: Source, due: Instant, guard: Callable[[], None]) -> Connection:
        """A warm connection, or a new one. Raises Fault."""
        with self._lock:
            old = [one for one in self._idle if _is_earlier_life(one.source, source)]
            fitting = [one for one in self._idle if one.source == source]
            taken = fitting[-1] if fitting else None
            self._idle = [one for one in self._idle if one is not taken and one not in old]
        for connection in old:
            connection.close()
        return taken or self.connect(source, due, guard)

    def connect(self, source: Source, due: Instant, guard: Callable[[], None]) -> Connection:
        """A new connection, proved. Raises Fault."""
        if source.local and self._options.is_local_used and is_supported():
            try:
                return self._connect(source, self._local_socket(source), due, guard)
            except OSError:
                pass  # not on this host, not any more, or without a ring: TCP says which
        try:
            return self._connect(source, self._tcp_socket(source, due), due, guard)
        except OSError as error:
            raise Fault(Reason.CONNECT) from error

    def give_back(self, connection: Connection) -> None:
        """Nothing is open on it: the next pull may have it."""
        connection.used_at = self._clock.now()
        connection.is_warm = True
        options = self._options
        with self._lock:
            if not self._is_closing:
                self._idle.append(connection)
            same = [one for one in self._idle if one.source == connection.source]
            surplus = same[: -options.warm_per_peer] or self._idle[: -options.warm_total]
            self._idle = [one for one in self._idle if one not in surplus]
            if self._is_closing:
                surplus = [connection]
        for one in surplus:
            one.close()

    def tend(self) -> None:
        """Ask those that were idle for long whether they live; close those that do not."""
        now = self._clock.now()
        with self._lock:
            due = [one for one in self._idle if now >= one.used_at + self._options.ping_ms]
            self._idle = [one for one in self._idle if one not in due]
        for connection in due:
            try:
                self._ping(connection.channel)
            except Fault:
                connection.close()
            else:
                self.give_back(connection)

    def _keep(self) -> None:
        while not self._wake.wait(self._options.ping_ms / 2_000.0):
            self.tend()

    def _ping(self, channel: Channel) -> None:
        due = Instant(self._clock.now() + self._options.hello_ms)
        channel.send([encoded(Ping())], due, self._guard)
        reply = channel.receive_message(reply_decoder, MAX_MESSAGE_BYTES, due, self._guard)
        if not isinstance(reply, Pong):
            raise Fault(Reason.PROTOCOL)

    def _guard(self) -> None:
        if self._is_closing:
            raise Fault(Reason.CLOSING)

    # -- new ones ----------------------------------------------------------------------------------

    def _local_socket(self, source: Source) -> socket.socket:
        name = source.local.encode(errors="replace")
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connected.settimeout(self._options.connect_ms / 1_000.0)
            connected.connect(b"\0" + name)
        except OSError:
            connected.close()
            raise
        return connected

    def _tcp_socket(self, source: Source, due: Instant) -> socket.socket:
        left_ms = min(self._options.connect_ms, due - self._clock.now())
        if left_ms <= 0:
            raise Fault(Reason.TIMEOUT)
        if not _is_address(source.host) or not 0 < source.port <= _MAX_PORT:
            raise Fault(Reason.CONNECT)
        return socket.create_connection((source.host, source.port), timeout=left_ms / 1_000.0)

    def _connect(
        self, source: Source, connected: socket.socket, due: Instant, guard: Callable[[], None]
    ) -> Connection:
        """Takes the socket over: it is closed where this fails."""
        due = Instant(min(due, self._clock.now() + self._options.hello_ms))
        try:
            channel = Channel(connected, self._clock, tick_ms=self._options.tick_ms)
            self._greet(channel, source, due, guard)
            ring = None
            if channel.is_local:
                ring = self._ring(channel, due, guard)
        except (Fault, OSError):
            connected.close()
            raise
        return Connection(source, channel, ring, self._clock.now())

    def _ring(self, channel: Channel, due: Instant, guard: Callable[[], None]) -> RingReader:
        """Raises OSError where there is none to be had, else Fault."""
        try:
            return RingReader(channel, self._layout, due, guard)
        except Fault as fault:
            if fault.reason in _NO_RING:
                raise OSError("the source has no ring") from fault
            raise

    def _greet(
        self, channel: Channel, source: Source, due: Instant, guard: Callable[[], None]
    ) -> None:
        """Prove each to the other, and that the peer is who was meant. Raises Fault."""
        ours = Hello(
            protocol=PROTOCOL,
            worker=self._identity.worker,
            incarnation=self._identity.incarnation,
            scheme=self._identity.scheme,
            layout=self._layout.digest,
            nonce=self._draw(NONCE_BYTES),
        )
        channel.send([encoded(ours)], due, guard)
        answer = channel.receive_message(early_decoder, MAX_EARLY_BYTES, due, guard)
        if isinstance(answer, Refused) and answer.reason in _EARLY_REFUSALS:
            raise Fault(answer.reason)
        if not isinstance(answer, Welcome):
            raise Fault(Reason.PROTOCOL)
        theirs = answer.hello
        wanted = greeting_mac(self._transfer_key, b"source", ours, theirs)
        if not hmac.compare_digest(answer.mac, wanted):
            raise Fault(Reason.PROTOCOL)
        reason = pair_fault(self._identity, self._layout.digest, theirs)
        if reason is not None:
            raise Fault(reason)
        if (theirs.worker, theirs.incarnation) != (source.worker, source.incarnation):
            raise Fault(Reason.INCARNATION)
        proof = greeting_mac(self._transfer_key, b"destination", ours, theirs)
        channel.send([encoded(Proof(mac=proof))], due, guard)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_earlier_life(kept: Source, asked: Source) -> bool:
    return kept.worker == asked.worker and kept.incarnation != asked.incarnation
