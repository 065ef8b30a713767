"""The Python twins of the compiled functions: the reference, and what runs without a compiler.

Their docstrings are the contract of both. Wrong types raise TypeError, wrong values and buffers
ValueError. Must never: answer otherwise than the compiled ones; `tests/model/test_native_twins.py`.
Read `_closure.py` for how `match` avoids a walk, and `core/directory.py`, the only user.
"""

from __future__ import annotations

import hashlib
import heapq
import math
import struct
from array import array
from collections import deque

from trunkline.native._arguments import (
    KEY_BYTES,
    TIERS,
    check_block_tokens,
    check_engine_hash,
    check_secrets,
    check_tier,
    items_of,
    keys_of,
)
from trunkline.native._closure import (
    VIEWS,
    Children,
    Orphans,
    closed_depths,
    walked_depths,
)
from trunkline.native.codes import CONFLICT, FULL, UNKNOWN_PARENT

MAX_COPIES = 65_535
"""Copies of one block in one tier are counted up to here; more leave the count where it is."""

_MAX_BLOCKS = 1 << 31
_MAX_SLOTS = 65_535
_QUEUE_SLACK = 1_024  # queued predictions that may be stale before they are looked through

# How a slot holds a block, as bits; and which of them count in each view of `_closure.py`.
_DEVICE, _NEAR, _RESIDENT, _PREDICTED = 1, 2, 4, 8  # near: on the device or in host memory
_VIEW_HOLDS = (_DEVICE, _RESIDENT, _NEAR | _PREDICTED)


def chain_keys(
    key: bytes,
    root: bytes,
    tokens: array[int] | bytes | memoryview,
    block_tokens: int,
    extra: bytes = b"",
) -> bytes:
    """Chain the full blocks of `tokens` from `root`: 32 bytes a block, packed first to last.

    `tokens` is a contiguous buffer of u32, or its raw bytes; `key` and `root` have 32 bytes each;
    `extra` is hashed into every block. Raises ValueError for a wrong size.
    """
    ids = items_of(tokens, "I", "tokens")
    check_block_tokens(block_tokens)
    check_secrets(key, root)
    raw = ids.cast("B")
    block_bytes = block_tokens * 4
    count_word = struct.pack("<I", block_tokens)
    tail = struct.pack("<I", len(extra)) + extra
    # Forking the keyed state is cheaper than setting up each hash anew.
    fork = hashlib.blake2b(digest_size=KEY_BYTES, key=key, person=b"blk").copy
    previous = root
    out: list[bytes] = []
    for start in range(0, len(raw) - block_bytes + 1, block_bytes):
        block_hash = fork()
        block_hash.update(b"".join((previous, count_word, raw[start : start + block_bytes], tail)))
        previous = block_hash.digest()
        out.append(previous)
    return b"".join(out)


class _Entry:
    """One distinct block: its place in the chain and, as bit masks over slots, who holds it."""

    __slots__ = ("device", "namespace_id", "near", "parent", "predicted", "resident")

    def __init__(self, namespace_id: int, parent: bytes | None) -> None:
        self.namespace_id = namespace_id
        self.parent = parent  # None for the first block of a chain
        self.device = 0
        self.near = 0
        self.resident = 0
        self.predicted = 0

    def holds(self, slot: int) -> int:
        return (
            (self.device >> slot & 1) * _DEVICE
            | (self.near >> slot & 1) * _NEAR
            | (self.resident >> slot & 1) * _RESIDENT
            | (self.predicted >> slot & 1) * _PREDICTED
        )

    def set_holds(self, slot: int, holds: int) -> None:
        bit = 1 << slot
        self.device = self.device | bit if holds & _DEVICE else self.device & ~bit
        self.near = self.near | bit if holds & _NEAR else self.near & ~bit
        self.resident = self.resident | bit if holds & _RESIDENT else self.resident & ~bit
        self.predicted = self.predicted | bit if holds & _PREDICTED else self.predicted & ~bit


