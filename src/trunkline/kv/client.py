"""The destination of pulls: takes granted blocks into staging, verifies each chunk, publishes.

    grant read ─► connection ─► manifests judged ─► staged ─► chunk, digest, chunk … ─► publish
          refused: nothing is reserved              └─── a fault: verified whole blocks, or none

Every pull ends in one of published, rejected (with a reason) or cancelled, by its deadline. Bytes
land in the staging's own memory and are compared with the source's digests while they are in the
processor's cache; nobody can see them before `publish` has asked the host again.

Must never: publish what is not verified, or leave a staging, a socket or a thread behind. Read
`peers.py` for connections, `server.py` for the other end.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

from trunkline.core.records import Instant
from trunkline.core.transfer import (
    MAX_GRANT_BLOCKS,
    Arrival,
    Grant,
    PullEnd,
    Reason,
    read_grant,
)
from trunkline.kv.peers import Connection, Peers
from trunkline.kv.pulls import Cancel, PullFigures, PullOptions, PullRequest, PullResult
from trunkline.kv.records import DIGEST_BYTES, Layout, Manifest, Place
from trunkline.kv.ring import CREDIT
from trunkline.kv.server import Host
from trunkline.kv.staging import Staging
from trunkline.kv.store import BlockStore
from trunkline.kv.wire import (
    CHUNK_HEAD_BYTES,
    MAX_MESSAGE_BYTES,
    Announced,
    ChunkKind,
    Fault,
    Identity,
    Manifests,
    Pull,
    Refused,
    encoded,
    opened_manifests,
    read_chunk_head,
    reply_decoder,
    said_by_source,
)
from trunkline.ports.clock import Clock

_NOTHING_KEPT = {Reason.EPOCH, Reason.LEASE, Reason.NS, Reason.CLIENT, Reason.CLOSING}
"""After these not even the verified blocks are published."""
_CANCELS = {Reason.CLIENT, Reason.GIVEN_UP, Reason.CLOSING}
_SETTLE_MS = 10_000.0
"""How long a staging outlives the deadline. Every pull gives its own back at once; the store only
takes it for lost after this.
"""


class Puller:
    """One worker's pulls. A pull runs in the thread that asks for it. Safe for threads."""

    def __init__(
        self,
        store: BlockStore,
        layout: Layout,
        identity: Identity,
        transfer_key: bytes,
        clock: Clock,
        options: PullOptions,
        *,
        host: Host,
        draw: Callable[[int], bytes],
    ) -> None:
        self._store = store
        self._layout = layout
        self._identity = identity
        self._transfer_key = transfer_key
        self._clock = clock
        self._options = options
        self._host = host
        self.peers = Peers(layout, identity, transfer_key, clock, options.peers, draw=draw)
        self._lock = threading.Lock()
        self._open: dict[int, tuple[Instant, Cancel]] = {}
        self._number = 0
        self._is_closing = False
        self._bytes_in = 0
        self._blocks_in = 0
        self._verify_ms = 0.0
        self._ended: Counter[tuple[PullEnd, Reason | None]] = Counter()

    def start(self) -> None:
        """Keep connections warm from now on."""
        self.peers.start()

    def close(self) -> None:
        """Cancel what runs and close idle connections. Running pulls end in their own threads."""
        with self._lock:
            self._is_closing = True
            running = list(self._open.values())
        for _, cancel in running:
            cancel.cancel()
        self.peers.close()

    @property
    def figures(self) -> PullFigures:
        now = self._clock.now()
        with self._lock:
            return PullFigures(
                pulls=self._number,
                open_pulls=len(self._open),
                overdue_pulls=sum(now > deadline for deadline, _ in self._open.values()),
                bytes_in=self._bytes_in,
                blocks_in=self._blocks_in,
                verify_ms=self._verify_ms,
                ended=dict(self._ended),
            )

    def pull(self, request: PullRequest, cancel: Cancel | None = None) -> PullResult:
        """Pull, and say how it ended. Blocks until then, at the latest until the deadline."""
        cancel = cancel or Cancel()
        began = self._clock.now()
        run = _Run(request=request, cancel=cancel, began=began)
        with self._lock:
            self._number += 1
            number = self._number
            is_admitted = len(self._open) < self._options.max_pulls and not self._is_closing
            if is_admitted:
                self._open[number] = (request.deadline, cancel)
        try:
            if is_admitted:
                self._run(run)
            else:
                run.reason = Reason.CLOSING if self._is_closing else Reason.BUSY
        except BaseException:
            run.reason = run.reason or Reason.CLIENT  # an error of ours, or of who asked
            raise
        finally:
            with self._lock:
                self._open.pop(number, None)
            result = self._ended_with(run)
            with self._lock:
                self._ended[result.end, result.reason] += 1
                self._bytes_in += result.bytes
                self._blocks_in += result.blocks
                self._verify_ms += result.verify_ms
        return result

    def _ended_with(self, run: _Run) -> PullResult:
        if run.published:
            end = PullEnd.PUBLISHED
        else:
            end = PullEnd.CANCELLED if run.reason in _CANCELS else PullEnd.REJECTED
        assert run.reason is not None or run.published == len(run.request.places)
        return PullResult(
            end=end,
            reason=run.reason,
            blocks=run.published,
            bytes=run.arrival.verified_bytes if run.arrival else 0,
            ms=self._clock.now() - run.began,
            setup_ms=run.setup_ms,
            verify_ms=run.verify_ms,
        )

    # -- one pull ----------------------------------------------------------------------------------

    def _run(self, run: _Run) -> None:
        grant = read_grant(run.request.grant, self._transfer_key)
        run.reason = self._refusal(grant, run.request)
        if run.reason is not None or grant is None:
            return
        run.grant = grant
        try:
            self._exchange(run)
        except Fault as fault:
            run.reason = fault.reason

    def _refusal(self, grant: Grant | None, request: PullRequest) -> Reason | None:
        """Why this cannot be pulled, before anybody is asked."""
        if grant is None or not grant.covers(b"".join(place.key for place in request.places)):
            return Reason.GRANT
        here = (grant.destination, grant.destination_incarnation)
        if here != (self._identity.worker, self._identity.incarnation):
            return Reason.GRANT
        there = (grant.source, grant.source_incarnation)
        if there != (request.source.worker, request.source.incarnation):
            return Reason.GRANT
        owner = request.owner
        if (grant.ns, grant.subjects, grant.epochs) != (owner.ns, owner.subjects, owner.epochs):
            return Reason.GRANT
        if grant.layout != self._layout.digest:
            return Reason.LAYOUT
        if not _is_run(request.places, grant.first_block):
            return Reason.CHAIN
        return self._host.fault(grant)

    def _exchange(self, run: _Run) -> None:
        """Ask a source, on a warm connection where there is one. Raises Fault."""
        watch = self._watch(run)
        connection = self.peers.take(run.request.source, run.request.deadline, watch)
        try:
            announced = self._announced(run, connection)
        except Fault as fault:
            if not (connection.is_warm and fault.reason is Reason.LOST):
                raise
            # The peer closed it while it was idle. Had it seen the grant, it would refuse it now.
            connection = self.peers.connect(run.request.source, run.request.deadline, watch)
            announced = self._announced(run, connection)
        if isinstance(announced, Reason):
            self.peers.give_back(connection)
            raise Fault(announced)
        self._land(run, connection, announced)

    def _announced(self, run: _Run, connection: Connection) -> Announced | Reason:
        """The source's manifests, judged; or why it gives none. Raises Fault, and then the
        connection is closed.
        """
        grant, request = run.known_grant, run.request
        channel, due, watch = connection.channel, self._due(run), self._watch(run)
        keys = b"".join(place.key for place in request.places)
        try:
            with run.cancel.ends(connection):
                channel.send([encoded(Pull(grant=request.grant, keys=keys))], due, watch)
                reply = channel.receive_message(reply_decoder, MAX_MESSAGE_BYTES, due, watch)
            run.setup_ms = self._clock.now() - run.began
            if isinstance(reply, Refused):
                return said_by_source(reply.reason)
            if not isinstance(reply, Manifests):
                raise Fault(Reason.PROTOCOL)
            announced = opened_manifests(self._transfer_key, reply, grant.nonce)
            self._judge(announced, len(request.places))
        except BaseException:
            connection.close()
            raise
        if not announced.sizes:
            return said_by_source(announced.rest or Reason.MISS)
        return announced

    def _judge(self, announced: Announced, wanted: int) -> None:
        """Refuse on any mismatch before memory is reserved. Raises Fault."""
        layout, count = self._layout, len(announced.sizes)
        if announced.layout != layout.digest or announced.chunk_bytes != layout.chunk_bytes:
            raise Fault(Reason.LAYOUT)
        if any(size != layout.block_bytes for size in announced.sizes):
            raise Fault(Reason.LENGTH)
        digest_count = count * len(layout.spans)
        if count > wanted or len(announced.generations) != count:
            raise Fault(Reason.PROTOCOL)
        if len(announced.digests) != digest_count * DIGEST_BYTES:
            raise Fault(Reason.LENGTH)
        if (count == wanted) is not (announced.rest is None):
            raise Fault(Reason.PROTOCOL)

    def _land(self, run: _Run, connection: Connection, announced: Announced) -> None:
        """Stage, receive, verify, publish. Raises Fault."""
        request = run.request
        manifests = self._manifests(request, announced)
        until = Instant(request.deadline + _SETTLE_MS)
        try:
            # The source has them still, as far as anybody here knows.
            staging = self._store.stage(
                request.owner,
                request.places[: len(manifests)],
                until=until,
                saved_ms=request.saved_ms,
                copies=1,
            )
        except BaseException:
            connection.close()
            raise
        if isinstance(staging, Reason):
            connection.close()  # the source is sending already
            raise Fault(staging)
        run.arrival = Arrival(
            block_count=len(manifests),
            block_bytes=self._layout.block_bytes,
            chunk_bytes=self._layout.chunk_bytes,
            stall_ms=self._options.stall_ms,
            deadline=request.deadline,
            now=self._clock.now(),
        )
        fault: Reason | None = Reason.CLIENT  # what an error of who asked amounts to
        try:
            with run.cancel.ends(connection):
                self._receive(run, run.arrival, connection, staging, manifests)
            fault = None
        except Fault as found:
            fault = found.reason
        finally:
            if fault is None:
                self.peers.give_back(connection)
            else:
                connection.close()
            rest = announced.rest and said_by_source(announced.rest)
            self._settle(run, staging, manifests, rest, fault)

    def _receive(
        self,
        run: _Run,
        arrival: Arrival,
        connection: Connection,
        staging: Staging,
        manifests: list[Manifest],
    ) -> None:
        """Raises Fault at the first chunk that is late, lost, out of order or wrong."""
        channel, ring = connection.channel, connection.ring
        head_bytes = bytearray(CHUNK_HEAD_BYTES)
        head_view = memoryview(head_bytes)
        kind = ChunkKind.DATA if ring is None else ChunkKind.SLOT
        run.first_at = self._clock.now()
        watch = self._watch(run)
        while not arrival.is_complete:
            channel.receive_into(head_view, arrival.due_at, watch)
            head = read_chunk_head(head_bytes)
            wanted = arrival.expected()
            chunk = wanted.offset_bytes // self._layout.chunk_bytes
            reason = arrival.fault(
                head.block, head.chunk * self._layout.chunk_bytes, head.length_bytes
            )
            if reason is not None or head.kind is not kind:
                raise Fault(reason or Reason.PROTOCOL)
            view = staging.chunk(wanted.block, chunk)
            if ring is None:
                channel.receive_into(view, arrival.due_at, watch)
            else:
                # Copied first: what is verified is what the source cannot change any more.
                ring.copy_into(view, head.slot)
                # Of the last chunk, too: the connection is used again. Where nobody is there to
                # take it, the next head says why.
                with suppress(Fault):
                    channel.send([CREDIT], arrival.due_at, run.guard)
            self._verify(run, staging, manifests, wanted.block, chunk)
            now = self._clock.now()
            if arrival.is_late(now):
                raise Fault(Reason.TIMEOUT)
            arrival.verified(now)
            self._report(run, arrival, is_block_end=arrival.whole_blocks > wanted.block)

    def _verify(
        self, run: _Run, staging: Staging, manifests: list[Manifest], block: int, chunk: int
    ) -> None:
        began = self._clock.now()
        is_right = staging.verify(block, chunk, manifests[block].digests[chunk])
        run.verify_ms += self._clock.now() - began
        if not is_right:
            raise Fault(Reason.DIGEST)

    def _report(self, run: _Run, arrival: Arrival, *, is_block_end: bool) -> None:
        """Tell who asked how far it is. Raises Fault where the host has changed its mind."""
        request = run.request
        if is_block_end and request.on_progress is not None:
            request.on_progress(arrival.whole_blocks)
        if arrival.is_complete:
            return
        reason = self._host.fault(run.known_grant)
        if reason is not None:
            raise Fault(reason)

    def _watch(self, run: _Run) -> Callable[[], None]:
        """Ends a wait for the source where nobody wants the blocks any more, or where the rest is
        not worth waiting for.
        """
        should_give_up = run.request.should_give_up
        if should_give_up is None:
            return run.guard

        def watch() -> None:
            run.guard()
            arrival, paced_ms = run.arrival, None
            if arrival is not None and arrival.verified_bytes:
                ms_a_byte = (self._clock.now() - run.first_at) / arrival.verified_bytes
                paced_ms = arrival.rest_bytes * ms_a_byte
            if should_give_up(arrival.whole_blocks if arrival else 0, paced_ms):
                raise Fault(Reason.GIVEN_UP)

        return watch

    def _settle(
        self,
        run: _Run,
        staging: Staging,
        manifests: list[Manifest],
        rest: Reason | None,
        fault: Reason | None,
    ) -> None:
        """Publish the verified whole blocks, or give everything back: one of both, once."""
        assert run.arrival is not None
        whole = run.arrival.whole_blocks
        run.reason = fault or rest
        if run.cancel.is_cancelled and fault is not None:
            run.reason = fault = Reason.CLIENT
        if whole == 0 or fault in _NOTHING_KEPT:
            self._store.abandon(staging.token)
            return
        published = self._store.publish(staging.token, manifests[:whole])
        if published.reason is Reason.TOKEN:
            self._store.abandon(staging.token)  # its time was over: it was set aside
        run.published = published.count
        if fault is None or published.count < whole:
            run.reason = published.reason or run.reason

    def _manifests(self, request: PullRequest, announced: Announced) -> list[Manifest]:
        """One for each block, with the owner that we know."""
        per_block = len(self._layout.spans)
        digests = [
            announced.digests[at : at + DIGEST_BYTES]
            for at in range(0, len(announced.digests), DIGEST_BYTES)
        ]
        return [
            Manifest(
                place=place,
                owner=request.owner,
                generation=generation,
                layout_digest=announced.layout,
                chunk_bytes=announced.chunk_bytes,
                digests=tuple(digests[number * per_block : (number + 1) * per_block]),
                size_bytes=size,
            )
            for number, (place, generation, size) in enumerate(
                zip(request.places, announced.generations, announced.sizes, strict=False)
            )
        ]

    def _due(self, run: _Run) -> Instant:
        return Instant(min(run.request.deadline, self._clock.now() + self._options.stall_ms))


@dataclass(slots=True, kw_only=True, eq=False)
class _Run:
    """What is known of one pull so far."""

    request: PullRequest
    cancel: Cancel
    began: Instant
    grant: Grant | None = None
    arrival: Arrival | None = None
    first_at: Instant = Instant(0.0)
    """When it began to wait for the first chunk."""
    reason: Reason | None = None
    published: int = 0
    setup_ms: float = 0.0
    verify_ms: float = 0.0

    @property
    def known_grant(self) -> Grant:
        assert self.grant is not None
        return self.grant

    def guard(self) -> None:
        """Ends a wait where nobody wants the blocks any more."""
        if self.cancel.is_cancelled:
            raise Fault(Reason.CLIENT)


def _is_run(places: tuple[Place, ...], first_block: int) -> bool:
    """Whether each block is the one after that before it."""
    assert 0 < len(places) <= MAX_GRANT_BLOCKS
    if places[0].index != first_block:
        return False
    pairs = pairwise(places)
    return all(b.parent == a.key and b.index == a.index + 1 for a, b in pairs)
