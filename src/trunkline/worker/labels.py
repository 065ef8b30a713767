"""Names that the gateway gave to prefixes, tied to the blocks in which they end.

The worker cannot make the gateway's keys; it is told them with a request and reports those whose
block is still resident. Bounded: beyond the bound the one used longest ago is dropped, and the
report says that it is not complete. Read `heartbeat.py` next.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from trunkline.worker.cache import BlockCache

MAX_KEPT = 4_096


class LabelBook:
    """Labels of one rank's cache."""

    def __init__(self, cache: BlockCache, max_kept: int = MAX_KEPT) -> None:
        self._cache = cache
        self._max_kept = max_kept
        self._block_of: OrderedDict[str, bytes] = OrderedDict()
        self.is_complete = True

    def attach(self, labels: Iterable[tuple[int, str]], hashes: list[bytes]) -> None:
        """`labels` are `(tokens, label)`; `hashes` name the full blocks of that prompt."""
        for tokens, label in labels:
            depth, rest = divmod(tokens, self._cache.block_tokens)
            if rest or not 1 <= depth <= len(hashes):
                continue
            self._block_of[label] = hashes[depth - 1]
            self._block_of.move_to_end(label)
        if len(self._block_of) > self._max_kept:
            self._make_room()

    def resident(self) -> list[str]:
        """Labels whose block is in the cache now, least recently used first."""
        self._forget_evicted()
        return list(self._block_of)

    def _make_room(self) -> None:
        self._forget_evicted()
        while len(self._block_of) > self._max_kept:
            self._block_of.popitem(last=False)
            self.is_complete = False

    def _forget_evicted(self) -> None:
        gone = [
            label for label, block in self._block_of.items() if not self._cache.is_resident(block)
        ]
        for label in gone:
            del self._block_of[label]
        if not self._block_of:
            self.is_complete = True