class _Held:
    """One engine hash of a slot: the block it names, and how many copies lie in each tier."""

    __slots__ = ("copies", "key")

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.copies = [0] * TIERS

    def holds(self) -> int:
        device, host, disk, shared = self.copies
        holds = _DEVICE | _NEAR | _RESIDENT if device else _NEAR | _RESIDENT if host else 0
        return holds or (_RESIDENT if disk or shared else 0)


class _Slot:
    """One worker's side: engine hashes, and predictions by age."""

    __slots__ = (
        "aliases",
        "held",
        "last_expires_ms",
        "next_batch",
        "predicted",
        "queue",
        "queued_count",
    )

    def __init__(self) -> None:
        self.held: dict[int, _Held] = {}
        # Only blocks that several engine hashes name (an engine may key on more than we do):
        # how many of those hashes have copies on the device, near, and at all.
        self.aliases: dict[bytes, list[int]] = {}
        self.predicted: dict[bytes, int] = {}  # key -> the latest batch that named it
        self.queue: deque[tuple[float, int, list[bytes]]] = deque()  # expiry, batch, keys
        self.queued_count = 0
        self.next_batch = 0
        self.last_expires_ms = -math.inf


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
        self._entries: dict[bytes, _Entry] = {}
        self._children = Children()
        self._orphans = tuple(Orphans() for _ in range(VIEWS))
        self._slots: list[_Slot | None] = []
        self._free_slots: list[int] = []
        self._namespaces: list[tuple[bytes, bytes]] = []

    def add_namespace(self, key: bytes, root: bytes) -> int:
        """Register a namespace's chain secrets; the answer names it in `store`. Never forgotten."""
        check_secrets(key, root)
        self._namespaces.append((key, root))
        return len(self._namespaces) - 1

    def add_slot(self) -> int:
        """Take the lowest free slot. Raises ValueError when 65,535 are in use."""
        if self._free_slots:
            slot = heapq.heappop(self._free_slots)
            self._slots[slot] = _Slot()
            return slot
        if len(self._slots) >= _MAX_SLOTS:
            raise ValueError(f"all {_MAX_SLOTS} slots are in use")
        self._slots.append(_Slot())
        return len(self._slots) - 1

    def drop_slot(self, slot: int) -> None:
        """Forget all that a slot holds and free it for reuse."""
        self.clear_slot(slot)
        self._slots[slot] = None
        heapq.heappush(self._free_slots, slot)

    def clear_slot(self, slot: int) -> int:
        """Forget all that a slot holds, predictions too; how many distinct blocks it held."""
        state = self._state(slot)
        keys = {held.key for held in state.held.values()}
        held_count = len(keys)
        keys.update(state.predicted)
        for key in keys:
            entry = self._entries[key]
            entry.set_holds(slot, 0)
            self._drop_if_unheld(key, entry)
        for orphans in self._orphans:
            orphans.forget(slot)
        self._slots[slot] = _Slot()
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
    ) -> int:
        """Note one more copy of each block of a run; how many, or a code of `codes.py`.

        `namespace_id` >= 0 starts a run at that namespace's root (and `parent` means nothing); -1
        continues after the engine hash `parent`, in its namespace. `hashes` is u64, `tokens` u32 of
        `len(hashes) * block_tokens`; otherwise ValueError.
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
        if namespace_id == -1:
            held = state.held.get(parent)
            if held is None:
                return UNKNOWN_PARENT
            parent_key = held.key
            namespace_id = self._entries[parent_key].namespace_id
        chain_key, root = self._namespaces[namespace_id]
        packed = chain_keys(chain_key, parent_key or root, ids, block_tokens)
        for engine_hash, key in zip(names, keys_of(packed), strict=True):
            held = state.held.get(engine_hash)
            is_new_hash = held is None
            if held is None:
                if self._entry(key, namespace_id, parent_key) is None:
                    return FULL
                held = state.held[engine_hash] = _Held(key)
            elif held.key != key:
                return CONFLICT
            self._note_copy(slot, state, held, tier, is_new_hash=is_new_hash)
            parent_key = key
        return len(names)

    def remove(self, slot: int, tier: int, hashes: array[int] | bytes) -> int:
        """Note one copy less of each block; how many were known. Unknown ones are ignored."""
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
        self, slot: int, namespace_id: int, packed: bytes, expires_ms: float, max_predicted: int
    ) -> None:
        """Expect a chain's blocks at a slot until `expires_ms`; of one block the latest counts.

        Expiries of one slot must not decrease until it is cleared. Beyond `max_predicted` expected
        blocks the oldest predictions go first. When the index is full, the rest is left out.
        """
        state = self._state(slot)
        keys = list(keys_of(packed))
        if max_predicted < 0:
            raise ValueError("max_predicted is negative")
        if not expires_ms >= state.last_expires_ms:
            raise ValueError("predictions of one slot must expire in the order they are made")
        self._check_namespace(namespace_id)
        state.last_expires_ms = expires_ms
        batch = state.next_batch
        state.next_batch += 1
        taken: list[bytes] = []
        parent: bytes | None = None
        for key in keys:
            entry = self._entry(key, namespace_id, parent)
            if entry is None:
                break
            self._set_holds(slot, key, entry.holds(slot) | _PREDICTED)
            state.predicted[key] = batch
            taken.append(key)
            parent = key
        if taken:
            state.queue.append((expires_ms, batch, taken))
            state.queued_count += len(taken)
        while len(state.predicted) > max_predicted:
            self._expire_oldest(slot, state)
        if state.queued_count > 2 * len(state.predicted) + _QUEUE_SLACK:
            _drop_stale_queued(state)

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

        def views(depth: int) -> int:
            """The three views' masks over slots, side by side in one number."""
            entry = entries.get(keys[depth])
            if entry is None:
                return 0
            expected = entry.near | entry.predicted
            return (expected << slot_count | entry.resident) << slot_count | entry.device

        holed = 0
        for view, orphans in enumerate(self._orphans):
            holed |= orphans.slots_mask << view * slot_count
        closed = ((1 << VIEWS * slot_count) - 1) & ~holed
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
        """The keys a slot holds in any tier, sorted and packed."""
        return b"".join(sorted({held.key for held in self._state(slot).held.values()}))

    def held_count(self, slot: int) -> int:
        """How many engine hashes a slot holds."""
        return len(self._state(slot).held)

    def predicted_count(self, slot: int) -> int:
        """How many blocks are expected at a slot."""
        return len(self._state(slot).predicted)

    def block_count(self) -> int:
        """How many distinct blocks the index knows."""
        return len(self._entries)

    def memory_bytes(self) -> int:
        """The memory in use: what was allocated when compiled, an estimate here.

        The estimate was measured: 175 bytes a block, 280 a holder, 125 a prediction.
        """
        live = [state for state in self._slots if state is not None]
        held_count = sum(len(state.held) for state in live)
        predicted_count = sum(len(state.predicted) for state in live)
        return 175 * len(self._entries) + 280 * held_count + 125 * predicted_count

    # -- blocks and their holders ----------------------------------------------------------------

    def _state(self, slot: int) -> _Slot:
        state = self._slots[slot] if 0 <= slot < len(self._slots) else None
        if state is None:
            raise ValueError(f"slot {slot} is not in use")
        return state

    def _check_namespace(self, namespace_id: int) -> None:
        if not 0 <= namespace_id < len(self._namespaces):
            raise ValueError(f"namespace {namespace_id} is unknown")

    def _entry(self, key: bytes, namespace_id: int, parent: bytes | None) -> _Entry | None:
        entry = self._entries.get(key)
        if entry is None and len(self._entries) < self._max_blocks:
            entry = self._entries[key] = _Entry(namespace_id, parent)
            if parent is not None:
                self._children.add(parent, key)
        return entry

    def _drop_if_unheld(self, key: bytes, entry: _Entry) -> None:
        if not entry.resident and not entry.predicted:
            del self._entries[key]
            if entry.parent is not None:
                self._children.discard(entry.parent, key)

    def _set_holds(self, slot: int, key: bytes, holds: int) -> None:
        """Set how a slot holds a block. Forgets the block when nobody holds it any more."""
        entry = self._entries[key]
        before = entry.holds(slot)
        if holds == before:
            return
        for view, counted in enumerate(_VIEW_HOLDS):
            is_in = bool(holds & counted)
            if is_in != bool(before & counted):
                self._count_orphans(view, slot, key, entry, is_in=is_in)
        entry.set_holds(slot, holds)
        self._drop_if_unheld(key, entry)

    def _count_orphans(
        self, view: int, slot: int, key: bytes, entry: _Entry, *, is_in: bool
    ) -> None:
        """A block enters or leaves one view of a slot: is it an orphan, and are its children?"""
        orphans = self._orphans[view]
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
        return entry is not None and bool(entry.holds(slot) & _VIEW_HOLDS[view])

    # -- copies ----------------------------------------------------------------------------------

    def _note_copy(
        self, slot: int, state: _Slot, held: _Held, tier: int, *, is_new_hash: bool
    ) -> None:
        before = self._entries[held.key].holds(slot)
        had = held.holds()
        held.copies[tier] = min(held.copies[tier] + 1, MAX_COPIES)
        gained = held.holds() & ~had
        if is_new_hash and before & _RESIDENT:
            first = [int(bool(before & hold)) for hold in (_DEVICE, _NEAR, _RESIDENT)]
            state.aliases.setdefault(held.key, first)
        alias = state.aliases.get(held.key)
        if alias is not None:
            for place, hold in enumerate((_DEVICE, _NEAR, _RESIDENT)):
                alias[place] += bool(gained & hold)
        self._set_holds(slot, held.key, before | gained)

    def _drop_copy(self, slot: int, state: _Slot, engine_hash: int, tier: int) -> None:
        """The last copy of one engine hash in a tier is gone."""
        held = state.held[engine_hash]
        left = held.holds()
        held.copies[tier] = 1
        lost = held.holds() & ~left
        held.copies[tier] = 0
        if lost & _RESIDENT:
            del state.held[engine_hash]
        alias = state.aliases.get(held.key)
        if alias is not None:
            for place, hold in enumerate((_DEVICE, _NEAR, _RESIDENT)):
                if lost & hold:
                    alias[place] -= 1
                    if alias[place]:
                        lost &= ~hold
            if alias[2] == 1:
                del state.aliases[held.key]
        self._set_holds(slot, held.key, self._entries[held.key].holds(slot) & ~lost)

    # -- predictions -----------------------------------------------------------------------------

    def _expire_oldest(self, slot: int, state: _Slot) -> None:
        _, batch, keys = state.queue.popleft()
        state.queued_count -= len(keys)
        for key in keys:
            if state.predicted.get(key) == batch:
                self._forget_prediction(slot, state, key)

    def _forget_prediction(self, slot: int, state: _Slot, key: bytes) -> None:
        if state.predicted.pop(key, None) is not None:
            self._set_holds(slot, key, self._entries[key].holds(slot) & ~_PREDICTED)


def _drop_stale_queued(state: _Slot) -> None:
    """Keep the queue in proportion to what is expected, however often it is predicted anew."""
    queue: deque[tuple[float, int, list[bytes]]] = deque()
    state.queued_count = 0
    for expires_ms, batch, keys in state.queue:
        current = [key for key in keys if state.predicted.get(key) == batch]
        if current:
            queue.append((expires_ms, batch, current))
            state.queued_count += len(current)
    state.queue = queue
