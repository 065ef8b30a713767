"""The Python twins of the compiled functions: the reference, and what runs without a compiler.

Their docstrings are the contract of both. Wrong types raise TypeError, wrong values and buffers
ValueError. Must never: answer otherwise than the compiled ones; `tests/model/test_native_twins.py`.
Read `_cells.py` for the records, `_closure.py` for how `match` avoids a walk, and
`core/directory.py`, the only user.
"""

from __future__ import annotations

import heapq
import itertools
from array import array
from collections import deque
from collections.abc import Sequence

from trunkline.native._arguments import (
    KEY_BYTES,
    check_block_tokens,
    check_engine_hash,
    check_secrets,
    check_tier,
    items_of,
    keys_of,
)
from trunkline.native._blocks import Blocks
from trunkline.native._cells import (
    NEAR,
    NOBODY,
    PREDICTED,
    RESIDENT,
    Held,
    NamespaceState,
    SlotState,
)
from trunkline.native._chain import chain_keys
from trunkline.native._closure import VIEWS, depths_of
from trunkline.native._rows import packed_rows, rows_of
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
        self._blocks = Blocks(max_blocks)
        self._free_slots: list[int] = []
        self._free_namespaces: list[int] = []
        self._retiring: deque[int] = deque()  # retired, and not all of their blocks swept yet
        self._has_adopted = False

    def add_namespace(self, key: bytes, root: bytes) -> int:
        """Register a namespace's chain secrets; the answer names it in `store`, until retired."""
        check_secrets(key, root)
        if self._free_namespaces:
            namespace_id = self._free_namespaces.pop()
            self._blocks.namespaces[namespace_id] = NamespaceState(key, root)
            return namespace_id
        self._blocks.namespaces.append(NamespaceState(key, root))
        return len(self._blocks.namespaces) - 1

    def retire_namespace(self, namespace_id: int) -> None:
        """Forget a namespace's secrets: from here on its blocks match nothing, and what is chained
        after them is `RETIRED`. `sweep` drops the blocks and frees the number.
        """
        self._check_namespace(namespace_id)
        self._blocks.namespaces[namespace_id].retire()
        self._retiring.append(namespace_id)

    def sweep(self, max_blocks: int) -> int:
        """Drop up to so many blocks of retired namespaces, the latest made first; how many of these
        namespaces are left to do. Blocks that a slot still holds count in `block_count` and
        `held_count` until it lets go of them.
        """
        if max_blocks < 0:
            raise ValueError("max_blocks is negative")
        while self._retiring:
            entries = self._blocks.namespaces[self._retiring[0]].entries
            if not entries:
                self._free_namespaces.append(self._retiring.popleft())
                continue
            if max_blocks == 0:
                break
            max_blocks -= 1
            self._blocks.bury(next(reversed(entries.values())))
        return len(self._retiring)

    def add_slot(self) -> int:
        """Take the lowest free slot. Raises ValueError when 65,535 are in use."""
        if self._free_slots:
            slot = heapq.heappop(self._free_slots)
            self._blocks.slots[slot] = SlotState()
            return slot
        if len(self._blocks.slots) >= _MAX_SLOTS:
            raise ValueError(f"all {_MAX_SLOTS} slots are in use")
        self._blocks.slots.append(SlotState())
        return len(self._blocks.slots) - 1

    def drop_slot(self, slot: int) -> None:
        """Forget all that a slot holds and free it for reuse."""
        self.clear_slot(slot)
        self._blocks.slots[slot] = None
        heapq.heappush(self._free_slots, slot)

    def clear_slot(self, slot: int) -> int:
        """Forget all that a slot holds, predictions too; how many distinct blocks it held."""
        state = self._state(slot)
        held = {held.entry: None for held in state.held.values()}
        held_count = len(held)
        held.update((self._blocks.by_key[key], None) for key in state.predicted)
        for entry in held:
            entry.set_holds(slot, 0)
            self._blocks.drop_if_unheld(entry)
        for orphans in self._blocks.orphans:
            orphans.forget(slot)
        self._blocks.slots[slot] = SlotState()
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
            if self._blocks.is_dead(held.entry):
                return RETIRED
            parent_key = held.entry.key
            namespace_id = held.entry.namespace_id if namespace_id == -1 else namespace_id
        domain = self._blocks.namespaces[namespace_id]
        packed = chain_keys(domain.key, parent_key or domain.root, ids, block_tokens)
        for engine_hash, key in zip(names, keys_of(packed), strict=True):
            held = self._named(slot, state, engine_hash, key, (namespace_id, parent_key))
            if isinstance(held, int):
                return held
            self._note_copy(slot, state, held, tier)
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
            entry = self._blocks.entry(key, lead_id if index < lead_count else namespace_id, parent)
            if entry is None:
                break
            self._blocks.set_holds(slot, entry, entry.holds(slot) | PREDICTED)
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

    def knows(self, key: bytes) -> bool:
        """Whether any slot holds or expects the block with this key."""
        if len(key) != KEY_BYTES:
            raise ValueError(f"a key has {KEY_BYTES} bytes, not {len(key)}")
        entry = self._blocks.by_key.get(key)
        return entry is not None and not self._blocks.is_dead(entry)

    def unpredict(self, slot: int, packed: bytes) -> None:
        """Stop expecting the blocks of `packed` at a slot."""
        state = self._state(slot)
        for key in keys_of(packed):
            self._blocks.forget_prediction(slot, state, key)

    def expire(self, now_ms: float) -> None:
        """Drop the predictions whose time has come (`expires_ms <= now_ms`)."""
        for slot, state in enumerate(self._blocks.slots):
            while state is not None and state.queue and state.queue[0][0] <= now_ms:
                self._expire_oldest(slot, state)

    def match(self, packed: bytes) -> tuple[list[int], list[int], list[int]]:
        """For every slot, how many leading blocks of a chain are on the device, resident in any
        tier, and near (device or host) or expected. A run ends at the first block that is missing.
        """
        keys = list(keys_of(packed))
        slot_count = len(self._blocks.slots)
        entries = self._blocks.by_key
        is_sweeping = bool(self._retiring)

        def views(depth: int) -> int:
            """The three views' masks over slots, side by side in one number."""
            entry = entries.get(keys[depth])
            if entry is None or (is_sweeping and self._blocks.is_dead(entry)):
                return 0
            expected = entry.near | entry.predicted
            return (expected << slot_count | entry.resident) << slot_count | entry.device

        if is_sweeping or self._has_adopted:
            # A dead block makes a hole that is not counted as one yet; of an adopted one nobody
            # told after which it stands.
            return depths_of(len(keys), slot_count, (1 << VIEWS * slot_count) - 1, views)
        holed = 0
        for view, orphans in enumerate(self._blocks.orphans):
            holed |= orphans.slots_mask << view * slot_count
        return depths_of(len(keys), slot_count, holed, views)

    def export_rows(self, slot: int, start: int, max_rows: int) -> tuple[int, bytes, list[int]]:
        """Up to so many engine hashes of a slot from a place on, 0 at first, as rows of `_rows.py`;
        the place to go on at, -1 at the end; and the namespaces that the rows count from 0, -1 for
        blocks of retired ones. All in all each comes once, if nothing is stored or removed.
        """
        held = self._state(slot).held
        if start < 0 or max_rows < 1:
            raise ValueError("rows are asked for from 0 on, and at least one")
        cells = list(itertools.islice(held.items(), start, start + max_rows))
        packed, ids = packed_rows(
            (name, cell, NOBODY if self._blocks.is_dead(cell.entry) else cell.entry.namespace_id)
            for name, cell in cells
        )
        end = start + len(cells)
        return end if end < len(held) else -1, packed, ids

    def adopt_rows(self, slot: int, rows: bytes, namespace_ids: list[int]) -> tuple[int, bytes]:
        """Take in what another index exported of the same worker: each block has at least so many
        copies in each tier. How many rows, or `FULL` or `CONFLICT` (then those before it are in);
        and, packed, the hashes of rows whose namespace is -1 here, which are left out.
        """
        state = self._state(slot)
        for namespace_id in set(namespace_ids) - {NOBODY}:
            self._check_namespace(namespace_id)
        table = rows_of(rows, len(namespace_ids))
        left_out = array("Q")
        self._has_adopted = self._has_adopted or bool(table)
        for engine_hash, key, place, copies in table:
            if namespace_ids[place] != NOBODY:
                held = self._named(slot, state, engine_hash, key, (namespace_ids[place], None))
                if isinstance(held, int):
                    return held, left_out.tobytes()
                self._raise_copies(slot, state, held, copies)
            elif engine_hash not in state.held:
                left_out.append(engine_hash)
        return len(table), left_out.tobytes()

    def held(self, slot: int) -> bytes:
        """The keys a slot holds in any tier, sorted and packed; none of retired namespaces."""
        held = (held.entry for held in self._state(slot).held.values())
        return b"".join(sorted({entry.key for entry in held if not self._blocks.is_dead(entry)}))

    def held_count(self, slot: int) -> int:
        """How many engine hashes a slot holds."""
        return len(self._state(slot).held)

    def tier_counts(self, slot: int) -> list[int]:
        """How many engine hashes a slot holds in each tier; one may be in several."""
        return list(self._state(slot).tier_counts)

    def predicted_count(self, slot: int) -> int:
        """How many blocks are expected at a slot."""
        return len(self._state(slot).predicted)

    def block_count(self) -> int:
        """How many distinct blocks the index knows."""
        return self._blocks.count()

    def memory_bytes(self) -> int:
        """The memory in use: what was allocated when compiled, an estimate here.

        The estimate was measured: 175 bytes a block, 280 a holder, 125 a prediction.
        """
        live = [state for state in self._blocks.slots if state is not None]
        held_count = sum(len(state.held) for state in live)
        predicted_count = sum(len(state.predicted) for state in live)
        return 175 * len(self._blocks.by_key) + 280 * held_count + 125 * predicted_count

    # -- blocks and their holders ----------------------------------------------------------------

    def _state(self, slot: int) -> SlotState:
        state = self._blocks.slots[slot] if 0 <= slot < len(self._blocks.slots) else None
        if state is None:
            raise ValueError(f"slot {slot} is not in use")
        return state

    def _check_namespace(self, namespace_id: int) -> None:
        is_known = 0 <= namespace_id < len(self._blocks.namespaces)
        if not is_known or self._blocks.namespaces[namespace_id].is_retired:
            raise ValueError(f"namespace {namespace_id} is unknown")

    # -- copies ----------------------------------------------------------------------------------

    def _named(
        self,
        slot: int,
        state: SlotState,
        engine_hash: int,
        key: bytes,
        place: tuple[int, bytes | None],
    ) -> Held | int:
        """What an engine hash names, made where it is new; or a code. `place`: the block's
        namespace and parent.
        """
        held = state.held.get(engine_hash)
        if held is not None and held.entry.key != key:
            return CONFLICT
        if held is not None and self._blocks.is_dead(held.entry):
            self._drop_hash(slot, state, engine_hash)  # what it named counts no more
            held = None
        if held is None:
            entry = self._blocks.entry(key, *place)
            if entry is None:
                return FULL
            held = state.held[engine_hash] = Held(entry)
        return held

    def _note_copy(self, slot: int, state: SlotState, held: Held, tier: int) -> None:
        copies = list(held.copies)
        copies[tier] = min(copies[tier] + 1, MAX_COPIES)
        self._raise_copies(slot, state, held, copies)

    def _raise_copies(self, slot: int, state: SlotState, held: Held, least: Sequence[int]) -> None:
        before, had = held.entry.holds(slot), held.holds()
        for tier, count in enumerate(least):
            state.tier_counts[tier] += count > 0 and held.copies[tier] == 0
        held.copies = list(map(max, held.copies, least))
        state.note_gain(held.entry, before, held.holds() & ~had, is_new_hash=not had)
        self._blocks.set_holds(slot, held.entry, before | (held.holds() & ~had))

    def _drop_copy(self, slot: int, state: SlotState, engine_hash: int, tier: int) -> None:
        """The last copy of one engine hash in a tier is gone."""
        held = state.held[engine_hash]
        state.tier_counts[tier] -= 1
        left = held.holds()
        held.copies[tier] = 1
        lost = held.holds() & ~left
        held.copies[tier] = 0
        if lost & RESIDENT:
            del state.held[engine_hash]
        lost = state.note_loss(held.entry, lost)
        if lost & NEAR and held.entry.holds(slot) & PREDICTED:
            del state.predicted[held.entry.key]  # it came, and went: nothing is on its way
            lost |= PREDICTED
        self._blocks.set_holds(slot, held.entry, held.entry.holds(slot) & ~lost)

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
                self._blocks.forget_prediction(slot, state, key)
