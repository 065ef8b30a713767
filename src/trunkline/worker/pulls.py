"""Pulling what a prompt needs from another worker's store, before the request is scheduled.

    ordered ─► follows who pulls the same ─► its turn on the link ─► source ─► published
                                                                       └─ it failed: one other, once

A grant is believed only beside a ticket that it fits. Whatever becomes of a pull, the request is
served: what did not come is computed. Bytes and times told are those of the profile's KV on a link
of the configured speed.

Must never: make a request wait longer than its pull's deadline, or outlive its client; ask more
than one other source. Read `orders.py` for the headers, `kv/client.py` for the pull itself,
`engine.py` for what other requests do meanwhile.
"""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from trunkline.core.records import Instant
from trunkline.core.transfer import MAX_GRANT_LIFE_MS, Grant, PullEnd, Reason, read_grant
from trunkline.kv.client import Puller
from trunkline.kv.orders import Pulled, PullOrder
from trunkline.kv.peers import Source
from trunkline.kv.pulls import Cancel, PullRequest
from trunkline.kv.server import Host
from trunkline.ports.clock import Clock
from trunkline.worker.blocks import KvSequence, Terms
from trunkline.worker.cache import BlockCache
from trunkline.worker.hedge import Hedge
from trunkline.worker.link import Link
from trunkline.worker.tiers import HostTier, place_of

MAX_PULLS = 8
"""At a time; a further request is computed at once."""
SETUP_MS = 1.0
"""Of a pull on the modelled link, beside its bytes: a round trip and a grant looked at."""
PATIENCE = 3.0
"""A pull is given so many times what it should take."""


class PullCall:
    """What one request waits for before it is scheduled. Belongs to the loop."""

    def __init__(self, order: PullOrder | None) -> None:
        self.order = order
        """What is to be pulled; None where only the disk is waited for."""
        self.pulled: Pulled | None = None
        self.turn_ms: Callable[[], float] = _at_once
        """What the device has to compute before this request."""
        self.lifted_tokens = 0
        """What came up from disk for it."""
        self.cancelled = Cancel()
        self.names: list[bytes] = []
        """Blocks that are being pulled for it."""
        self.followers: list[PullCall] = []
        """Of other requests that need what it pulls, and wait for that."""
        self._woken = asyncio.Event()

    def cancel(self) -> None:
        """Nobody wants it any more."""
        self.cancelled.cancel()
        self._woken.set()

    def wake(self) -> None:
        """What it waits for has happened."""
        self._woken.set()

    async def pause(self, ms: float) -> None:
        """So long, or until it is woken or cancelled."""
        try:
            async with asyncio.timeout(ms / 1e3):
                await self._woken.wait()
        except TimeoutError:
            pass
        if not self.cancelled.is_cancelled:
            self._woken.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class PullTerms:
    """What pulls of this worker cost, and how long they may take."""

    block_tokens: int
    token_bytes: int
    setup_ms: float
    patience_ms: float
    """Each is given at least so long: the machine is real."""
    saved_ms: Callable[[int, int], float]
    """What having the blocks of a prompt from one to another in host memory spares the device."""
    max_pulls: int = MAX_PULLS


def _at_once() -> float:
    return 0.0


