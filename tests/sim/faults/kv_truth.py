"""Ground truth of KV that moves: between device and host memory, and between workers.

The simulated engine's KV is other bytes for other tokens, and for another salt. So all that was
ever computed anywhere is written down by its bytes, with whose tokens these are; and whatever comes
up to a device, is published after a pull, or leaves for another worker is looked up there, whatever
the product calls it. Read `ground_truth.py` for what is written down on a device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from faults.crew import Life

TOKEN_BYTES = 4
Violate = Callable[[str, str], None]
Owner = tuple[object, ...] | None
"""Whose cache; None for nobody's, as one who wants nothing kept."""


@dataclass(frozen=True, slots=True)
class Content:
    """What is really in a block."""

    generation: int
    tokens: bytes
    """All from the beginning of its prompt to its end."""
    owner: Owner
    tenant: int
    epoch: int
    """The tenant's at the latest, as of when it was computed."""


class KvTruth:
    """Of all lives of all workers."""

    def __init__(self, block_tokens: int, acked: dict[int, int], violate: Violate) -> None:
        self._block_tokens = block_tokens
        self._acked = acked
        self._violate = violate
        self._computed: dict[bytes, list[Content]] = {}
        self._damaged: dict[bytes, list[Content]] = {}
        """What was in a block before the world flipped a bit of it."""
        self._slot_bytes: set[int] = set()
        self.published_blocks = 0
        self.sent_blocks = 0

    def computed(self, kv: bytes | bytearray, content: Content) -> None:
        known = self._computed.setdefault(bytes(kv), [])
        if content not in known:
            known.append(replace(content, generation=0))

    def damages(self, before: bytes, after: bytes) -> None:
        self._damaged[after] = self._computed.get(before, [])

    def came_up(
        self, life: Life, sequence: Any, owner: Owner, contents: dict[int, Content]
    ) -> None:
        """The last blocks of a sequence were copied to the device."""
        nobodys = Content(generation=0, tokens=b"", owner=None, tenant=-1, epoch=0)
        for block in sequence.blocks[len(sequence.blocks) - sequence.loaded_blocks :]:
            content = self._newest(block.kv, owner)
            if content is None:
                self._violate("I2", f"{life.name}#{life.number} uses what nobody computed")
            contents[id(block)] = replace(content or nobodys, generation=block.generation)

    def watch(self, life: Life) -> None:
        """Look at all that this life publishes after a pull."""
        assert life.built.storage is not None
        store = life.built.storage.tier.store
        self._slot_bytes.add(store.layout.block_bytes)
        publish = store.publish

        def published(token: bytes, manifests: Sequence[Any]) -> Any:
            made = publish(token, manifests)
            for manifest in manifests[: made.count]:
                self._check_published(life, store, manifest)
            return made

        store.publish = published

    def _check_published(self, life: Life, store: Any, manifest: Any) -> None:
        entry = store._catalogue.find(manifest.place.key)
        if entry is None or entry.slot is None:
            return
        self.published_blocks += 1
        told = f"block {manifest.place.index} at {life.name}#{life.number}"
        content = self._newest(entry.slot.view, None)
        size = (manifest.place.index + 1) * self._block_tokens * TOKEN_BYTES
        if content is None or len(content.tokens) != size:
            self._violate("I2", f"{told} was published, and is not what anybody computed")
        elif self._is_revoked(content):
            self._violate("I3", f"{told} of epoch {content.epoch} was published after the ack")

    def sends(self, buffers: Sequence[bytes | memoryview]) -> None:
        """A thread wants these sent."""
        for buffer in buffers:
            if len(buffer) not in self._slot_bytes:
                continue
            content = self._newest(buffer, None)
            if content is None:
                continue  # damaged; who takes it has to see that
            self.sent_blocks += 1
            if self._is_revoked(content):
                self._violate("I3", f"a block of epoch {content.epoch} was sent after the ack")

    def _is_revoked(self, content: Content) -> bool:
        return content.epoch < self._acked.get(content.tenant, 0)

    def _newest(self, kv: bytes | bytearray | memoryview, owner: Owner) -> Content | None:
        """Whose it is: of several that computed the same bytes, who wants it, and the last."""
        known = self._computed.get(bytes(kv), ())
        return max(known, key=lambda one: (one.owner == owner, one.epoch), default=None)

    def there(self, life: Life) -> list[Content]:
        """What lies behind the device of a worker."""
        assert life.built.storage is not None
        store = life.built.storage.tier.store
        found: list[Content] = []
        for _, manifest in store.resident():
            slot: Any = store._catalogue.find(manifest.place.key)
            data = bytes(slot.slot.view)
            found += self._computed.get(data) or self._damaged.get(data, [])
        return found
