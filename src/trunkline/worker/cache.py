"""The paged prefix cache of one rank: blocks of real KV bytes, shared by reference count.

Semantics follow vLLM: full blocks only, named by a chain of digests under the salt; a
block whose last user is gone stays resident and hittable until its place is needed; least recently
freed goes first, the tail of a prefix before its head; a block computed twice is two copies,
announced twice. What became resident or went away is kept as events until `take_events`.

A request with a ticket uses a block only after its guard's check, and publishes only while it may;
one without sees nothing of what those left. Prompts may have regions under salts of their own: the
first block of each is named under its salt and the block before it.

Must never: hand out KV to a sequence that does not hold the block. Read `quota.py` for whose place
is taken, `engine.py` next.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

from trunkline.core import simkv
from trunkline.ports.publisher import BlockEvent, BlockRemoved, CacheCleared, RunStored
from trunkline.worker.blocks import (
    STOCK,
    Block,
    BlockState,
    Domain,
    Erasure,
    KvSequence,
    Stamp,
    Terms,
    Zone,
    wipe,
    zones_of,
)
from trunkline.worker.fence import Closed, Expected, Guard, Reason
from trunkline.worker.names import name_blocks
from trunkline.worker.quota import Places
from trunkline.worker.tiers import HostTier

# Looked up once: these are compared for each block.
_CONDEMNED = BlockState.CONDEMNED
_READY = BlockState.READY
_WORKING = BlockState.WORKING

# The bytes do not belong to the namespace whose request met them: they are damaged, or not what the
# index says. Nobody shall meet them again.
_SPOILT = frozenset(
    {Reason.HASH, Reason.EPOCH, Reason.GEN, Reason.LAYOUT, Reason.SUM, Reason.CHAIN}
)


class BlockCache:
    """`capacity` places of `block_tokens` tokens each."""

    def __init__(
        self,
        *,
        capacity: int,
        block_tokens: int,
        guard: Guard | None = None,
        tier: HostTier | None = None,
    ) -> None:
        if block_tokens % simkv.CELL_TOKENS:
            raise ValueError(f"block size is {block_tokens}, needed is a multiple of 16")
        self.capacity = capacity
        self.block_tokens = block_tokens
        self.block_bytes = block_tokens * simkv.TOKEN_KV_BYTES
        self.places = Places(capacity)
        self._guard: Guard = guard or Closed()
        self._tier = tier
        self._resident: dict[bytes, dict[Block, int]] = {}
        """Name -> its copies, oldest first, and the generation that each was published in."""
        self._stamped: dict[Stamp, dict[Block, None]] = {}
        """The same blocks by whose they are."""
        self._reserved = 0
        self._events: list[BlockEvent] = []

    @property
    def used_share(self) -> float:
        """Share of the places that running sequences hold; freed but resident ones do not count."""
        return 1 - self.places.free_count / self.capacity

    @property
    def resident_blocks(self) -> int:
        return sum(len(copies) for copies in self._resident.values())

    def is_resident(self, name: bytes) -> bool:
        return name in self._resident

    # -- the life of a sequence --------------------------------------------------------------------

    def admit(
        self, tokens: array[int], salt: str | None, answer_tokens: int, terms: Terms = STOCK
    ) -> KvSequence | None:
        """Bind the longest resident prefix and set places aside for the rest.

        At most all tokens but the last can hit: that one is always computed. None when memory is
        too full now; the caller tries again after a `release`.
        """
        zones = zones_of(salt, terms, len(tokens) // self.block_tokens)
        domain = self._domain(terms)
        sequence = KvSequence(
            zones=zones,
            tokens=array("I", tokens),
            reserved=0,
            domain=domain,
            ticket=terms.ticket,
        )
        self._name(sequence)
        hits, refused = self._hits(sequence) if terms.reuses else ([], None)
        needed = self._places_of(tokens, answer_tokens) - len(hits)
        if not self.places.fits(domain, needed, hits):
            self.places.forget_if_empty(domain)
            return None
        if refused is not None:
            self._guard.count(refused)
        domain.sequences += 1
        domain.reserved += needed
        self._reserved += needed
        sequence.reserved = needed
        for block in hits:
            self._hold(block)
        sequence.blocks.extend(hits)
        if self._tier is not None and terms.reuses:
            self._go_on_from(self._tier, sequence)
        sequence.bound = tuple(block.generation for block in sequence.blocks)
        sequence.cached_tokens = len(sequence.blocks) * self.block_tokens
        for index, block in enumerate(sequence.blocks):
            seen = simkv.apply_mask(block.kv, sequence.zone_of(index).mask)
            sequence.state = simkv.absorb(sequence.state, seen)
        return sequence

    def sketch(self, tokens: array[int], salt: str | None, terms: Terms) -> KvSequence:
        """How a prompt's blocks are called and which of them lie here now. It holds nothing: good
        for the step that asks.
        """
        sequence = KvSequence(
            zones=zones_of(salt, terms, len(tokens) // self.block_tokens),
            tokens=tokens,
            reserved=0,
            domain=self.places.domain("", 0, None),
            ticket=terms.ticket,
        )
        self._name(sequence)
        sequence.blocks.extend(self._hits(sequence)[0])
        return sequence

    def never_fits(self, tokens: array[int], answer_tokens: int, terms: Terms = STOCK) -> bool:
        """Whether others' floors leave too little for it, also when nothing else runs."""
        domain = self._domain(terms)
        is_hopeless = self.places.never_fits(domain, self._places_of(tokens, answer_tokens))
        self.places.forget_if_empty(domain)
        return is_hopeless

    def compute(self, sequence: KvSequence, upto_tokens: int, *, keeps: bool = True) -> None:
        """Fill blocks with KV until `upto_tokens`; full ones become resident and are announced,
        unless the sequence may not publish. They go behind the device now, or with `keep`."""
        assert upto_tokens <= len(sequence.tokens)
        first = len(sequence.blocks)
        last = upto_tokens // self.block_tokens
        if last <= first:
            return
        self._name(sequence)
        if sequence.ticket is not None and sequence.publishes:
            sequence.publishes = self._guard.refusal(sequence.ticket) is None
        published = 0
        for index in range(first, last):
            zone = sequence.zone_of(index)
            if self._fill(sequence, index, zone):
                published += 1
            elif published:
                self._announce(sequence, index - published, index)
                published = 0
        self._announce(sequence, last - published, last)
        if keeps:
            self.keep(sequence)

    def keep(self, sequence: KvSequence) -> None:
        """The time that computing its blocks takes has passed: they go behind the device."""
        unkept, sequence.unkept = sequence.unkept, []
        for index in unkept:
            assert self._tier is not None
            self._tier.keep(sequence, index)

    def fault(self, sequence: KvSequence) -> Reason | None:
        """The check at the point of use once more: why its hits may not stand, None when they may.

        What a stock engine's request hit always stands.
        """
        ticket = sequence.ticket
        if ticket is None or not sequence.bound:
            return None
        reason = self._guard.refusal(ticket)
        for index, generation in enumerate(sequence.bound):
            if reason is not None:
                break
            expected = self._expected(sequence, index, generation)
            reason = self._guard.fault(sequence.blocks[index], expected)
        if reason is not None:
            self._guard.count(reason)
        return reason

    def answer(self, sequence: KvSequence, count: int, vocab_size: int) -> array[int]:
        """What the model says after the KV that it has read, and the tokens that follow it."""
        tail = sequence.tokens[len(sequence.blocks) * self.block_tokens :]
        return simkv.answer_from(sequence.state, tail, count, vocab_size)

    def release(self, sequence: KvSequence) -> None:
        """The sequence is over. Its blocks stay resident, its tail the next to go. Call it once."""
        assert sequence.reserved >= 0, "released twice"
        domain = sequence.domain
        self._reserved -= sequence.reserved
        domain.reserved -= sequence.reserved
        sequence.reserved = -1
        for block in reversed(sequence.blocks):
            block.references -= 1
            assert block.references >= 0
            if not block.references:
                self.places.shelve(block)
        sequence.blocks.clear()
        domain.sequences -= 1
        self.places.forget_if_empty(domain)

    def reset(self) -> bool:
        """Forget all prefixes; False, and nothing done, while a sequence holds blocks."""
        if self.places.free_count < self.capacity or self._reserved:
            return False
        while self.erase(self.capacity):
            pass
        for block in [block for copies in self._resident.values() for block in copies]:
            self._unindex(block)
            self.places.condemn(block)
        while (block := self.places.next_dirty()) is not None:
            wipe(block)
            self.places.put_clean(block)
        self._events.append(CacheCleared())
        return True

    def take_events(self) -> list[BlockEvent]:
        """What happened since the last call, in order."""
        taken, self._events = self._events, []
        return taken

    # -- revocation --------------------------------------------------------------------------------

    def condemn(self, is_stale: Callable[[Stamp], bool], erasure: Erasure | None) -> None:
        """Make all blocks of some stamps unreachable, at once. They are overwritten by `erase` when
        nobody holds them, and announced then.
        """
        for stamp in [stamp for stamp in self._stamped if is_stale(stamp)]:
            for block in list(self._stamped[stamp]):
                self._condemn(block, erasure)

    @property
    def has_dirty(self) -> bool:
        """Whether `erase` has something to do."""
        return self.places.dirty_count > 0

    def erase(self, limit: int) -> int:
        """Overwrite up to `limit` condemned blocks; how many it were."""
        for count in range(limit):
            block = self.places.next_dirty()
            if block is None:
                return count
            self._erase(block)
            self.places.put_clean(block)
        return limit

    def _condemn(self, block: Block, erasure: Erasure | None) -> None:
        self._unindex(block)
        block.erasure = erasure
        if erasure is not None:
            erasure.condemned_blocks += 1
            erasure.condemned_bytes += len(block.kv)
        block.was_announced = True
        self.places.condemn(block)

    def _erase(self, block: Block) -> None:
        erasure, size, name = block.erasure, len(block.kv), block.hash
        was_announced = block.was_announced
        wipe(block)
        if was_announced:
            self._events.append(BlockRemoved(hash=name))
        if erasure is not None:
            erasure.erased_blocks += 1
            erasure.erased_bytes += size

    # -- names and lookups -------------------------------------------------------------------------

    def _name(self, sequence: KvSequence) -> None:
        name_blocks(sequence.hashes, sequence.tokens, sequence.zones, self.block_tokens)

    def _hits(self, sequence: KvSequence) -> tuple[list[Block], Reason | None]:
        """The longest resident prefix that may be used, and what was wrong with the block behind it
        where one is there.
        """
        limit = (len(sequence.tokens) - 1) // self.block_tokens
        hits: list[Block] = []
        if not (limit and sequence.zones[-1].is_published):
            return hits, None
        if sequence.ticket is not None:
            reason = self._guard.refusal(sequence.ticket)
            if reason is not None:
                return hits, reason
        for index, name in enumerate(sequence.hashes[:limit]):
            copies = self._resident.get(name)
            if not copies:
                break
            block, reason = self._usable(sequence, index, copies)
            if block is None:
                return hits, reason
            hits.append(block)
        return hits, None

    def _usable(
        self, sequence: KvSequence, index: int, copies: dict[Block, int]
    ) -> tuple[Block | None, Reason | None]:
        """The first copy that is in order; else what is wrong with the first one."""
        if sequence.ticket is None:
            return next((block for block in copies if not block.stamp.ns), None), None
        first: Reason | None = None
        for block, generation in list(copies.items()):
            reason = self._guard.fault(block, self._expected(sequence, index, generation))
            if reason is None:
                return block, None
            first = first or reason
            if reason in _SPOILT:
                self._drop(sequence.hashes[index], block)
        return None, first

    def _expected(self, sequence: KvSequence, index: int, generation: int) -> Expected:
        return Expected(
            ns=sequence.zone_of(index).stamp.ns,
            name=sequence.hashes[index],
            generation=generation,
            parent=sequence.hashes[index - 1] if index else b"",
            kv_bytes=self.block_bytes,
        )

    def _drop(self, name: bytes, block: Block) -> None:
        """An entry that is not what it says: out of the index, and its bytes with it."""
        if block.state is _READY and block.hash == name:
            self._condemn(block, None)
            return
        # The place is somebody else's by now, who may be in order.
        del self._resident[name][block]
        if not self._resident[name]:
            del self._resident[name]
        self._events.append(BlockRemoved(hash=name))
        if block.state is _READY and block not in self._resident.get(block.hash, ()):
            self.places.condemn(block)

    # -- behind the device -------------------------------------------------------------------------

    def _go_on_from(self, tier: HostTier, sequence: KvSequence) -> None:
        """Copy to the device what a tier behind it has of the next blocks."""
        ticket = sequence.ticket
        if ticket is None or not sequence.zones[-1].is_published:
            return
        if self._guard.refusal(ticket) is not None:
            return
        tier.set_quota(ticket)
        first = len(sequence.blocks)
        tier.count_from(sequence, 0, first)
        with tier.found(sequence, first, (len(sequence.tokens) - 1) // self.block_tokens) as run:
            for block, stamp in zip(run.blocks, run.stamps, strict=True):
                if not self._load(sequence, tier.copied(block), stamp):
                    break
        sequence.loaded_blocks = len(sequence.blocks) - first
        self._announce(sequence, first, len(sequence.blocks))
        if run.refused is not None:
            self._guard.count(run.refused)
        tier.hold_public(sequence)

    def _load(self, sequence: KvSequence, kv: bytearray | None, stamp: Stamp) -> bool:
        """One block more; False where there is no place for it, or it is not in order."""
        domain = sequence.domain
        if kv is None:
            self._guard.count(Reason.GEN)
            return False
        if self.places.is_full(domain) and not domain.idle:
            return False
        index = len(sequence.blocks)
        block = self._take(sequence)
        block.kv = kv
        block.hash, block.stamp = sequence.hashes[index], stamp
        block.parent = sequence.hashes[index - 1] if index else b""
        block.checksum = simkv.checksum(block.kv)
        self._index(block)
        reason = self._guard.fault(block, self._expected(sequence, index, block.generation))
        if reason is None:
            return True
        self._guard.count(reason)
        self._give_back(sequence)
        return False

    def _give_back(self, sequence: KvSequence) -> None:
        """The last block of a sequence is not used after all, and nobody heard of it."""
        block = sequence.blocks.pop()
        block.references = 0
        self.places.shelve(block)
        self._condemn(block, None)
        block.was_announced = False
        sequence.reserved += 1
        sequence.domain.reserved += 1
        self._reserved += 1

    # -- places ------------------------------------------------------------------------------------

    def _fill(self, sequence: KvSequence, index: int, zone: Zone) -> bool:
        """Compute one block; whether it is published."""
        start = index * self.block_tokens
        tokens = sequence.tokens[start : start + self.block_tokens]
        kv, sequence.state = simkv.extend(sequence.state, tokens)
        block = self._take(sequence)
        block.kv = bytearray(simkv.apply_mask(kv, zone.mask))
        block.hash = sequence.hashes[index]
        block.stamp = zone.stamp
        if not self._may_publish(sequence, zone):
            return False
        if sequence.ticket is not None:
            block.parent = sequence.hashes[index - 1] if index else b""
            block.checksum = simkv.checksum(block.kv)
        self._index(block)
        if self._tier is not None and sequence.ticket is not None:
            sequence.unkept.append(index)
        return True

    def _index(self, block: Block) -> None:
        """It can be found from now on."""
        self.places.charge(block)
        self._resident.setdefault(block.hash, {})[block] = block.generation
        self._stamped.setdefault(block.stamp, {})[block] = None

    def _may_publish(self, sequence: KvSequence, zone: Zone) -> bool:
        if not (zone.is_published and not self.places.is_full(sequence.domain)):
            sequence.publishes = False
        return sequence.publishes

    def _announce(self, sequence: KvSequence, first: int, last: int) -> None:
        """Each zone in an event of its own."""
        while first < last:
            zone = sequence.zone_of(first)
            later = (one.first for one in sequence.zones if one.first > first)
            end = min(next(later, last), last)
            self._events.append(
                RunStored(
                    hashes=tuple(sequence.hashes[first:end]),
                    parent=sequence.hashes[first - 1] if first else None,
                    tokens=sequence.tokens[first * self.block_tokens : end * self.block_tokens],
                    block_tokens=self.block_tokens,
                    salt=zone.salt,
                    begins_region=first > 0 and zone.first == first,
                )
            )
            first = end

    def _hold(self, block: Block) -> None:
        if not block.references:
            self.places.unshelve(block)
        block.references += 1

    def _take(self, sequence: KvSequence) -> Block:
        """A place for one more block of the sequence; what was on it is gone."""
        sequence.reserved -= 1
        self._reserved -= 1
        block = self.places.take(sequence.domain)
        if block.state is _READY:
            self._unindex(block)
            self._events.append(BlockRemoved(hash=block.hash))
            self.places.discharge(block)
        elif block.state is _CONDEMNED:
            self._erase(block)
        block.state = _WORKING
        block.generation += 1
        block.references = 1
        self.places.begin(block, sequence.domain)
        sequence.blocks.append(block)
        return block

    def _unindex(self, block: Block) -> None:
        copies, stamped = self._resident[block.hash], self._stamped[block.stamp]
        del copies[block]
        if not copies:
            del self._resident[block.hash]
        del stamped[block]
        if not stamped:
            del self._stamped[block.stamp]

    def _places_of(self, tokens: array[int], answer_tokens: int) -> int:
        return -(-(len(tokens) + answer_tokens) // self.block_tokens)

    def _domain(self, terms: Terms) -> Domain:
        ticket = terms.ticket
        if ticket is None:
            return self.places.domain("", 0, None)
        floor = min(-(-ticket.floor_bytes // self.block_bytes), self.capacity)
        cap = None if ticket.cap_bytes is None else ticket.cap_bytes // self.block_bytes
        return self.places.domain(ticket.tenant, floor, cap)
