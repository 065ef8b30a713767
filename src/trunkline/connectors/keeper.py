"""The worker's half: copies finished blocks into the store, and brings them back to the device.

    save   device ─copied─► buffer ─put, digest made─► store             at the end of a step
    load   store ─copied, digest compared─► buffer ─► device             in a thread, for a request
           └─ what is missing and granted is pulled first, into the store

A store's memory is not the device's: what others pull is a copy that no step can change. Whatever
happens to a load it ends, and says how many leading blocks are on the device; the engine computes
the rest. Must never: write to the device after a load was told to be over. Read `plan.py` for who
asks, `kv/client.py` for a pull.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from trunkline.connectors.messages import (
    Load,
    Loaded,
    PullWish,
    Save,
    StepPlan,
    StepReport,
    place_in,
)
from trunkline.core.records import Instant
from trunkline.core.transfer import Grant, PullEnd, Reason, read_grant
from trunkline.kv.client import Puller
from trunkline.kv.digests import fault_of
from trunkline.kv.entries import Erasure
from trunkline.kv.holder import is_raised
from trunkline.kv.judge import Believing, ticket_fault
from trunkline.kv.orders import Pulled, PullOrder
from trunkline.kv.peers import Source
from trunkline.kv.pulls import Cancel, PullRequest
from trunkline.kv.records import Kept, Overflowed, Owner, Place
from trunkline.kv.shares import Shares
from trunkline.kv.store import BlockStore
from trunkline.ports.clock import Clock

MAX_TOLD = 1_024
"""Ends of pulls that the gateway was not told yet. At the bound the oldest is dropped."""
TOLD_AT_ONCE = 128
ERASE_SLICE_BLOCKS = 256
_READ_LEASE_MS = 10_000.0
"""A reader copies in the same step; the lease is for one that dies in it."""
_log = logging.getLogger("vllm.trunkline")  # the engine shows what is below its own name


class Device(Protocol):
    """The engine's KV memory, block by block. A place is written by one thread at a time."""

    def read(self, block_id: int, into: bytearray) -> None:
        """All components of a block, in the order of the layout."""
        ...

    def write(self, block_id: int, data: bytearray) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperTerms:
    """What may be asked of a keeper at a time."""

    block_tokens: int
    max_loads: int
    max_pull_ms: float
    """A pull ends by then, whatever its grant says."""
    saved_ms: float
    """What computing one block takes, for the order of eviction."""
    device_share: float
    """The store's memory for blocks over the engine's."""


@dataclass(slots=True, kw_only=True)
class KeeperFigures:
    """Plain counters since start, in tokens where nothing else is said."""

    from_host: int = 0
    """Verified and brought to the device, from what was in the store."""
    from_pull: int = 0
    """The same, pulled for the request."""
    lost: int = 0
    """Promised to the engine and not brought: it counts them as cached, and computes them."""
    saved: int = 0
    put_refused: Counter[Reason] = field(default_factory=Counter[Reason])
    """Blocks that the store did not take, by why."""
    load_refused: Counter[Reason] = field(default_factory=Counter[Reason])
    """Loads that were not allowed to be used."""
    pulls: Counter[tuple[PullEnd, Reason | None]] = field(
        default_factory=Counter[tuple[PullEnd, Reason | None]]
    )
    pulled_bytes: int = 0
    untold: int = 0
    """Ends of pulls that were dropped before the gateway asked."""


