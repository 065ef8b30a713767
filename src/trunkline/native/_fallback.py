"""The Python twins of the compiled functions: the reference, and what runs without a compiler.

Their docstrings are the contract of both. Wrong types raise TypeError, wrong values and buffers
ValueError. Must never: answer otherwise than the compiled ones; `tests/model/test_native_twins.py`.
Read `_cells.py` for the records, `_closure.py` for how `match` avoids a walk, and
`core/directory.py`, the only user.
"""

from __future__ import annotations

import heapq
from array import array
from collections import deque

from trunkline.native._arguments import (
    check_block_tokens,
    check_engine_hash,
    check_secrets,
    check_tier,
    items_of,
    keys_of,
)
from trunkline.native._cells import (
    DEVICE,
    NEAR,
    NOBODY,
    PREDICTED,
    RESIDENT,
    VIEW_HOLDS,
    Entry,
    Held,
    NamespaceState,
    SlotState,
    slots_in,
)
from trunkline.native._chain import chain_keys
from trunkline.native._closure import VIEWS, Children, Orphans, closed_depths, walked_depths
from trunkline.native.codes import CONFLICT, FULL, RETIRED, UNKNOWN_PARENT

__all__ = ["MAX_COPIES", "BlockIndex", "chain_keys"]

MAX_COPIES = 65_535
"""Copies of one block in one tier are counted up to here; more leave the count where it is."""

_MAX_BLOCKS = 1 << 31
_MAX_SLOTS = 65_535
_QUEUE_SLACK = 1_024  # queued predictions that may be stale before they are looked through


