"""The Python twins of the compiled functions: the reference, and what runs without a compiler."""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections import deque

from trunkline.native.codes import CONFLICT, FULL, UNKNOWN_PARENT

KEY_BYTES = 32
_MAX_SLOTS = 65_535
_TIERS = 4


def chain_keys(
    key: bytes, root: bytes, tokens: array[int], block_tokens: int, extra: bytes = b""
) -> bytes:
    """Chain the full blocks of `tokens` (u32) from `root`: 32 bytes a block, packed first to last."""
    blake2b = hashlib.blake2b
    raw = memoryview(tokens).cast("B")
    block_bytes = block_tokens * 4
    count_word = struct.pack("<I", block_tokens)
    tail = struct.pack("<I", len(extra)) + extra
    previous = root
    out: list[bytes] = []
    for start in range(0, len(raw) - block_bytes + 1, block_bytes):
        data = b"".join((previous, count_word, raw[start : start + block_bytes], tail))
        previous = blake2b(data, digest_size=KEY_BYTES, key=key, person=b"blk").digest()
        out.append(previous)
    return b"".join(out)


class _Entry:
    """One distinct block: its namespace and, as bit masks over slots, who holds it and how."""

    __slots__ = ("device", "namespace_id", "predicted", "resident")

    def __init__(self, namespace_id: int) -> None:
        self.namespace_id = namespace_id
        self.device = 0
        self.resident = 0
        self.predicted = 0


class _Slot:
    """One worker's side: engine hash -> (key, copies in each tier), and predictions by expiry."""

    __slots__ = ("held", "predicted", "queue")

    def __init__(self) -> None:
        self.held: dict[int, tuple[bytes, list[int]]] = {}
        self.predicted: dict[bytes, float] = {}
        self.queue: deque[tuple[float, list[bytes]]] = deque()