class Keeper:
    """Of one worker. `take` and `drain` are the engine's thread; the rest is safe for threads."""

    def __init__(
        self,
        store: BlockStore,
        device: Device,
        fence: Believing,
        clock: Clock,
        terms: KeeperTerms,
        *,
        puller: Puller | None,
        transfer_key: bytes,
    ) -> None:
        self.store = store
        self.figures = KeeperFigures()
        self._device = device
        self._fence = fence
        self._clock = clock
        self._terms = terms
        self._puller = puller
        self._transfer_key = transfer_key
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(terms.max_loads + 1, thread_name_prefix="kv-load")
        self._buffer = bytearray(store.layout.block_bytes)
        self._saved: list[bytes] = []
        self._loaded: list[Loaded] = []
        self._cancels: dict[str, Cancel] = {}
        self._told: deque[Mapping[str, Any]] = deque()
        self._erasures: list[Erasure] = []
        self._is_closing = False
        self._shares = Shares(store, terms.device_share)

    # -- the engine's thread -----------------------------------------------------------------------

    def begin(self, plan: StepPlan) -> None:
        """What the step has to do beside computing, but for what it computes itself."""
        if plan.is_reset:
            self._condemn(lambda _owner: True)
        for name, end, reason in plan.declined:
            self._end(name, Pulled(end=end, reason=reason))
        for request_id in plan.cancelled:
            cancel = self._cancels.get(request_id)
            if cancel is not None:
                cancel.cancel()
        for ticket in plan.savers:
            self._shares.tell(ticket)
        for load in plan.loads:
            self._shares.tell(load.ticket)
            cancel = self._cancels[load.request_id] = Cancel()
            self._threads.submit(self._load, load, cancel)

    def save(self, saves: Sequence[Save]) -> None:
        """Copy what the step has finished."""
        for save in saves:
            self._device.read(save.block_id, self._buffer)
            self._put(save.place, save.owner, self._buffer)
            self._saved.append(save.place.key)

    def drain(self) -> StepReport:
        """What happened since the last call. What a load brought to the store is told before the
        load itself.
        """
        with self._lock:
            loaded, self._loaded = self._loaded, []
        for one in loaded:
            self._cancels.pop(one.load.request_id, None)
        saved, self._saved = self._saved, []
        events = self.store.take_events()
        is_incomplete = any(isinstance(event, Overflowed) for event in events)
        return StepReport(
            events=tuple(events),
            resident=tuple(self.store.resident()) if is_incomplete else (),
            saved=tuple(saved),
            loaded=tuple(loaded),
        )

    def close(self) -> None:
        """Cancel what runs and wait for it."""
        with self._lock:
            self._is_closing = True
        for cancel in list(self._cancels.values()):
            cancel.cancel()
        if self._puller is not None:
            self._puller.close()
        self._threads.shutdown()
        self.store.close()

    # -- what the gateway's agent asks -------------------------------------------------------------

    def take_told(self) -> list[Mapping[str, Any]]:
        """How pulls ended, oldest first; each is told once."""
        with self._lock:
            return [self._told.popleft() for _ in range(min(len(self._told), TOLD_AT_ONCE))]

    def condemn(self, raised: Mapping[str, int]) -> Erasure:
        """Nothing that stands on an older epoch can be found, pulled or published from now on."""
        return self._condemn(lambda owner: is_raised(owner, raised))

    def _condemn(self, is_stale: Callable[[Owner], bool]) -> Erasure:
        erasure = self.store.condemn(is_stale)
        with self._lock:
            self._erasures.append(erasure)
        self.tend()
        return erasure

    def tend(self) -> None:
        """Wipe what is condemned and not held any more: called with each lease as well."""
        with self._lock:
            self._erasures = [erasure for erasure in self._erasures if not erasure.is_done]
            if self._erasures and not self._is_closing:
                self._threads.submit(self._erase)

    def _erase(self) -> None:
        while self.store.erase(ERASE_SLICE_BLOCKS):
            pass

    # -- in ----------------------------------------------------------------------------------------

    def _put(self, place: Place, owner: Owner, data: bytearray) -> Reason | None:
        outcome = self.store.put(place, owner, data, saved_ms=self._terms.saved_ms)
        if isinstance(outcome, Kept):
            self.figures.saved += outcome.is_new * self._terms.block_tokens
            return None
        with self._lock:
            self.figures.put_refused[outcome] += 1
        return outcome

    # -- one load, in a thread of its own ----------------------------------------------------------

    def _load(self, load: Load, cancel: Cancel) -> None:
        blocks = 0
        try:
            blocks = self._bring(load, cancel)
        except Exception:  # noqa: BLE001 - logged; the request is computed instead
            _log.exception("trunkline: a load of %d blocks failed", len(load.wanted))
        finally:
            with self._lock:
                self.figures.lost += (len(load.wanted) - blocks) * self._terms.block_tokens
                self._loaded.append(Loaded(load=load, blocks=blocks))

    def _bring(self, load: Load, cancel: Cancel) -> int:
        """How many leading blocks of what is wanted are on the device."""
        buffer = bytearray(self.store.layout.block_bytes)
        from_host = self._copy(load, load.first, buffer)
        from_pull = 0
        if load.wish is not None:
            pulled = self._pull(load, load.wish, load.first + from_host, buffer, cancel)
            if pulled and from_host < len(load.wanted):
                from_pull = self._copy(load, load.first + from_host, buffer)
        # Once more: a lease may have run out, or an epoch been raised, while it was copied.
        reason = ticket_fault(self._fence, load.ticket)
        with self._lock:
            if reason is not None:
                self.figures.load_refused[reason] += 1
                return 0
            self.figures.from_host += from_host * self._terms.block_tokens
            self.figures.from_pull += from_pull * self._terms.block_tokens
        return from_host + from_pull

    def _copy(self, load: Load, begin: int, buffer: bytearray) -> int:
        """Bring what the store has from one block on: how many blocks."""
        if ticket_fault(self._fence, load.ticket) is not None:
            return 0
        keys = load.keys[begin : len(load.block_ids)]
        pins = self.store.pin(
            load.ticket.ns,
            keys,
            until=Instant(self._clock.now() + _READ_LEASE_MS),
            holder=load.request_id,
        )
        count = 0
        try:
            for block in pins.blocks:
                index = begin + count
                if block.manifest.place != place_in(load.keys, index):
                    break
                buffer[:] = block.data
                # Of the copy: a process that stood still lost its lease, and another block may lie
                # there.
                if fault_of(memoryview(buffer), block.manifest, self.store.layout) is not None:
                    break
                self._device.write(load.block_ids[index], buffer)
                count += 1
        finally:
            if pins.token:
                self.store.unpin(pins.token)
        return count

    def _pull(
        self, load: Load, wish: PullWish, here: int, buffer: bytearray, cancel: Cancel
    ) -> bool:
        """Pull what is missing behind `here`, and keep how that ended: whether anything came."""
        until = Instant(self._clock.now() + self._terms.max_pull_ms)
        pulled = self._pull_from(wish.order, load, here, until, buffer, cancel)
        other = wish.order.other
        if pulled.reason and pulled.reason.is_of_source and not pulled.blocks and other:
            second = self._pull_from(other, load, here, until, buffer, cancel)
            pulled = replace(second, first=pulled)
        self._end(wish.name, pulled)
        return pulled.blocks > 0

    def _pull_from(
        self,
        order: PullOrder,
        load: Load,
        here: int,
        until: Instant,
        buffer: bytearray,
        cancel: Cancel,
    ) -> Pulled:
        """From one source, until then at the latest."""
        grant = read_grant(order.grant, self._transfer_key) if self._puller else None
        reason = order.fault or _misfit(grant, load)
        if reason is not None or grant is None or self._puller is None:
            return Pulled(end=PullEnd.REJECTED, reason=reason or Reason.GRANT)
        first, last = grant.first_block, grant.first_block + grant.block_count
        if here >= min(last, len(load.block_ids)):
            return Pulled(end=PullEnd.PUBLISHED, reason=None)
        reason = self._keep_before(load, first, buffer)
        if reason is not None:
            return Pulled(end=PullEnd.REJECTED, reason=reason)
        began = self._clock.now()
        granted_until = Instant(began + grant.deadline_ms - self._clock.wall() * 1e3)
        request = PullRequest(
            grant=order.grant,
            source=Source(
                worker=order.source,
                incarnation=grant.source_incarnation,
                host=order.host,
                port=order.port,
                local=order.local,
            ),
            places=tuple(place_in(load.keys, index) for index in range(first, last)),
            owner=load.ticket.owner_of(grant),
            deadline=min(until, granted_until),
            saved_ms=self._terms.saved_ms,
        )
        result = self._puller.pull(request, cancel)
        return Pulled(
            end=result.end,
            reason=result.reason,
            first_block=first,
            blocks=result.blocks,
            tokens=result.blocks * self._terms.block_tokens,
            bytes=result.blocks * self.store.layout.block_bytes,
            ms=self._clock.now() - began,
        )

    def _keep_before(self, load: Load, first: int, buffer: bytearray) -> Reason | None:
        """Put what the store lacks before `first` and the device has; why not all is there."""
        ticket = load.ticket
        pins = self.store.pin(
            ticket.ns,
            load.keys[:first],
            until=Instant(self._clock.now() + _READ_LEASE_MS),
            holder=load.request_id,
            is_verified=False,
        )
        if pins.token:
            self.store.unpin(pins.token)
        owner = Owner(
            ns=ticket.ns, subjects=ticket.subjects, epochs=ticket.epochs, domain=ticket.tenant
        )
        for index in range(len(pins.blocks), first):
            if index >= load.first:
                return Reason.CHAIN
            self._device.read(load.block_ids[index], buffer)
            reason = self._put(place_in(load.keys, index), owner, buffer)
            if reason is not None:
                return reason
        return None

    def _end(self, name: str, pulled: Pulled) -> None:
        """One pull is over: the gateway will be told."""
        with self._lock:
            self.figures.pulls[pulled.end, pulled.reason] += 1
            self.figures.pulled_bytes += pulled.bytes
            if len(self._told) >= MAX_TOLD:
                self._told.popleft()
                self.figures.untold += 1
            self._told.append({"name": name, "told": pulled.told().decode()})


def _misfit(grant: Grant | None, load: Load) -> Reason | None:
    """Why a grant is not for this prompt under its ticket."""
    if grant is None:
        return Reason.GRANT
    first, last = grant.first_block, grant.first_block + grant.block_count
    if not grant.covers(b"".join(load.keys[first:last])):
        return Reason.GRANT
    if grant.ns != load.ticket.ns:
        return Reason.NS
    return None if load.ticket.is_over(grant) else Reason.GRANT
