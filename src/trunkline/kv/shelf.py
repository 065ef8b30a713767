"""Whose blocks give way in one tier: quotas of domains over the order of an evictor.

    has      0 ......... floor ................. cap
    gives    only to itself     to anybody       nothing more is kept: it takes its own

Domains without a quota share one order of eviction. A domain with one has an order of its own, so
that its worst block is known without looking at others'. Between those, the least recently used of
the worst gives way: values are compared inside an order only. Floors that sum to more than the
capacity count in proportion. Must never: name a block for another domain that leaves its own below
its floor. Not safe for threads by itself. Read `catalogue.py` next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from trunkline.core.eviction import Evictor

MAX_QUOTAS = 1_024
"""Domains with a quota; a further one has none."""


@dataclass(slots=True, eq=False)
class _Line:
    """One resident block."""

    parent: bytes
    domain: _Domain
    saved_ms: float
    copies: int
    used_at: int
    holds: int = 0
    guarded: _Line | None = None
    """The block before it, which it holds because that is in another order and would not be known
    there to have a child."""


@dataclass(slots=True, eq=False)
class _Domain:
    name: str
    order: Evictor
    floor_bytes: int = 0
    cap_bytes: int | None = None
    held_bytes: int = 0
    """Resident, or promised to what is being written."""
    keys: dict[bytes, None] = field(default_factory=dict[bytes, None])


class Shelf:
    """The resident blocks of one tier. The owner tells it of each that comes, is used, or goes."""

    def __init__(
        self, make_order: Callable[[], Evictor], *, capacity_blocks: int, block_bytes: int
    ) -> None:
        self._make_order = make_order
        self._block_bytes = block_bytes
        self._capacity_bytes = capacity_blocks * block_bytes
        self._common = make_order()
        self._domains: dict[str, _Domain] = {}
        self._quotas: dict[str, _Domain] = {}
        self._floor_sum_bytes = 0
        self._lines: dict[bytes, _Line] = {}
        self._ticks = 0

    def held_bytes(self, domain: str) -> int:
        known = self._domains.get(domain)
        return known.held_bytes if known else 0

    def set_quota(self, name: str, *, floor_bytes: int, cap_bytes: int | None) -> bool:
        """The newest quota of a domain; False where too many have one already."""
        assert floor_bytes >= 0
        assert cap_bytes is None or cap_bytes >= floor_bytes
        domain = self._domain(name)
        has_quota = floor_bytes > 0 or cap_bytes is not None
        if has_quota and name not in self._quotas and len(self._quotas) >= MAX_QUOTAS:
            self._forget_if_empty(domain)
            return False
        self._floor_sum_bytes += floor_bytes - domain.floor_bytes
        domain.floor_bytes, domain.cap_bytes = floor_bytes, cap_bytes
        if has_quota is not (name in self._quotas):
            self._move(domain, self._make_order() if has_quota else self._common)
            if has_quota:
                self._quotas[name] = domain
            else:
                del self._quotas[name]
                self._forget_if_empty(domain)
        return True

    def charge(self, name: str) -> None:
        """Room is promised to a block of this domain."""
        self._domain(name).held_bytes += self._block_bytes

    def discharge(self, name: str) -> None:
        domain = self._domains[name]
        assert domain.held_bytes >= self._block_bytes
        domain.held_bytes -= self._block_bytes
        self._forget_if_empty(domain)

    def has_to_give(self, name: str) -> bool:
        """Whether one block more would be over its cap."""
        domain = self._domains.get(name)
        if domain is None:
            return False
        more_bytes = domain.held_bytes + self._block_bytes
        return domain.cap_bytes is not None and more_bytes > domain.cap_bytes

    # -- blocks --------------------------------------------------------------------------------

    def add(
        self,
        key: bytes,
        parent: bytes,
        name: str,
        *,
        saved_ms: float = 0.0,
        copies: int = 0,
    ) -> None:
        """A block that was charged is resident."""
        assert key not in self._lines
        domain = self._domains[name]
        line = _Line(parent, domain, saved_ms, copies, self._tick())
        self._lines[key] = line
        domain.keys[key] = None
        self._into_order(key, line)
        self._guard(line)

    def remove(self, key: bytes) -> None:
        """It is not resident any more, held or not. Its charge goes with it."""
        line = self._lines[key]
        self._unguard(line)
        self._out_of_order(key, line)
        del self._lines[key]
        del line.domain.keys[key]
        self.discharge(line.domain.name)

    def touch(self, keys: Sequence[bytes]) -> None:
        """A prompt used this leading run, root first."""
        tick = self._tick()
        run: list[bytes] = []
        order: Evictor | None = None
        for key in keys:
            line = self._lines[key]
            line.used_at = tick
            if order is not None and line.domain.order is not order:
                order.touch(run)
                run = []
            order = line.domain.order
            run.append(key)
        if order is not None:
            order.touch(run)

    def hold(self, key: bytes) -> None:
        line = self._lines[key]
        line.holds += 1
        line.domain.order.hold(key)

    def release(self, key: bytes) -> None:
        line = self._lines[key]
        assert line.holds > 0
        line.holds -= 1
        line.domain.order.release(key)

    def set_copies(self, key: bytes, copies: int) -> None:
        line = self._lines.get(key)
        if line is not None:
            line.copies = copies
            line.domain.order.set_copies(key, copies)

    # -- victims -------------------------------------------------------------------------------

    def own_victim(self, name: str) -> bytes | None:
        """What this domain gives for itself, where it has a quota."""
        domain = self._quotas.get(name)
        return domain.order.victim() if domain else None

    def victim(self, name: str) -> bytes | None:
        """What gives way to a block of this domain; None where nothing may."""
        over: list[bytes] = []
        found: list[bytes] = []
        common = self._common.victim()
        if common is not None:
            found.append(common)
        for domain in self._quotas.values():
            if domain.name != name and not self._may_give(domain):
                continue
            key = domain.order.victim()
            if key is None:
                continue
            is_over = domain.cap_bytes is not None and domain.held_bytes > domain.cap_bytes
            (over if is_over else found).append(key)
        return min(over or found, key=lambda key: self._lines[key].used_at, default=None)

    def floor_of(self, name: str) -> int:
        """In bytes of whole blocks, in proportion where all floors are more than there is: rounded
        up, they could together protect more than there is.
        """
        domain = self._quotas.get(name)
        if domain is None:
            return 0
        floor_bytes = domain.floor_bytes
        if self._floor_sum_bytes > self._capacity_bytes:
            floor_bytes = floor_bytes * self._capacity_bytes // self._floor_sum_bytes
        return floor_bytes - floor_bytes % self._block_bytes

    def _may_give(self, domain: _Domain) -> bool:
        return domain.held_bytes - self._block_bytes >= self.floor_of(domain.name)

    # -- orders --------------------------------------------------------------------------------

    def _into_order(self, key: bytes, line: _Line) -> None:
        order = line.domain.order
        order.add(
            key,
            line.parent,
            size_bytes=self._block_bytes,
            saved_ms=line.saved_ms,
            copies=line.copies,
        )
        for _ in range(line.holds):
            order.hold(key)

    def _out_of_order(self, key: bytes, line: _Line) -> None:
        line.domain.order.remove(key)

    def _guard(self, line: _Line) -> None:
        parent = self._lines.get(line.parent)
        if parent is not None and parent.domain.order is not line.domain.order:
            line.guarded = parent
            self.hold(line.parent)

    def _unguard(self, line: _Line) -> None:
        if line.guarded is not None and self._lines.get(line.parent) is line.guarded:
            self.release(line.parent)
        line.guarded = None

    def _move(self, domain: _Domain, order: Evictor) -> None:
        """Into another order, parents first, which is how they came."""
        if domain.keys:
            for line in self._lines.values():
                self._unguard(line)
        for key in domain.keys:
            self._out_of_order(key, self._lines[key])
        domain.order = order
        for key in domain.keys:
            self._into_order(key, self._lines[key])
        if domain.keys:
            for line in self._lines.values():
                self._guard(line)

    def _tick(self) -> int:
        self._ticks += 1
        return self._ticks

    def _domain(self, name: str) -> _Domain:
        domain = self._domains.get(name)
        if domain is None:
            domain = self._domains[name] = _Domain(name, self._common)
        return domain

    def _forget_if_empty(self, domain: _Domain) -> None:
        if not domain.held_bytes and domain.name not in self._quotas:
            self._domains.pop(domain.name, None)
