"""What is told of the blocks in a store: their tokens and salts, beside the store's events.

A store knows keys; who follows a worker needs the tokens. A note is made when a block is on its way
into the store, and goes when it is in no tier any more. Blocks that moved to disk are nowhere for a
while: their notes are kept so long. Must never: tell of a block that was not told to be there.
Read `worker/tiers.py` and `connectors/plan.py` for who asks.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from trunkline.core.records import Tier
from trunkline.kv.records import Added, Gone, Manifest, StoreEvent
from trunkline.ports.publisher import BlockEvent, BlockRemoved, RunStored

MAX_LATE = 1_024
"""Blocks that left host memory whose notes are kept, should they turn up on disk."""


@dataclass(slots=True, kw_only=True)
class Note:
    """What events say of a block beside its key."""

    tokens: array[int] = field(repr=False)
    salt: str | None = field(repr=False)
    begins_region: bool = False
    tiers: set[Tier] = field(default_factory=set[Tier])
    """Where it was told to be."""
    parent: bytes = b""
    awaited: int = 0
    """How many are on their way that may still bring it."""

    @property
    def is_idle(self) -> bool:
        return not (self.tiers or self.awaited)


class Notices:
    """The notes of one store. Belongs to the event loop."""

    def __init__(
        self, block_tokens: int, resident: Callable[[], Sequence[tuple[Tier, Manifest]]]
    ) -> None:
        """`resident` is asked for all that can be found where the store had to drop events."""
        self._resident = resident
        self._block_tokens = block_tokens
        self._notes: dict[bytes, Note] = {}
        self._late: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._notes)

    def is_told(self, key: bytes, tier: Tier) -> bool:
        """Whether the block is there, as far as events have said."""
        note = self._notes.get(key)
        return note is not None and tier in note.tiers

    def note(self, key: bytes, note: Note) -> bool:
        """A block goes into the store. False where a note of it is there already."""
        return self._notes.setdefault(key, note) is note

    def drop(self, key: bytes) -> None:
        """The store did not take it."""
        del self._notes[key]

    def expect(self, key: bytes, note: Note) -> None:
        """A block may come: until `settle` its note stays."""
        self._notes.setdefault(key, note).awaited += 1

    def settle(self, keys: Sequence[bytes]) -> None:
        """The events of what was expected have been taken: what did not come is forgotten."""
        for key in keys:
            note = self._notes[key]
            note.awaited -= 1
            assert note.awaited >= 0, "settled more often than expected"
            if note.is_idle:
                del self._notes[key]

    def take(self, events: Sequence[StoreEvent]) -> list[BlockEvent]:
        """What is to be told of what came to the store and went, in order."""
        told: list[BlockEvent] = []
        gone: list[bytes] = []
        run: list[bytes] = []
        tier = Tier.HOST
        for event in self._changes(events):
            if isinstance(event, Gone):
                self._tell(run, tier, told)
                run = []
                self._gone(event, told)
                gone.append(event.key)
                continue
            for number, key in enumerate(event.keys):
                note = self._notes.get(key)
                if note is None or event.tier in note.tiers:
                    continue
                note.parent = event.keys[number - 1] if number else event.parent
                is_next = bool(run) and run[-1] == note.parent and event.tier is tier
                if not is_next or note.begins_region:
                    self._tell(run, tier, told)
                    run, tier = [], event.tier
                run.append(key)
                note.tiers.add(event.tier)
        self._tell(run, tier, told)
        for key in gone:  # only now: a block may have come again
            self._let_go(key)
        return told

    def _let_go(self, key: bytes) -> None:
        note = self._notes.get(key)
        if note is None or not note.is_idle:
            return
        self._late[key] = None
        self._late.move_to_end(key)
        if len(self._late) > MAX_LATE:
            oldest, _ = self._late.popitem(last=False)
            late = self._notes.get(oldest)
            if late is not None and late.is_idle:
                del self._notes[oldest]

    def _changes(self, events: Sequence[StoreEvent]) -> Iterator[Added | Gone]:
        """Where the store had to drop events, the difference to what was told so far."""
        for event in events:
            if isinstance(event, Added | Gone):
                yield event
                continue
            resident = self._resident()
            there = {(manifest.place.key, tier) for tier, manifest in resident}
            for key, note in list(self._notes.items()):
                lost = [tier for tier in sorted(note.tiers) if (key, tier) not in there]
                yield from (Gone(key=key, tier=tier) for tier in lost)
            yield from (_came(tier, manifest) for tier, manifest in resident)

    def _gone(self, event: Gone, told: list[BlockEvent]) -> None:
        note = self._notes.get(event.key)
        if note is not None and event.tier in note.tiers:
            note.tiers.remove(event.tier)
            told.append(BlockRemoved(hash=event.key, tier=event.tier))

    def _tell(self, run: list[bytes], tier: Tier, told: list[BlockEvent]) -> None:
        if not run:
            return
        notes = [self._notes[key] for key in run]
        tokens: array[int] = array("I")
        for note in notes:
            tokens.extend(note.tokens)
        told.append(
            RunStored(
                hashes=tuple(run),
                parent=notes[0].parent or None,
                tokens=tokens,
                block_tokens=self._block_tokens,
                salt=notes[0].salt,
                begins_region=notes[0].begins_region,
                tier=tier,
            )
        )


def _came(tier: Tier, manifest: Manifest) -> Added:
    place = manifest.place
    return Added(
        keys=(place.key,),
        parent=place.parent,
        first_index=place.index,
        tier=tier,
        owner=manifest.owner,
    )
