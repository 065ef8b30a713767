"""What a store says about itself: bytes by what they are, and what happened so far.

The bytes add up to all memory of the store, always. Read `store.py` next.
"""

from __future__ import annotations

from dataclasses import dataclass

from trunkline.kv.catalogue import Catalogue
from trunkline.kv.pins import PinTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Bytes by what they are, and what happened so far."""

    total_bytes: int
    """All memory of the store: the sum of the next nine."""
    host_bytes: int
    """Blocks that can be found."""
    hidden_bytes: int
    """Condemned blocks that are still in the index."""
    writing_bytes: int
    leaving_bytes: int
    """Out of the index, still pinned."""
    moving_bytes: int
    """On their way to the disk."""
    staged_bytes: int
    quarantined_bytes: int
    dirty_bytes: int
    """To be wiped, or just being wiped."""
    free_bytes: int
    pinned_bytes: int
    disk_bytes: int
    """Blocks on disk, without what sealing adds."""
    pins: int
    evicted: int
    conflicts: int
    """Integrity alarms: a block that is here came again with other bytes."""
    spoilt: int
    """Blocks whose bytes were found damaged."""
    expired_pins: int
    void_tokens: int
    """Tokens that were given back twice, too late, or never given out."""


@dataclass(slots=True, kw_only=True)
class Counters:
    """What happened so far."""

    conflicts: int = 0
    spoilt: int = 0
    void_tokens: int = 0


def figures_of(catalogue: Catalogue, pins: PinTable, counters: Counters) -> Figures:
    """Under the store's lock."""
    census, arena = catalogue.census, catalogue.arena
    size_bytes = arena.slot_bytes
    return Figures(
        total_bytes=arena.slot_count * size_bytes,
        host_bytes=(census.ready - census.hidden) * size_bytes,
        hidden_bytes=census.hidden * size_bytes,
        writing_bytes=census.writing * size_bytes,
        leaving_bytes=census.leaving * size_bytes,
        moving_bytes=census.moving * size_bytes,
        staged_bytes=census.staged * size_bytes,
        quarantined_bytes=census.quarantined * size_bytes,
        dirty_bytes=(arena.dirty_count + census.wiping) * size_bytes,
        free_bytes=arena.free_count * size_bytes,
        pinned_bytes=census.pinned * size_bytes,
        disk_bytes=catalogue.disk_count * size_bytes,
        pins=len(pins),
        evicted=catalogue.evicted_count,
        conflicts=counters.conflicts,
        spoilt=counters.spoilt,
        expired_pins=pins.expired_count,
        void_tokens=counters.void_tokens,
    )
