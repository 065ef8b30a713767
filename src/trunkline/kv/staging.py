"""Memory that is being filled from elsewhere: bounded, invisible, published once or given back.

A staging belongs to one writer. It verifies chunk by chunk as they land, while they are in the
processor's cache; `BlockStore.publish` looks at what was found and hashes only the rest. Must
never: be found by a look-up. Read `store.py` next.
"""

from __future__ import annotations

from collections.abc import Sequence

from trunkline.core.records import Instant
from trunkline.core.transfer import Reason
from trunkline.kv.arena import Slot
from trunkline.kv.digests import chunk_digest, shape_fault
from trunkline.kv.records import Layout, Manifest, Owner, Place


class Staging:
    """Room for a run of blocks, by index from 0. One thread at a time writes to one block."""

    def __init__(
        self,
        *,
        token: bytes,
        owner: Owner,
        places: Sequence[Place],
        slots: Sequence[Slot],
        layout: Layout,
        until: Instant,
        saved_ms: float = 0.0,
        copies: int = 0,
    ) -> None:
        assert len(places) == len(slots)
        self.token = token
        """Unguessable; for one `publish` or `abandon`."""
        self.owner = owner
        self.places = tuple(places)
        self.until = until
        self.saved_ms = saved_ms
        """What one of its blocks saves, and how many copies of it are elsewhere, for the order of
        eviction."""
        self.copies = copies
        self.slots = tuple(slots)
        """For the store."""
        self._layout = layout
        self._found: list[list[bytes | None]] = [[None] * len(layout.spans) for _ in slots]

    def buffer(self, index: int) -> memoryview:
        """All of a block, to be written to. Not after `publish` or `abandon`."""
        return self.slots[index].view

    def chunk(self, index: int, chunk_index: int) -> memoryview:
        """One chunk of it."""
        begin, end = self._layout.spans[chunk_index]
        return self.slots[index].view[begin:end]

    def verify(self, index: int, chunk_index: int, digest: bytes) -> bool:
        """Whether the chunk that just landed is what was announced. It counts as landed only then,
        and is not to be written to again.
        """
        found = chunk_digest(self.chunk(index, chunk_index))
        is_whole = found == digest
        self._found[index][chunk_index] = found if is_whole else None
        return is_whole

    def fault(self, index: int, manifest: Manifest) -> Reason | None:
        """Why the block may not be published as what the manifest says; None when it may."""
        if manifest.place != self.places[index]:
            return Reason.CHAIN
        if manifest.owner.ns != self.owner.ns:
            return Reason.NS
        theirs = (manifest.owner.subjects, manifest.owner.epochs)
        if theirs != (self.owner.subjects, self.owner.epochs):
            return Reason.EPOCH
        reason = shape_fault(manifest, self._layout)
        if reason is not None:
            return reason
        for chunk_index, digest in enumerate(manifest.digests):
            found = self._found[index][chunk_index]
            if found is None:
                found = chunk_digest(self.chunk(index, chunk_index))
            if found != digest:
                return Reason.DIGEST
        return None
