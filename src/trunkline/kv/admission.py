"""How a block comes in: the checks and the insert, in one step under the store's lock.

The only module that calls `Catalogue.keep`. What it is given was hashed before; what it asks is
whether the block may be here now: the host's judge, a revocation that came meanwhile, the block
before it, room, and whether other bytes are here under the same name. Must never: wait. Read
`store.py` next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trunkline.core.records import Tier
from trunkline.core.transfer import Reason
from trunkline.kv.arena import Slot
from trunkline.kv.berths import Berth, Berths
from trunkline.kv.catalogue import Catalogue
from trunkline.kv.entries import Entry, Erasure
from trunkline.kv.records import Judge, Kept, Layout, Manifest, Owner, Place, Published


@dataclass(slots=True, eq=False)
class _Writing:
    """A slot that is being filled for one block."""

    owner: Owner
    erasure: Erasure | None = None


@dataclass(frozen=True, slots=True)
class Present:
    """Under this name there is a block already; nothing came in."""

    manifest: Manifest


class Admission:
    """What comes into one store."""

    def __init__(self, layout: Layout, catalogue: Catalogue, berths: Berths, judge: Judge) -> None:
        self._layout = layout
        self._catalogue = catalogue
        self._berths = berths
        self._judge = judge
        self._writings: dict[int, _Writing] = {}
        """By the index of the slot."""

    def refusal(self, place: Place, owner: Owner) -> Reason | None:
        """Why no block of that place may come in now."""
        reason = self._judge.fault(owner)
        if reason is None and place.index and self._catalogue.find(place.parent) is None:
            return Reason.CHAIN
        return reason

    # -- one block, filled here ----------------------------------------------------------------

    def reserve(self, place: Place, owner: Owner) -> Slot | Present | Reason:
        """A slot to fill for this block."""
        reason = self.refusal(place, owner)
        if reason is not None:
            return reason
        present = self._catalogue.find(place.key)
        if present is not None and present.slot is not None:
            return Present(present.manifest)
        if not self._has_room(place, owner):
            return Reason.FULL
        self._catalogue.census.writing += 1
        slot = self._catalogue.arena.take()
        self._writings[slot.index] = _Writing(owner)
        return slot

    def settle(
        self, manifest: Manifest, slot: Slot, *, saved_ms: float, copies: int
    ) -> Kept | Present | Reason:
        """The slot was filled with what the manifest says."""
        erasure = self._end_writing(slot)
        place, owner = manifest.place, manifest.owner
        reason = Reason.EPOCH if erasure is not None else self.refusal(place, owner)
        present = self._catalogue.find(place.key)
        if reason is None and (present is None or _is_below(present, manifest)):
            self._catalogue.keep(manifest, slot, saved_ms=saved_ms, copies=copies)
            self._catalogue.news.added([manifest], Tier.HOST)
            return Kept(manifest=manifest, is_new=True)
        self._give_up(slot, owner, erasure, is_soiled=reason is Reason.EPOCH)
        if reason is not None:
            return reason
        assert present is not None
        return Present(present.manifest)

    def cancel(self, slot: Slot, owner: Owner) -> None:
        """The slot was not filled after all."""
        self._give_up(slot, owner, self._end_writing(slot))

    def _end_writing(self, slot: Slot) -> Erasure | None:
        self._catalogue.census.writing -= 1
        return self._writings.pop(slot.index).erasure

    def _give_up(
        self, slot: Slot, owner: Owner, erasure: Erasure | None, *, is_soiled: bool = False
    ) -> None:
        self._catalogue.host.discharge(owner.domain)
        self._catalogue.vacate(slot, owner, erasure, is_soiled=is_soiled)

    def _has_room(self, place: Place, owner: Owner) -> bool:
        """Room that is charged for, and the name free of what nobody can find."""
        if not self._catalogue.make_room(owner.domain, place.parent):
            return False
        self._catalogue.replace_condemned(place.key)
        self._catalogue.host.charge(owner.domain)
        return True

    # -- a run, filled from elsewhere ----------------------------------------------------------

    def admit(
        self, berth: Berth, manifests: Sequence[Manifest]
    ) -> tuple[Published, Manifest | None]:
        """Keep the blocks of a staging that were verified, as far as they may come in; and which
        block of here has other bytes, where one has.
        """
        staging, catalogue = berth.staging, self._catalogue
        taken: set[int] = set()
        fresh: list[Manifest] = []
        reason: Reason | None = None
        alarm: Manifest | None = None
        count = 0
        for index, manifest in enumerate(manifests):
            reason = Reason.EPOCH if berth.erasure is not None else None
            reason = reason or self.refusal(manifest.place, staging.owner)
            if reason is not None:
                break
            present = catalogue.find(manifest.place.key)
            if present is not None and present.manifest.digests != manifest.digests:
                alarm, reason = present.manifest, Reason.CONFLICT
                break
            if present is None or present.slot is None:
                if not self._has_room(manifest.place, staging.owner):
                    reason = Reason.FULL
                    break
                slot = staging.slots[index]
                kept = manifest_of(
                    self._layout, manifest.place, staging.owner, slot, manifest.digests
                )
                catalogue.census.staged -= 1
                catalogue.keep(kept, slot, saved_ms=staging.saved_ms, copies=staging.copies)
                taken.add(index)
                fresh.append(kept)
            count += 1
        catalogue.news.added(fresh, Tier.HOST)
        self._berths.close(berth, taken)
        return Published(count=count, reason=reason), alarm

    def condemn(self, is_stale: Callable[[Owner], bool], erasure: Erasure) -> None:
        """What is being filled for a stale owner does not come in."""
        for writing in self._writings.values():
            if writing.erasure is None and is_stale(writing.owner):
                writing.erasure = erasure
                erasure.condemn(1, self._layout.block_bytes)


def _is_below(present: Entry, manifest: Manifest) -> bool:
    """The same block, and host memory has it no more."""
    return present.slot is None and present.manifest.digests == manifest.digests


def manifest_of(
    layout: Layout, place: Place, owner: Owner, slot: Slot, digests: tuple[bytes, ...]
) -> Manifest:
    """What is on a slot that was filled."""
    return Manifest(
        place=place,
        owner=owner,
        generation=slot.generation,
        layout_digest=layout.digest,
        chunk_bytes=layout.chunk_bytes,
        digests=digests,
        size_bytes=layout.block_bytes,
    )
