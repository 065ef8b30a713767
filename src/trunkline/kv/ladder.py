"""How the catalogue reaches the disk tier: names for files, and what is told when one is done.

Names are keyed digests that are used once: who lists the folder learns nothing about who has what.
Must never: wait. Read `disk.py` next.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from trunkline.kv.arena import Slot
from trunkline.kv.disk import DiskTier
from trunkline.kv.entries import Entry, Erasure

NAME_KEY_BYTES = 32


class Ladder:
    """`entries.Lower` over a `DiskTier`."""

    def __init__(
        self,
        disk: DiskTier,
        *,
        name_key: bytes,
        moved: Callable[[Entry, Slot, str, bool], None],
        erased: Callable[[Erasure], None],
    ) -> None:
        """`moved` and `erased` are called in the tier's thread, under no lock."""
        assert len(name_key) == NAME_KEY_BYTES
        self._disk = disk
        self._name_key = name_key
        self._moved = moved
        self._erased = erased
        self._named_count = 0

    def may_take(self, saved_ms: float) -> bool:
        return saved_ms >= self._disk.options.min_saved_ms and self._disk.is_usable

    def write(self, entry: Entry, slot: Slot) -> bool:
        name = self._name(entry)
        return self._disk.write(
            name,
            entry.manifest,
            slot.view,
            lambda is_written: self._moved(entry, slot, name, is_written),
        )

    def remove(self, name: str, fate: Erasure | None) -> None:
        self._disk.remove(name, None if fate is None else lambda: self._erased(fate))

    def _name(self, entry: Entry) -> str:
        self._named_count += 1
        name = hashlib.blake2b(key=self._name_key, person=b"tl-kv-file", digest_size=32)
        name.update(self._named_count.to_bytes(8, "big"))
        name.update(entry.manifest.owner.ns)
        name.update(entry.key)
        return name.hexdigest()