class Pulls:
    """All pulls of one worker into its store."""

    def __init__(
        self,
        tier: HostTier,
        puller: Puller,
        *,
        transfer_key: bytes,
        clock: Clock,
        link: Link,
        host: Host,
        terms: PullTerms,
    ) -> None:
        self._tier = tier
        self._puller = puller
        self._transfer_key = transfer_key
        self._clock = clock
        self._link = link
        self._host = host
        self._terms = terms
        self._threads = ThreadPoolExecutor(terms.max_pulls, thread_name_prefix="kv-pull")
        self.open_count = 0
        self._coming: dict[bytes, PullCall] = {}
        """Blocks that are being pulled, by whose call. At most `max_pulls` runs of a grant's."""
        self.ended: dict[tuple[PullEnd, Reason | None], int] = {}
        self.bytes_in = 0
        """Published here, as the profile has it."""

    async def fetch(
        self, call: PullCall, cache: BlockCache, prompt: array[int], salt: str | None, terms: Terms
    ) -> None:
        """Pull what the prompt lacks of what is granted: `call.pulled` says how that ended. Ends by
        itself, whatever happens.
        """
        await self.follow(call, cache, prompt, salt, terms)
        began = self._clock.now()
        if self.open_count >= self._terms.max_pulls:
            self._end(call, _rejected(Reason.BUSY), began)
            return
        self.open_count += 1
        try:
            await self._fetch(call, began, lambda: cache.sketch(prompt, salt, terms))
        finally:
            call.cancel()  # whatever ended this, its thread ends as well
            self.open_count -= 1
            self._is_here(call)

    def is_coming(
        self, cache: BlockCache, prompt: array[int], salt: str | None, terms: Terms
    ) -> bool:
        """Whether what the prompt lacks is being pulled for another request."""
        if not self._coming or terms.ticket is None:
            return False
        return self._leader(cache.sketch(prompt, salt, terms)) is not None

    async def follow(
        self, call: PullCall, cache: BlockCache, prompt: array[int], salt: str | None, terms: Terms
    ) -> None:
        """Wait for the pull, if there is one, that brings what the prompt lacks: it ends by itself,
        and before this does nobody is to compute or to pull the same blocks.
        """
        if self.is_coming(cache, prompt, salt, terms):
            leader = self._leader(cache.sketch(prompt, salt, terms))
            assert leader is not None, "nothing came in between"
            leader.followers.append(call)
            await call.pause(MAX_GRANT_LIFE_MS)

    def _leader(self, sequence: KvSequence) -> PullCall | None:
        """Who pulls the first block that is missing."""
        limit = (len(sequence.tokens) - 1) // self._terms.block_tokens
        here = self._count_here(sequence, limit)
        return self._coming.get(sequence.hashes[here]) if here < limit else None

    @property
    def overdue_count(self) -> int:
        """Open past their deadline."""
        return self._puller.figures.overdue_pulls

    def start(self) -> None:
        """Keep connections to sources warm, until `close`."""
        self._puller.start()

    def close(self) -> None:
        """Cancel what runs and wait for its threads."""
        self._puller.close()
        self._threads.shutdown()

    async def _fetch(
        self, call: PullCall, began: Instant, sketch: Callable[[], KvSequence]
    ) -> None:
        """From whom it is ordered, or from the other where that one failed."""
        order = call.order
        assert order is not None
        pulled, until = await self._from(call, order, sketch, Instant(math.inf))
        self._end(call, pulled, began)
        now, other = self._clock.now(), order.other
        if until is None or other is None or now >= until or call.cancelled.is_cancelled:
            return
        first = call.pulled
        pulled, _ = await self._from(call, other, sketch, until)
        self._end(call, replace(pulled, first=first), now)

    async def _from(
        self, call: PullCall, order: PullOrder, sketch: Callable[[], KvSequence], by: Instant
    ) -> tuple[Pulled, Instant | None]:
        """How the pull from one source ended, and until when another one may be asked, if so."""
        if order.fault is not None:
            return _rejected(order.fault), by if order.fault.is_of_source else None
        grant, sequence = read_grant(order.grant, self._transfer_key), sketch()
        if grant is None:
            return _rejected(Reason.GRANT), None
        reason = _misfit(grant, sequence)
        if reason is not None:
            return _rejected(reason), None
        first, last = grant.first_block, grant.first_block + grant.block_count
        here = self._count_here(sequence, last)
        if here >= min(last, (len(sequence.tokens) - 1) // self._terms.block_tokens):
            return Pulled(end=PullEnd.PUBLISHED, reason=None, first_block=first), None
        if here < first:
            return _rejected(Reason.CHAIN), None
        names = sequence.hashes[here:last]
        self._coming.update(dict.fromkeys(names, call))
        call.names += names
        return await self._in_turn(call, order, grant, sketch, by)

    def _is_here(self, call: PullCall) -> None:
        """Nobody waits for it any more: it came, or will not come."""
        for name in call.names:
            if self._coming.get(name) is call:
                del self._coming[name]
        for follower in call.followers:
            follower.wake()

    async def _in_turn(
        self,
        call: PullCall,
        order: PullOrder,
        grant: Grant,
        sketch: Callable[[], KvSequence],
        by: Instant,
    ) -> tuple[Pulled, Instant | None]:
        """When the link is free. Nothing of it is taken for what is known to come to nothing."""
        now, setup_ms = self._clock.now(), self._terms.setup_ms
        granted_ms = min(grant.deadline_ms - self._clock.wall() * 1e3, by - now)
        if granted_ms <= 0.0:
            return _rejected(Reason.GRANT), None
        if call.cancelled.is_cancelled:
            return _LEFT, None
        reason = self._host.fault(grant)
        if reason is not None:
            return _rejected(reason), None
        booked = self._link.book(
            grant.block_count * self._terms.block_tokens,
            now,
            begins_by=Instant(now + granted_ms - setup_ms),
        )
        if booked is None:
            return _rejected(Reason.BUSY), None
        due_at = Instant(booked[1] + setup_ms + order.ready_ms)
        hedge = self._hedge(grant, now, due_at, granted_ms, call.turn_ms())
        try:
            if hedge.is_hopeless(now):
                return Pulled(end=PullEnd.CANCELLED, reason=Reason.GIVEN_UP), None
            await call.pause(setup_ms + booked[0] - now)
            if call.cancelled.is_cancelled:
                return _LEFT, None
            pulled = await self._pull(call, order, grant, sketch(), hedge)
        finally:  # cancelled, or less came than was booked for
            self._link.give_back(booked, self._clock.now())
        is_sources_fault = pulled.reason is not None and pulled.reason.is_of_source
        return pulled, hedge.deadline if is_sources_fault and not pulled.blocks else None

    def _hedge(
        self, grant: Grant, now: Instant, due_at: Instant, granted_ms: float, turn_ms: float
    ) -> Hedge:
        """How long a pull that is to be here at `due_at` is waited for."""
        longest_ms = max(self._terms.patience_ms, PATIENCE * (due_at - now))
        return Hedge(
            first_block=grant.first_block,
            last_block=grant.first_block + grant.block_count,
            due_at=due_at,
            turn_at=Instant(now + turn_ms),
            patient_until=Instant(now + self._terms.patience_ms),
            deadline=Instant(now + min(longest_ms, granted_ms)),
            saved_ms=self._terms.saved_ms,
        )

    async def _pull(
        self, call: PullCall, order: PullOrder, grant: Grant, sequence: KvSequence, hedge: Hedge
    ) -> Pulled:
        first, last = grant.first_block, grant.first_block + grant.block_count
        reason = self._tier.keep_before(sequence, first)
        if reason is not None:
            return _rejected(reason)
        assert sequence.ticket is not None, "a misfit"
        request = PullRequest(
            grant=order.grant,
            source=Source(
                worker=order.source,
                incarnation=grant.source_incarnation,
                host=order.host,
                port=order.port,
                local=order.local,
            ),
            places=tuple(place_of(sequence, index) for index in range(first, last)),
            owner=sequence.ticket.owner_of(grant),
            deadline=hedge.deadline,
            saved_ms=self._tier.saved_ms(first),
            should_give_up=lambda blocks, paced_ms: hedge.should_give_up(
                blocks, paced_ms, self._clock.now()
            ),
        )
        self._tier.await_pull(sequence, first, last)
        try:
            result = await asyncio.get_running_loop().run_in_executor(
                self._threads, self._puller.pull, request, call.cancelled
            )
        finally:
            self._tier.end_pull(sequence.hashes[first:last])
        tokens = result.blocks * self._terms.block_tokens
        return Pulled(
            end=result.end,
            reason=result.reason,
            first_block=first,
            blocks=result.blocks,
            tokens=tokens,
            bytes=tokens * self._terms.token_bytes,
        )

    def _count_here(self, sequence: KvSequence, last: int) -> int:
        """Leading blocks of the prompt that need no pull: on the device, then behind it."""
        on_device = min(len(sequence.blocks), last)
        return on_device + self._tier.count_from(sequence, on_device, last)

    def _end(self, call: PullCall, pulled: Pulled, began: Instant) -> None:
        call.pulled = replace(pulled, ms=self._clock.now() - began)
        how = (pulled.end, pulled.reason)
        self.ended[how] = self.ended.get(how, 0) + 1
        self.bytes_in += pulled.bytes


_LEFT = Pulled(end=PullEnd.CANCELLED, reason=Reason.CLIENT)


def _rejected(reason: Reason) -> Pulled:
    return Pulled(end=PullEnd.REJECTED, reason=reason)


def _misfit(grant: Grant, sequence: KvSequence) -> Reason | None:
    """Why a grant is not for this prompt under its ticket."""
    first, last = grant.first_block, grant.first_block + grant.block_count
    if not grant.covers(b"".join(sequence.hashes[first:last])):
        return Reason.GRANT
    ticket, zone = sequence.ticket, sequence.zone_of(first)
    if zone is not sequence.zone_of(last - 1) or zone.stamp.ns != grant.ns:
        return Reason.NS
    if ticket is None or not ticket.is_over(grant):
        return Reason.GRANT
    return None
