"""What a catalogue writes down: one entry a block, one holding an owner, one erasure a revocation.

Owns no behaviour beyond reading itself. Read `catalogue.py` next.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from trunkline.kv.arena import Slot
from trunkline.kv.records import BlockState, Manifest, Owner


@dataclass(slots=True, eq=False, kw_only=True)
class Erasure:
    """What one revocation condemned here, and how far the overwriting has come. A block that lies
    in two tiers counts twice.
    """

    condemned_blocks: int = 0
    condemned_bytes: int = 0
    erased_blocks: int = 0
    erased_bytes: int = 0
    aborted: int = 0
    """Stagings that can not be published any more; their blocks are among the condemned."""

    @property
    def is_done(self) -> bool:
        return self.erased_blocks == self.condemned_blocks

    def condemn(self, blocks: int, block_bytes: int) -> None:
        self.condemned_blocks += blocks
        self.condemned_bytes += blocks * block_bytes

    def erased(self, block_bytes: int) -> None:
        assert self.erased_blocks < self.condemned_blocks
        self.erased_blocks += 1
        self.erased_bytes += block_bytes


@dataclass(slots=True, eq=False)
class Holding:
    """The blocks of one owner."""

    owner: Owner
    entries: dict[bytes, Entry] = field(default_factory=dict[bytes, "Entry"], repr=False)
    host_count: int = 0
    copy_count: int = 0
    """In host memory, on disk, or on the way there: known without counting, as a revocation hides
    them in one step."""
    erasure: Erasure | None = None
    """Condemned, and who is told when they are wiped."""


@dataclass(slots=True, eq=False)
class Entry:
    """One block, in host memory, on disk or both."""

    manifest: Manifest
    holding: Holding
    saved_ms: float
    copies: int
    slot: Slot | None = None
    name: str | None = None
    """Of its file."""
    is_moving: bool = False
    """Being written to disk, from memory that is not the host tier's any more."""
    state: BlockState = BlockState.READY
    pins: int = 0
    erasure: Erasure | None = None
    """Condemned after it had left the index, while it was still pinned."""

    @property
    def key(self) -> bytes:
        return self.manifest.place.key

    @property
    def domain(self) -> str:
        return self.manifest.owner.domain

    @property
    def is_reachable(self) -> bool:
        return self.state is BlockState.READY and self.holding.erasure is None

    @property
    def fate(self) -> Erasure | None:
        """Who is told when its bytes are gone; None where they may just be overwritten."""
        return self.erasure or self.holding.erasure


@dataclass(slots=True, kw_only=True)
class Census:
    """Slots by what they are used for. With what is free and dirty they add up to all there are."""

    ready: int = 0
    """In the index, condemned ones that were not detached yet included."""
    hidden: int = 0
    """Those."""
    writing: int = 0
    """Promised to what is being filled here."""
    leaving: int = 0
    """Out of the index, still pinned."""
    moving: int = 0
    """Being written to disk."""
    staged: int = 0
    quarantined: int = 0
    wiping: int = 0
    pinned: int = 0
    """Slots with a pin, in the index or out of it."""


class Lower(Protocol):
    """The tier below, as the catalogue sees it: under the store's lock, without waiting."""

    def may_take(self, saved_ms: float) -> bool:
        """Whether a block that saves so much is worth writing, and can be now."""
        ...

    def write(self, entry: Entry, slot: Slot) -> bool:
        """Begin to write what is on the slot; `Catalogue.moved` is called when that has ended."""
        ...

    def remove(self, name: str, fate: Erasure | None) -> None:
        """The file is not referred to any more; a revocation is told when it is gone."""
        ...
