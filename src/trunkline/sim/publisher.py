"""A modelled worker's event stream: numbered batches, a ring for replay, and a link that may lose
them.

The numbers, the ring and the absence of any other guarantee are those of real engines; what repairs
the losses is the real `core/feed.py`. Read `model.py` next.
"""

from __future__ import annotations

import random
from array import array
from collections import deque

from trunkline.core.events import BlocksRemoved, BlocksStored, CacheEvent, EventBatch
from trunkline.core.records import EngineHash, Tier

RING_BATCHES = 10_000
"""What vLLM keeps for replay."""


class Publisher:
    """One worker's publisher. `loss` is the share of live batches that never arrive."""

    def __init__(self, *, loss: float, rng: random.Random) -> None:
        self._loss = loss
        self._rng = rng
        self._seq = 0
        self._ring: deque[EventBatch] = deque(maxlen=RING_BATCHES)

    def publish(self, events: list[CacheEvent], *, is_sure: bool = False) -> EventBatch | None:
        """The batch as it will arrive, or None when the link loses it; `is_sure` is never lost."""
        batch = EventBatch(seq=self._seq, events=tuple(events), fingerprint=self._seq)
        self._seq += 1
        self._ring.append(batch)
        if self._loss and not is_sure and self._rng.random() < self._loss:
            return None
        return batch

    def replay(self, from_seq: int) -> list[EventBatch]:
        """Every batch that the ring still holds from a number on."""
        return [batch for batch in self._ring if batch.seq >= from_seq]


def stored_event(
    keys: list[bytes], block_ids: array[int], first: int, salt: str, tier: Tier = Tier.DEVICE
) -> BlocksStored:
    """Blocks from index `first` on became resident; the model's engine hash is the key's first 64
    bits.

    A trace's block id stands for the whole block, so the run has one "token" a block.
    """
    return BlocksStored(
        hashes=array("Q", [engine_hash(key) for key in keys[first:]]),
        parent=EngineHash(engine_hash(keys[first - 1])) if first else None,
        tokens=block_ids[first:],
        block_tokens=1,
        tier=tier,
        salt=salt,
    )


def removed_event(keys: list[bytes], tier: Tier = Tier.DEVICE) -> BlocksRemoved:
    """These blocks were evicted."""
    return BlocksRemoved(hashes=array("Q", [engine_hash(key) for key in keys]), tier=tier)


def engine_hash(key: bytes) -> int:
    return int.from_bytes(key[:8], "big")