class BlockIndex:
    """Block key -> which slots hold it, in which tier, or are expected to soon.

    Everything in it is a hint. Slots are dense worker numbers. `store` and `remove` speak the
    engine's own 64-bit hashes and count copies, since an engine announces each physical copy;
    `match` and the predictions speak keys: whole chains of `chain_keys`, from the root on.
    """

    def __init__(self, max_blocks: int, seed: int = 0) -> None:
        """`max_blocks` bounds the number of distinct blocks, 1 to 2**31; else ValueError.

        `seed` (u64) keys the compiled tables, so that nobody outside can choose engine hashes that
        fall together; it changes no answer.
        """
        if not 0 <= seed < 1 << 64:
            raise ValueError("a seed is outside 0..2**64-1")
        if not 1 <= max_blocks <= _MAX_BLOCKS:
            raise ValueError(f"max_blocks is {max_blocks}, allowed are 1 to {_MAX_BLOCKS}")
        self._max_blocks = max_blocks
        self._entries: dict[bytes, Entry] = {}
        self._children = Children()
        self._orphans = tuple(Orphans() for _ in range(VIEWS))
        self._slots: list[SlotState | None] = []
        self._free_slots: list[int] = []
        self._namespaces: list[NamespaceState] = []
        self._free_namespaces: list[int] = []
        self._retiring: deque[int] = deque()  # retired, and not all of their blocks swept yet
        self._buried_count = 0  # blocks of retired namespaces that engine hashes still name

    def add_namespace(self, key: bytes, root: bytes) -> int:
        """Register a namespace's chain secrets; the answer names it in `store`, until retired."""
        check_secrets(key, root)
        if self._free_namespaces:
            namespace_id = self._free_namespaces.pop()
            self._namespaces[namespace_id] = NamespaceState(key, root)
            return namespace_id
        self._namespaces.append(NamespaceState(key, root))
        return len(self._namespaces) - 1

    def retire_namespace(self, namespace_id: int) -> None:
        """Forget a namespace's secrets: from here on its blocks match nothing, and what is chained
        after them is `RETIRED`. `sweep` drops the blocks and frees the number.
        """
        self._check_namespace(namespace_id)
        self._namespaces[namespace_id].retire()
        self._retiring.append(namespace_id)

    def sweep(self, max_blocks: int) -> int:
        """Drop up to so many blocks of retired namespaces, the latest made first; how many of these
        namespaces are left to do. Blocks that a slot still holds count in `block_count` and
        `held_count` until it lets go of them.
        """
        if max_blocks < 0:
            raise ValueError("max_blocks is negative")
        while self._retiring:
            entries = self._namespaces[self._retiring[0]].entries
            if not entries:
                self._free_namespaces.append(self._retiring.popleft())
                continue
            if max_blocks == 0:
                break
            max_blocks -= 1
            self._bury(next(reversed(entries.values())))
        return len(self._retiring)

    def add_slot(self) -> int:
        """Take the lowest free slot. Raises ValueError when 65,535 are in use."""
        if self._free_slots:
            slot = heapq.heappop(self._free_slots)
            self._slots[slot] = SlotState()
            return slot
        if len(self._slots) >= _MAX_SLOTS:
            raise ValueError(f"all {_MAX_SLOTS} slots are in use")
        self._slots.append(SlotState())
        return len(self._slots) - 1

    def drop_slot(self, slot: int) -> None:
        """Forget all that a slot holds and free it for reuse."""
        self.clear_slot(slot)
        self._slots[slot] = None
        heapq.heappush(self._free_slots, slot)

    def clear_slot(self, slot: int) -> int:
        """Forget all that a slot holds, predictions too; how many distinct blocks it held."""
        state = self._state(slot)
        held = {held.entry: None for held in state.held.values()}
        held_count = len(held)
        held.update((self._entries[key], None) for key in state.predicted)
        for entry in held:
            entry.set_holds(slot, 0)
            self._drop_if_unheld(entry)
        for orphans in self._orphans:
            orphans.forget(slot)
        self._slots[slot] = SlotState()
        return held_count

    def store(
        self,
        slot: int,
        tier: int,
        namespace_id: int,
        parent: int,
        hashes: array[int] | bytes,
        tokens: array[int] | bytes,
        block_tokens: int,
        is_zone: bool = False,
    ) -> int:
        """Note one more copy of each block of a run; how many, or a code of `codes.py`.

        `namespace_id` >= 0 starts a run at that namespace's root (and `parent` means nothing), or,
        as a zone, after the engine hash `parent` of whatever namespace; -1 continues after `parent`
        in its namespace. `hashes` is u64, `tokens` u32 of `len(hashes) * block_tokens`; otherwise
        ValueError.
        """
        state = self._state(slot)
        names, ids = items_of(hashes, "Q", "hashes"), items_of(tokens, "I", "tokens")
        check_block_tokens(block_tokens)
        if len(ids) != len(names) * block_tokens:
            raise ValueError("tokens do not fill the blocks of the run")
        if namespace_id != -1:
            self._check_namespace(namespace_id)
        check_tier(tier)
        check_engine_hash(parent)
        parent_key: bytes | None = None
        if namespace_id == -1 or is_zone:
            held = state.held.get(parent)
            if held is None:
                return UNKNOWN_PARENT
            if self._is_dead(held.entry):
                return RETIRED
            parent_key = held.entry.key
            namespace_id = held.entry.namespace_id if namespace_id == -1 else namespace_id
        domain = self._namespaces[namespace_id]
        packed = chain_keys(domain.key, parent_key or domain.root, ids, block_tokens)
        for engine_hash, key in zip(names, keys_of(packed), strict=True):
            held = state.held.get(engine_hash)
            if held is not None and held.entry.key != key:
                return CONFLICT
            if held is not None and self._is_dead(held.entry):
                self._drop_hash(slot, state, engine_hash)  # what it named counts no more
                held = None
            is_new_hash = held is None
            if held is None:
                entry = self._entry(key, namespace_id, parent_key)
                if entry is None:
                    return FULL
                held = state.held[engine_hash] = Held(entry)
            self._note_copy(slot, state, held, tier, is_new_hash=is_new_hash)
            parent_key = key
        return len(names)

    def remove(self, slot: int, tier: int, hashes: array[int] | bytes) -> int:
        """Note one copy less of each block; how many were known. Unknown ones are ignored.

        What leaves device and host is no longer expected there either.
        """
        state = self._state(slot)
        names = items_of(hashes, "Q", "hashes")
        check_tier(tier)
        known_count = 0
        for engine_hash in names:
            held = state.held.get(engine_hash)
            if held is None or held.copies[tier] == 0:
                continue
            known_count += 1
            held.copies[tier] -= 1
            if held.copies[tier] == 0:
                self._drop_copy(slot, state, engine_hash, tier)
        return known_count

    def predict(
        self,
        slot: int,
        namespace_id: int,
        packed: bytes,
        expires_ms: float,
        max_predicted: int,
        lead_id: int = -1,
        lead_count: int = 0,
    ) -> None:
        """Expect a chain's blocks at a slot until `expires_ms`; of one block the latest counts.

        The first `lead_count` blocks are of the namespace `lead_id`, the others of `namespace_id`.
        Expiries of one slot must not decrease until it is cleared. Beyond `max_predicted` expected
        blocks the oldest predictions go first. When the index is full, the rest is left out.
        """
        state = self._state(slot)
        keys = list(keys_of(packed))
        if max_predicted < 0:
            raise ValueError("max_predicted is negative")
        if not expires_ms >= state.last_expires_ms:
            raise ValueError("predictions of one slot must expire in the order they are made")
        if not 0 <= lead_count <= len(keys):
            raise ValueError("lead_count is outside the chain")
        self._check_namespace(namespace_id)
        if lead_count:
            self._check_namespace(lead_id)
        state.last_expires_ms = expires_ms
        batch = state.next_batch
        state.next_batch += 1
        taken: list[bytes] = []
        parent: bytes | None = None
        for index, key in enumerate(keys):
            entry = self._entry(key, lead_id if index < lead_count else namespace_id, parent)
            if entry is None:
                break
            self._set_holds(slot, entry, entry.holds(slot) | PREDICTED)
            state.predicted[key] = batch
            taken.append(key)
            parent = key
        if taken:
            state.queue.append((expires_ms, batch, taken))
            state.queued_count += len(taken)
        while len(state.predicted) > max_predicted:
            self._expire_oldest(slot, state)
        if state.queued_count > 2 * len(state.predicted) + _QUEUE_SLACK:
            state.drop_stale_queued()

    def unpredict(self, slot: int, packed: bytes) -> None:
        """Stop expecting the blocks of `packed` at a slot."""
        state = self._state(slot)
        for key in keys_of(packed):
            self._forget_prediction(slot, state, key)

    def expire(self, now_ms: float) -> None:
        """Drop the predictions whose time has come (`expires_ms <= now_ms`)."""
        for slot, state in enumerate(self._slots):
            while state is not None and state.queue and state.queue[0][0] <= now_ms:
                self._expire_oldest(slot, state)

    def match(self, packed: bytes) -> tuple[list[int], list[int], list[int]]:
        """For every slot, how many leading blocks of a chain are on the device, resident in any
        tier, and near (device or host) or expected. A run ends at the first block that is missing.
        """
        keys = list(keys_of(packed))
        slot_count = len(self._slots)
        entries = self._entries
        is_sweeping = bool(self._retiring)

        def views(depth: int) -> int:
            """The three views' masks over slots, side by side in one number."""
            entry = entries.get(keys[depth])
            if entry is None or (is_sweeping and self._is_dead(entry)):
                return 0
            expected = entry.near | entry.predicted
            return (expected << slot_count | entry.resident) << slot_count | entry.device

        holed = 0
        for view, orphans in enumerate(self._orphans):
            holed |= orphans.slots_mask << view * slot_count
        everyone = (1 << VIEWS * slot_count) - 1
        if is_sweeping:  # a dead block makes a hole that is not counted as one yet
            holed = everyone
        closed = everyone & ~holed
        found = closed_depths(len(keys), closed, lambda depth: views(depth) & closed)
        if holed:
            found |= walked_depths(len(keys), holed, views)
        depths = [0] * (VIEWS * slot_count)
        for bit, depth in found.items():
            depths[bit] = depth
        return (
            depths[:slot_count],
            depths[slot_count : 2 * slot_count],
            depths[2 * slot_count :],
        )

    def held(self, slot: int) -> bytes:
        """The keys a slot holds in any tier, sorted and packed; none of retired namespaces."""
        held = (held.entry for held in self._state(slot).held.values())
        return b"".join(sorted({entry.key for entry in held if not self._is_dead(entry)}))

    def held_count(self, slot: int) -> int:
        """How many engine hashes a slot holds."""
        return len(self._state(slot).held)

    def predicted_count(self, slot: int) -> int:
        """How many blocks are expected at a slot."""
        return len(self._state(slot).predicted)

    def block_count(self) -> int:
        """How many distinct blocks the index knows."""
        return len(self._entries) + self._buried_count

    def memory_bytes(self) -> int:
        """The memory in use: what was allocated when compiled, an estimate here.

        The estimate was measured: 175 bytes a block, 280 a holder, 125 a prediction.
        """
        live = [state for state in self._slots if state is not None]
        held_count = sum(len(state.held) for state in live)
        predicted_count = sum(len(state.predicted) for state in live)
        return 175 * len(self._entries) + 280 * held_count + 125 * predicted_count

    # -- blocks and their holders ----------------------------------------------------------------

    def _state(self, slot: int) -> SlotState:
        state = self._slots[slot] if 0 <= slot < len(self._slots) else None
        if state is None:
            raise ValueError(f"slot {slot} is not in use")
        return state

    def _live(self, slot: int) -> SlotState:
        state = self._slots[slot]
        assert state is not None, f"slot {slot} holds blocks and is not in use"
        return state

    def _check_namespace(self, namespace_id: int) -> None:
        is_known = 0 <= namespace_id < len(self._namespaces)
        if not is_known or self._namespaces[namespace_id].is_retired:
            raise ValueError(f"namespace {namespace_id} is unknown")

    def _is_dead(self, entry: Entry) -> bool:
        namespace_id = entry.namespace_id
        return namespace_id == NOBODY or self._namespaces[namespace_id].is_retired

    def _entry(self, key: bytes, namespace_id: int, parent: bytes | None) -> Entry | None:
        entry = self._entries.get(key)
        if entry is not None and self._is_dead(entry):
            self._bury(entry)  # its namespace was retired and is back under another number
            entry = None
        if entry is None and self.block_count() < self._max_blocks:
            entry = self._entries[key] = Entry(key, namespace_id, parent)
            self._namespaces[namespace_id].entries[key] = entry
            if parent is not None:
                self._children.add(parent, key)
        return entry

    def _bury(self, entry: Entry) -> None:
        """No key leads to the block from here on and nobody expects it; it goes when no engine hash
        names it.
        """
        for slot in slots_in(entry.predicted):
            self._forget_prediction(slot, self._live(slot), entry.key)
        for slot in slots_in(entry.resident):
            self._count_leaving(slot, entry)
        if entry.resident:
            self._unlist(entry)
            entry.namespace_id = NOBODY
            self._buried_count += 1

    def _count_leaving(self, slot: int, entry: Entry) -> None:
        for view, counted in enumerate(VIEW_HOLDS):
            if entry.holds(slot) & counted:
                self._count_orphans(view, slot, entry, is_in=False)

    def _drop_if_unheld(self, entry: Entry) -> None:
        if entry.resident or entry.predicted:
            return
        if entry.namespace_id == NOBODY:
            self._buried_count -= 1
        else:
            self._unlist(entry)

    def _unlist(self, entry: Entry) -> None:
        del self._entries[entry.key]
        del self._namespaces[entry.namespace_id].entries[entry.key]
        if entry.parent is not None:
            self._children.discard(entry.parent, entry.key)

    def _set_holds(self, slot: int, entry: Entry, holds: int) -> None:
        """Set how a slot holds a block. Forgets the block when nobody holds it any more."""
        before = entry.holds(slot)
        if holds == before:
            return
        for view, counted in enumerate(VIEW_HOLDS):
            is_in = bool(holds & counted)
            if is_in != bool(before & counted) and entry.namespace_id != NOBODY:
                self._count_orphans(view, slot, entry, is_in=is_in)
        entry.set_holds(slot, holds)
        self._drop_if_unheld(entry)

    def _count_orphans(self, view: int, slot: int, entry: Entry, *, is_in: bool) -> None:
        """A block enters or leaves one view of a slot: is it an orphan, and are its children?"""
        orphans = self._orphans[view]
        key = entry.key
        delta = 0
        if entry.parent is not None and not self._is_in_view(view, slot, entry.parent):
            delta = 1 if is_in else -1
        if not is_in:
            delta += sum(self._is_in_view(view, slot, child) for child in self._children.of(key))
        elif orphans.slots_mask >> slot & 1:  # else it has no orphans that could find their parent
            delta -= sum(self._is_in_view(view, slot, child) for child in self._children.of(key))
        orphans.move(slot, delta)

    def _is_in_view(self, view: int, slot: int, key: bytes) -> bool:
        entry = self._entries.get(key)
        return entry is not None and bool(entry.holds(slot) & VIEW_HOLDS[view])

    # -- copies ----------------------------------------------------------------------------------

    def _note_copy(
        self, slot: int, state: SlotState, held: Held, tier: int, *, is_new_hash: bool
    ) -> None:
        before = held.entry.holds(slot)
        had = held.holds()
        held.copies[tier] = min(held.copies[tier] + 1, MAX_COPIES)
        gained = held.holds() & ~had
        if is_new_hash and before & RESIDENT:
            first = [int(bool(before & hold)) for hold in (DEVICE, NEAR, RESIDENT)]
            state.aliases.setdefault(held.entry, first)
        alias = state.aliases.get(held.entry)
        if alias is not None:
            for place, hold in enumerate((DEVICE, NEAR, RESIDENT)):
                alias[place] += bool(gained & hold)
        self._set_holds(slot, held.entry, before | gained)

    def _drop_copy(self, slot: int, state: SlotState, engine_hash: int, tier: int) -> None:
        """The last copy of one engine hash in a tier is gone."""
        held = state.held[engine_hash]
        left = held.holds()
        held.copies[tier] = 1
        lost = held.holds() & ~left
        held.copies[tier] = 0
        if lost & RESIDENT:
            del state.held[engine_hash]
        alias = state.aliases.get(held.entry)
        if alias is not None:
            for place, hold in enumerate((DEVICE, NEAR, RESIDENT)):
                if lost & hold:
                    alias[place] -= 1
                    if alias[place]:
                        lost &= ~hold
            if alias[2] == 1:
                del state.aliases[held.entry]
        if lost & NEAR and held.entry.holds(slot) & PREDICTED:
            del state.predicted[held.entry.key]  # it came, and went: nothing is on its way
            lost |= PREDICTED
        self._set_holds(slot, held.entry, held.entry.holds(slot) & ~lost)

    def _drop_hash(self, slot: int, state: SlotState, engine_hash: int) -> None:
        """All copies of one engine hash are gone."""
        held = state.held[engine_hash]
        for tier, count in enumerate(held.copies):
            if count:
                held.copies[tier] = 0
                self._drop_copy(slot, state, engine_hash, tier)

    # -- predictions -----------------------------------------------------------------------------

    def _expire_oldest(self, slot: int, state: SlotState) -> None:
        _, batch, keys = state.queue.popleft()
        state.queued_count -= len(keys)
        for key in keys:
            if state.predicted.get(key) == batch:
                self._forget_prediction(slot, state, key)

    def _forget_prediction(self, slot: int, state: SlotState, key: bytes) -> None:
        if state.predicted.pop(key, None) is not None:
            entry = self._entries[key]
            self._set_holds(slot, entry, entry.holds(slot) & ~PREDICTED)
