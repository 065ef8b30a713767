"""The records of the pure index: blocks, engine hashes, slots, namespaces. They own no rules.

Must never: decide anything. Read `_fallback.py` next, which moves them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator

from trunkline.native._arguments import TIERS

# How a slot holds a block, as bits; and which of them count in each view of `_closure.py`.
DEVICE, NEAR, RESIDENT, PREDICTED = 1, 2, 4, 8  # near: on the device or in host memory
VIEW_HOLDS = (DEVICE, RESIDENT, NEAR | PREDICTED)

NOBODY = -1
"""In place of a namespace: the block's own was retired, and the block is only remembered so that
what is chained after it is told from an orphan.
"""


class Entry:
    """One distinct block: its place in the chain and, as bit masks over slots, who holds it."""

    __slots__ = ("device", "key", "namespace_id", "near", "parent", "predicted", "resident")

    def __init__(self, key: bytes, namespace_id: int, parent: bytes | None) -> None:
        self.key = key
        self.namespace_id = namespace_id
        self.parent = parent  # None for the first block of a chain
        self.device = 0
        self.near = 0
        self.resident = 0
        self.predicted = 0

    def holds(self, slot: int) -> int:
        return (
            (self.device >> slot & 1) * DEVICE
            | (self.near >> slot & 1) * NEAR
            | (self.resident >> slot & 1) * RESIDENT
            | (self.predicted >> slot & 1) * PREDICTED
        )

    def set_holds(self, slot: int, holds: int) -> None:
        bit = 1 << slot
        self.device = self.device | bit if holds & DEVICE else self.device & ~bit
        self.near = self.near | bit if holds & NEAR else self.near & ~bit
        self.resident = self.resident | bit if holds & RESIDENT else self.resident & ~bit
        self.predicted = self.predicted | bit if holds & PREDICTED else self.predicted & ~bit


class Held:
    """One engine hash of a slot: the block it names, and how many copies lie in each tier."""

    __slots__ = ("copies", "entry")

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.copies = [0] * TIERS

    def holds(self) -> int:
        device, host, disk, shared = self.copies
        holds = DEVICE | NEAR | RESIDENT if device else NEAR | RESIDENT if host else 0
        return holds or (RESIDENT if disk or shared else 0)


class SlotState:
    """One worker's side: engine hashes, and predictions by age."""

    __slots__ = (
        "aliases",
        "held",
        "last_expires_ms",
        "next_batch",
        "predicted",
        "queue",
        "queued_count",
        "tier_counts",
    )

    def __init__(self) -> None:
        self.held: dict[int, Held] = {}
        self.tier_counts = [0] * TIERS
        # Only blocks that several engine hashes name (an engine may key on more than we do):
        # how many of those hashes have copies on the device, near, and at all.
        self.aliases: dict[Entry, list[int]] = {}
        self.predicted: dict[bytes, int] = {}  # key -> the latest batch that named it
        self.queue: deque[tuple[float, int, list[bytes]]] = deque()  # expiry, batch, keys
        self.queued_count = 0
        self.next_batch = 0
        self.last_expires_ms = -math.inf

    def note_gain(self, entry: Entry, before: int, gained: int, *, is_new_hash: bool) -> None:
        """Copies of one hash came: count them where several hashes name the block."""
        if is_new_hash and before & RESIDENT:
            first = [int(bool(before & hold)) for hold in (DEVICE, NEAR, RESIDENT)]
            self.aliases.setdefault(entry, first)
        alias = self.aliases.get(entry)
        if alias is not None:
            for place, hold in enumerate((DEVICE, NEAR, RESIDENT)):
                alias[place] += bool(gained & hold)

    def note_loss(self, entry: Entry, lost: int) -> int:
        """Copies of one hash are gone; what of that no other hash of the block has still."""
        alias = self.aliases.get(entry)
        if alias is None:
            return lost
        for place, hold in enumerate((DEVICE, NEAR, RESIDENT)):
            if lost & hold:
                alias[place] -= 1
                if alias[place]:
                    lost &= ~hold
        if alias[2] == 1:
            del self.aliases[entry]
        return lost

    def drop_stale_queued(self) -> None:
        """Keep the queue in proportion to what is expected, however often it is predicted anew."""
        queue: deque[tuple[float, int, list[bytes]]] = deque()
        self.queued_count = 0
        for expires_ms, batch, keys in self.queue:
            current = [key for key in keys if self.predicted.get(key) == batch]
            if current:
                queue.append((expires_ms, batch, current))
                self.queued_count += len(current)
        self.queue = queue


class NamespaceState:
    """The secrets of one namespace, and its blocks by key in the order they were made."""

    __slots__ = ("entries", "is_retired", "key", "root")

    def __init__(self, key: bytes, root: bytes) -> None:
        self.key = key
        self.root = root
        self.entries: dict[bytes, Entry] = {}
        self.is_retired = False

    def retire(self) -> None:
        self.key = self.root = b""
        self.is_retired = True


def slots_in(mask: int) -> Iterator[int]:
    """The slots whose bits are set, lowest first."""
    while mask:
        low_bit = mask & -mask
        yield low_bit.bit_length() - 1
        mask ^= low_bit