class BlockIndex:
    """Block key -> which slots hold it, in which tier, or are expected to soon.

    Everything in it is a hint. Slots are dense worker numbers. `store` and `remove` speak the engine's
    own 64-bit hashes and count copies, since an engine announces each physical copy; `match` speaks keys.
    """

    def __init__(self, max_blocks: int) -> None:
        """`max_blocks` bounds the number of distinct blocks. Raises ValueError below 1."""
        if max_blocks < 1:
            raise ValueError(f"max_blocks is {max_blocks}, at least 1 is needed")
        self._max_blocks = max_blocks
        self._entries: dict[bytes, _Entry] = {}
        self._slots: list[_Slot | None] = []
        self._namespaces: list[tuple[bytes, bytes]] = []

    def add_namespace(self, key: bytes, root: bytes) -> int:
        """Register a namespace's chain secrets; the answer names it in `store`. Never forgotten."""
        if len(key) != KEY_BYTES or len(root) != KEY_BYTES:
            raise ValueError("a namespace key and its root have 32 bytes each")
        self._namespaces.append((key, root))
        return len(self._namespaces) - 1

    def add_slot(self) -> int:
        """Take the lowest free slot. Raises ValueError when 65,535 are in use."""
        for slot, state in enumerate(self._slots):
            if state is None:
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

    def clear_slot(self, slot: int) -> int:
        """Forget all that a slot holds, predictions too; how many blocks it held."""
        state = self._state(slot)
        keys = {key for key, _ in state.held.values()}
        held_count = len(keys)
        keys.update(state.predicted)
        bit = ~(1 << slot)
        for key in keys:
            entry = self._entries[key]
            entry.device &= bit
            entry.resident &= bit
            entry.predicted &= bit
            self._drop_if_unheld(key, entry)
        self._slots[slot] = _Slot()
        return held_count

    def store(
        self,
        slot: int,
        tier: int,
        namespace_id: int,
        parent: int,
        hashes: array[int],
        tokens: array[int],
        block_tokens: int,
    ) -> int:
        """Note one more copy of each block of a run; how many, or a code of `codes.py`.

        `namespace_id` >= 0 starts a run at that namespace's root (and `parent` means nothing); -1 continues
        after the engine hash `parent`, in its namespace. `hashes` is u64, `tokens` u32 of
        `len(hashes) * block_tokens`; otherwise ValueError.
        """
        state = self._state(slot)
        if len(tokens) != len(hashes) * block_tokens or not 0 <= tier < _TIERS:
            raise ValueError("tokens do not fill the blocks of the run, or the tier is unknown")
        if namespace_id >= 0:
            chain_key, previous = self._namespaces[namespace_id]
        else:
            held = state.held.get(parent)
            if held is None:
                return UNKNOWN_PARENT
            previous = held[0]
            namespace_id = self._entries[previous].namespace_id
            chain_key = self._namespaces[namespace_id][0]
        packed = chain_keys(chain_key, previous, tokens, block_tokens)
        bit = 1 << slot
        for index, engine_hash in enumerate(hashes):
            key = packed[index * KEY_BYTES : (index + 1) * KEY_BYTES]
            held = state.held.get(engine_hash)
            if held is None:
                entry = self._entry(key, namespace_id)
                if entry is None:
                    return FULL
                held = state.held[engine_hash] = (key, [0] * _TIERS)
            elif held[0] == key:
                entry = self._entries[key]
            else:
                return CONFLICT
            held[1][tier] += 1
            entry.resident |= bit
            if tier == 0:
                entry.device |= bit
        return len(hashes)

    def remove(self, slot: int, tier: int, hashes: array[int]) -> int:
        """Note one copy less of each block; how many were known. Unknown ones are ignored."""
        state = self._state(slot)
        known_count = 0
        for engine_hash in hashes:
            held = state.held.get(engine_hash)
            if held is None or held[1][tier] == 0:
                continue
            known_count += 1
            key, copies = held
            copies[tier] -= 1
            if copies[tier]:
                continue
            entry = self._entries[key]
            if tier == 0:
                entry.device &= ~(1 << slot)
            if not any(copies):
                entry.resident &= ~(1 << slot)
                del state.held[engine_hash]
                self._drop_if_unheld(key, entry)
        return known_count

    def predict(
        self, slot: int, namespace_id: int, packed: bytes, expires_ms: float, max_predicted: int
    ) -> None:
        """Expect the blocks of `packed` at a slot until `expires_ms`; a later expiry replaces an earlier.

        Expiries of one slot must not decrease. Beyond `max_predicted` expected blocks the oldest go first.
        """
        state = self._state(slot)
        if state.queue and expires_ms < state.queue[-1][0]:
            raise ValueError("predictions of one slot must expire in the order they are made")
        taken: list[bytes] = []
        for start in range(0, len(packed), KEY_BYTES):
            key = packed[start : start + KEY_BYTES]
            entry = self._entry(key, namespace_id)
            if entry is None:
                break
            entry.predicted |= 1 << slot
            state.predicted[key] = expires_ms
            taken.append(key)
        state.queue.append((expires_ms, taken))
        while len(state.predicted) > max_predicted and state.queue:
            self._expire_oldest(slot, state)

    def unpredict(self, slot: int, packed: bytes) -> None:
        """Stop expecting the blocks of `packed` at a slot."""
        state = self._state(slot)
        for start in range(0, len(packed), KEY_BYTES):
            self._forget_prediction(slot, state, packed[start : start + KEY_BYTES])

    def expire(self, now_ms: float) -> None:
        """Drop the predictions whose time has come (`expires_ms <= now_ms`)."""
        for slot, state in enumerate(self._slots):
            while state is not None and state.queue and state.queue[0][0] <= now_ms:
                self._expire_oldest(slot, state)

    def match(self, packed: bytes) -> tuple[list[int], list[int], list[int]]:
        """For every slot, how many leading blocks of `packed` are on the device, resident in any tier,
        and resident or expected. A free slot has 0. The run ends at the first block that is missing.
        """
        slot_count = len(self._slots)
        everyone = (1 << slot_count) - 1
        device, resident, expected = [0] * slot_count, [0] * slot_count, [0] * slot_count
        alive_device = alive_resident = alive_expected = everyone
        block_count = len(packed) // KEY_BYTES
        for depth in range(block_count + 1):
            entry = None
            if depth < block_count:
                entry = self._entries.get(packed[depth * KEY_BYTES : (depth + 1) * KEY_BYTES])
            on_device, in_any, hoped = (
                (entry.device, entry.resident, entry.resident | entry.predicted)
                if entry
                else (0, 0, 0)
            )
            _set_depth(device, alive_device & ~on_device, depth)
            _set_depth(resident, alive_resident & ~in_any, depth)
            _set_depth(expected, alive_expected & ~hoped, depth)
            alive_device &= on_device
            alive_resident &= in_any
            alive_expected &= hoped
            if not alive_expected:
                break
        return device, resident, expected

    def held(self, slot: int) -> bytes:
        """The keys a slot holds in any tier, sorted and packed."""
        return b"".join(sorted({key for key, _ in self._state(slot).held.values()}))

    def holds_engine_hash(self, slot: int, engine_hash: int) -> bool:
        """Whether a slot holds the block that its engine calls so."""
        return engine_hash in self._state(slot).held

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
        """An estimate of the memory in use (measured: about 330 bytes a block, 250 a holder)."""
        holders = sum(len(s.held) + len(s.predicted) for s in self._slots if s is not None)
        return 330 * len(self._entries) + 250 * holders

    def _state(self, slot: int) -> _Slot:
        state = self._slots[slot] if 0 <= slot < len(self._slots) else None
        if state is None:
            raise ValueError(f"slot {slot} is not in use")
        return state

    def _entry(self, key: bytes, namespace_id: int) -> _Entry | None:
        entry = self._entries.get(key)
        if entry is None and len(self._entries) < self._max_blocks:
            entry = self._entries[key] = _Entry(namespace_id)
        return entry

    def _drop_if_unheld(self, key: bytes, entry: _Entry) -> None:
        if not entry.resident and not entry.predicted:
            del self._entries[key]

    def _expire_oldest(self, slot: int, state: _Slot) -> None:
        expires_ms, keys = state.queue.popleft()
        for key in keys:
            if state.predicted.get(key) == expires_ms:
                self._forget_prediction(slot, state, key)

    def _forget_prediction(self, slot: int, state: _Slot, key: bytes) -> None:
        if state.predicted.pop(key, None) is None:
            return
        entry = self._entries[key]
        entry.predicted &= ~(1 << slot)
        self._drop_if_unheld(key, entry)


def _set_depth(depths: list[int], ended: int, depth: int) -> None:
    while ended:
        low_bit = ended & -ended
        depths[low_bit.bit_length() - 1] = depth
        ended ^= low_bit
