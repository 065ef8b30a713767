"""Who gets which place in KV memory: clean ones first, then the least recently used of those who
have more than their floor.

    has      0 ......... floor ................. cap
    idle     only its own    anybody may take    nothing more is kept: it takes its own

What a domain has is what it keeps and what its running requests are writing. Its own requests may
always take its idle blocks. A floor protects what is there; it keeps nothing empty. Floors that sum
to more than the capacity count in proportion. A floor that rises after a place was promised to
somebody else yields to that promise.

Must never: give away a place that was promised to another sequence. Read `cache.py` next.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from trunkline.worker.blocks import Block, BlockState, Domain

# Looked up once: these are compared for each block.
_CLEAN = BlockState.CLEAN
_CONDEMNED = BlockState.CONDEMNED
_READY = BlockState.READY
_WORKING = BlockState.WORKING

MAX_DOMAINS = 1_024
"""Quota domains with blocks or requests here. Beyond it newcomers share the domain of requests
without a ticket, which has neither floor nor cap."""


class Places:
    """The places of one rank. Charges and promises are booked here and nowhere else."""

    def __init__(self, capacity: int, *, max_domains: int = MAX_DOMAINS) -> None:
        self.capacity = capacity
        self._max_domains = max_domains
        self._clean: deque[Block] = deque(Block(index) for index in range(capacity))
        self._dirty: deque[Block] = deque()
        """Condemned, held by nobody: to be overwritten, oldest first."""
        self._unnamed = Domain(name="")
        self._domains: dict[str, Domain] = {"": self._unnamed}
        self._floor_sum = 0
        self._idle_count = 0
        self._ticks = 0

    # -- domains -----------------------------------------------------------------------------------

    @property
    def domains(self) -> Iterable[Domain]:
        return self._domains.values()

    def domain(self, name: str, floor_blocks: int, cap_blocks: int | None) -> Domain:
        """The domain of that name, with its newest quota."""
        domain = self._domains.get(name)
        if domain is None:
            if len(self._domains) >= self._max_domains:
                return self._unnamed
            domain = self._domains[name] = Domain(name=name)
        if domain is not self._unnamed:
            self._floor_sum += floor_blocks - domain.floor_blocks
            domain.floor_blocks, domain.cap_blocks = floor_blocks, cap_blocks
        return domain

    def floor_of(self, domain: Domain) -> int:
        """In blocks, in proportion where all floors are more than there is."""
        if self._floor_sum <= self.capacity:
            return domain.floor_blocks
        return domain.floor_blocks * self.capacity // self._floor_sum

    def is_full(self, domain: Domain) -> bool:
        """Whether it may keep no further block but in place of one of its own."""
        return domain.cap_blocks is not None and domain.held >= domain.cap_blocks

    def forget_if_empty(self, domain: Domain) -> None:
        if domain is not self._unnamed and not (domain.held or domain.working or domain.sequences):
            assert not domain.reserved
            if self._domains.pop(domain.name, None) is not None:
                self._floor_sum -= domain.floor_blocks

    # -- promises ----------------------------------------------------------------------------------

    @property
    def free_count(self) -> int:
        """Places that no sequence holds."""
        return len(self._clean) + len(self._dirty) + self._idle_count

    @property
    def dirty_count(self) -> int:
        return len(self._dirty)

    def fits(self, domain: Domain, needed: int, hits: Iterable[Block] = ()) -> bool:
        """Whether `needed` more places can be promised to a domain that binds `hits` as well."""
        used = Counter(block.domain for block in hits if not block.references)
        pool = len(self._clean) + len(self._dirty)
        owed = 0
        for other in self._domains.values():
            anybodys, own = self._shares(other, used[other])
            pool += anybodys
            promised = other.reserved + (needed if other is domain else 0)
            owed += max(0, promised - own)
        return owed <= pool

    def never_fits(self, domain: Domain, needed: int) -> bool:
        """Whether that many places are not there beside what others' floors protect."""
        others = (other for other in self._domains.values() if other is not domain)
        kept = sum(min(self.floor_of(other), other.held) for other in others)
        return needed > self.capacity - kept

    def _shares(self, domain: Domain, used: int = 0) -> tuple[int, int]:
        """Its idle blocks: how many anybody may take, and how many only itself."""
        idle = len(domain.idle) - used
        has = domain.held + domain.working
        anybodys = min(idle, max(0, has - self.floor_of(domain)))
        return anybodys, idle - anybodys

    # -- places ------------------------------------------------------------------------------------

    def take(self, domain: Domain) -> Block:
        """A place for a sequence of this domain, one of those promised to it. An idle block comes
        READY as it is: the caller takes it out of the index and has it `discharge`d.
        """
        assert domain.reserved > 0, "a sequence outgrew its reservation"
        domain.reserved -= 1
        if self.is_full(domain) and domain.idle:
            return self.unshelve(_oldest(domain))
        if self._clean:
            return self._clean.popleft()
        if self._dirty:
            return self._dirty.popleft()
        return self.unshelve(self._victim(domain))

    def _victim(self, domain: Domain) -> Block:
        if len(self._domains) == 1:
            return _oldest(domain)
        heads = [_oldest(other) for other in self._domains.values() if other.idle]
        assert heads, "a promised place is not there"
        above = [block for block in heads if self._is_above_floor(block)]
        own = [block for block in heads if block.domain is domain]
        return min(above or own or heads, key=lambda block: block.idle_since)

    def _is_above_floor(self, block: Block) -> bool:
        domain = block.domain
        assert domain is not None
        return domain.held + domain.working > self.floor_of(domain)

    def unshelve(self, block: Block) -> Block:
        """An idle block gets a user, or is no longer kept."""
        assert block.domain is not None
        del block.domain.idle[block.index]
        self._idle_count -= 1
        return block

    def shelve(self, block: Block) -> None:
        """Its last user is gone: a READY block stays findable, any other is to be overwritten."""
        assert not block.references
        domain = block.domain
        assert domain is not None
        if block.state is _READY:
            self._ticks += 1
            block.idle_since = self._ticks
            domain.idle[block.index] = block
            self._idle_count += 1
        else:
            block.state = _CONDEMNED
            domain.working -= 1
            block.domain = None
            self._dirty.append(block)

    def next_dirty(self) -> Block | None:
        return self._dirty.popleft() if self._dirty else None

    def put_clean(self, block: Block) -> None:
        assert block.state is _CLEAN
        self._clean.append(block)

    def begin(self, block: Block, domain: Domain) -> None:
        """A sequence of this domain writes the block now."""
        assert block.domain is None
        block.domain = domain
        domain.working += 1

    def charge(self, block: Block) -> None:
        """What was written is kept: READY."""
        assert block.state is _WORKING
        assert block.domain is not None
        block.state = _READY
        block.domain.working -= 1
        block.domain.held += 1

    def discharge(self, block: Block) -> None:
        """Not READY any more: still held by sequences, to be overwritten, or just to be used."""
        domain = block.domain
        assert domain is not None
        assert block.state is _READY
        domain.held -= 1
        block.state = _CONDEMNED
        if block.references:
            domain.working += 1
        else:
            block.domain = None
            self.forget_if_empty(domain)

    def condemn(self, block: Block) -> None:
        """Discharge, and overwrite it as soon as nobody holds it."""
        if not block.references:
            self.unshelve(block)
        self.discharge(block)
        if not block.references:
            self._dirty.append(block)


def _oldest(domain: Domain) -> Block:
    return next(iter(domain.idle.values()))
