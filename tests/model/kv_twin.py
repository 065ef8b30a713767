"""What a block store promises, told as plainly as it can be: dicts, and scans over all of them.

The twin does not choose who gives way: it is told by the store's events, and says of each whether
that was allowed and needed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from trunkline.core.records import Tier
from trunkline.kv import Owner, Place
from trunkline.kv.records import Added, Gone, StoreEvent


@dataclass
class TwinBlock:
    place: Place
    owner: Owner
    pins: int = 0


@dataclass
class TwinPin:
    keys: list[bytes]
    until: float
    blocks: list[TwinBlock]


@dataclass
class TwinStaging:
    places: list[Place]
    owner: Owner
    until: float
    is_over: bool = False
    is_aside: bool = False
    is_condemned: bool = False


@dataclass
class Twin:
    """One store with host memory only."""

    host_blocks: int
    staging_blocks: int
    floors: dict[str, int] = field(default_factory=dict[str, int])
    caps: dict[str, int] = field(default_factory=dict[str, int])
    blocks: dict[bytes, TwinBlock] = field(default_factory=dict[bytes, TwinBlock])
    """In the index of host memory, hidden ones included."""
    hidden: set[bytes] = field(default_factory=set[bytes])
    leaving: list[TwinBlock] = field(default_factory=list[TwinBlock])
    pins: dict[bytes, TwinPin] = field(default_factory=dict[bytes, TwinPin])
    stagings: dict[bytes, TwinStaging] = field(default_factory=dict[bytes, TwinStaging])

    # -- questions -----------------------------------------------------------------------------

    def sees(self, key: bytes) -> TwinBlock | None:
        return None if key in self.hidden else self.blocks.get(key)

    def leading(self, owner: Owner, places: list[Place]) -> int:
        count = 0
        for place in places:
            block = self.sees(place.key)
            if block is None or block.owner.ns != owner.ns:
                break
            count += 1
        return count

    def held(self, domain: str) -> int:
        return sum(block.owner.domain == domain for block in self.blocks.values())

    def floor(self, domain: str) -> int:
        total = sum(self.floors.values())
        floor = self.floors.get(domain, 0)
        return floor if total <= self.host_blocks else floor * self.host_blocks // total

    def may_give(self, key: bytes, domain: str, parent: bytes) -> bool:
        """Whether that block may make room for one of `domain` behind `parent`."""
        block = self.blocks[key]
        if key == parent or block.pins or self.children(key):
            return False
        theirs = block.owner.domain
        if domain in self.caps and self.held(domain) + 1 > self.caps[domain]:
            return theirs == domain
        has_quota = theirs in self.floors or theirs in self.caps
        if theirs == domain or not has_quota:
            return True
        return self.held(theirs) - 1 >= self.floor(theirs)

    def has_room(self, domain: str) -> bool:
        is_below_cap = domain not in self.caps or self.held(domain) + 1 <= self.caps[domain]
        return is_below_cap and len(self.blocks) + len(self.leaving) < self.host_blocks

    def children(self, key: bytes) -> list[bytes]:
        return [other for other, block in self.blocks.items() if block.place.parent == key]

    def is_doomed(self, key: bytes) -> bool:
        """Hidden, or behind something hidden or gone."""
        block = self.blocks.get(key)
        while block is not None:
            if block.place.key in self.hidden:
                return True
            if not block.place.index:
                return False
            block = self.blocks.get(block.place.parent)
        return True

    def staged_count(self) -> int:
        return sum(len(one.places) for one in self.stagings.values() if not _is_set_aside(one))

    def aside_count(self) -> int:
        return sum(len(one.places) for one in self.stagings.values() if _is_set_aside(one))

    def pinned_count(self) -> int:
        held = [block for block in self.blocks.values() if block.pins]
        return len(held) + len(self.leaving)

    def check_closed(self) -> None:
        """Nothing is here that nothing could reach."""
        for block in self.blocks.values():
            if block.place.index:
                assert block.place.parent in self.blocks

    # -- what happens --------------------------------------------------------------------------

    def hear(self, events: list[StoreEvent], owners: dict[bytes, Owner], domain: str) -> None:
        """Believe the events of one step, in which room may have been made for `domain`."""
        for event in events:
            assert isinstance(event, Added | Gone)
            assert event.tier is Tier.HOST
            if isinstance(event, Gone):
                self.lose(event.key)
                continue
            parent = event.parent
            for number, key in enumerate(event.keys):
                place = Place(key=key, parent=parent, index=event.first_index + number)
                assert key not in self.blocks
                assert owners[key] == event.owner
                self.blocks[key] = TwinBlock(place, event.owner)
                parent = key

    def lose(self, key: bytes) -> None:
        block = self.blocks.pop(key)
        self.hidden.discard(key)
        if block.pins:
            self.leaving.append(block)

    def pin(self, token: bytes, keys: list[bytes], until: float) -> None:
        assert token not in self.pins
        self.pins[token] = TwinPin(keys, until, [self.blocks[key] for key in keys])
        for key in keys:
            self.blocks[key].pins += 1

    def renew(self, token: bytes, until: float) -> bool:
        pin = self.pins.get(token)
        if pin is None or any(self.sees(block.place.key) is not block for block in pin.blocks):
            return False
        pin.until = max(pin.until, until)
        return True

    def unpin(self, token: bytes) -> bool:
        pin = self.pins.pop(token, None)
        if pin is None:
            return False
        for key in pin.keys:
            self._let_go(key)
        return True

    def _let_go(self, key: bytes) -> None:
        for block in self.leaving:
            if block.place.key == key:
                block.pins -= 1
                if not block.pins:
                    self.leaving.remove(block)
                return
        self.blocks[key].pins -= 1

    def pass_time(self, now: float) -> None:
        for token in [token for token, pin in self.pins.items() if pin.until <= now]:
            self.unpin(token)
        for staging in self.stagings.values():
            if staging.until <= now and not staging.is_aside:
                staging.is_over = True

    def condemn(self, owner: Owner) -> None:
        self.hidden |= {key for key, block in self.blocks.items() if block.owner == owner}
        for staging in self.stagings.values():
            staging.is_condemned |= staging.owner == owner


def _is_set_aside(staging: TwinStaging) -> bool:
    return staging.is_over or staging.is_aside
