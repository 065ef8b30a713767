"""How a block comes up from disk into host memory: read and verified outside the lock.

Must never: believe a file. What is missing, short, altered or another block's is a miss, and its
entry goes in the same step. Read `disk.py` for the file, `admission.py` for the way in.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from trunkline.core.records import Instant
from trunkline.core.transfer import Reason
from trunkline.kv.admission import Admission, Present
from trunkline.kv.arena import Slot
from trunkline.kv.catalogue import Catalogue
from trunkline.kv.digests import fault_of
from trunkline.kv.disk import DiskTier
from trunkline.kv.entries import Entry
from trunkline.kv.figures import Counters
from trunkline.kv.records import Layout, Manifest


class Loader:
    """Brings blocks of one store up."""

    def __init__(
        self,
        layout: Layout,
        catalogue: Catalogue,
        admission: Admission,
        disk: DiskTier,
        counters: Counters,
        lock: threading.Lock,
        clean: Callable[[Slot], None],
    ) -> None:
        """`lock` is the store's, and `clean` makes a slot that was just taken fit for use."""
        self._layout = layout
        self._catalogue = catalogue
        self._admission = admission
        self._disk = disk
        self._counters = counters
        self._lock = lock
        self._clean = clean

    def load(self, key: bytes, until: Instant) -> Reason | None:
        """None when the block is in host memory; else why it is not. Waits until then at most."""
        with self._lock:
            entry = self._catalogue.find(key)
            if entry is None:
                return Reason.MISS
            name, manifest = entry.name, entry.manifest
            if entry.slot is not None:
                return None
            if name is None:
                return Reason.TIER
            # Making room may push blocks down: not at the cost of the one that comes up.
            self._catalogue.disk.touch([key])
            self._catalogue.disk.hold(key)
            slot = self._admission.reserve(manifest.place, manifest.owner)
            if isinstance(slot, Reason):
                self._release(entry, name)
                return slot
        assert not isinstance(slot, Present), "it was not in memory in the same step"
        self._clean(slot)
        reason = self._fetch(name, manifest, slot, until)
        with self._lock:
            self._release(entry, name)
            if reason is None:
                fresh = replace(manifest, generation=slot.generation)
                outcome = self._admission.settle(
                    fresh, slot, saved_ms=entry.saved_ms, copies=entry.copies
                )
                return outcome if isinstance(outcome, Reason) else None
            self._admission.cancel(slot, manifest.owner)
            if reason is not Reason.TIER:
                # The file is not what the index says: the entry goes with it.
                self._counters.spoilt += reason is not Reason.MISS
                if entry.name == name:
                    self._catalogue.drop_file(entry)
        return reason

    def _release(self, entry: Entry, name: str) -> None:
        if entry.name == name:
            self._catalogue.disk.release(entry.key)

    def _fetch(self, name: str, manifest: Manifest, slot: Slot, until: Instant) -> Reason | None:
        data = self._disk.read(name, manifest, until)
        if isinstance(data, Reason):
            return data
        if len(data) != manifest.size_bytes:
            return Reason.LENGTH
        slot.view[:] = data
        return fault_of(slot.view, manifest, self._layout)
