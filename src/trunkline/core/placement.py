"""Where a prefix that nobody holds belongs: a hash ring with virtual nodes, two homes a prefix.

Homes are equal on every gateway that knows the same workers, without a word between them, and a
worker that joins or leaves moves only its own share of the prefixes (at most about 1.5 / N of all,
by test). Read `routing.py` next: homes are a preference with a price, never an order.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import islice

from trunkline.core.records import WorkerId

HOME_COUNT = 2


class HashRing:
    """Points of each worker on a circle of 64-bit numbers."""

    def __init__(self, virtual_nodes: int) -> None:
        """Raises ValueError below one virtual node."""
        if virtual_nodes < 1:
            raise ValueError(f"virtual_nodes is {virtual_nodes}, at least 1 is needed")
        self._virtual_nodes = virtual_nodes
        self._points: list[tuple[int, WorkerId]] = []
        self._workers: set[WorkerId] = set()

    def add(self, worker: WorkerId) -> None:
        """Put a worker on the ring; a second time changes nothing."""
        if worker in self._workers:
            return
        self._workers.add(worker)
        for point in self._points_of(worker):
            insort(self._points, (point, worker))

    def remove(self, worker: WorkerId) -> None:
        if worker in self._workers:  # looking through all points takes time
            self._workers.remove(worker)
            self._points = [item for item in self._points if item[1] != worker]

    def homes(self, key: bytes, count: int = HOME_COUNT) -> list[WorkerId]:
        """The first `count` distinct workers clockwise from a key of at least 8 bytes; fewer if
        there are fewer. O(log(workers x virtual nodes)) and a few steps.
        """
        return list(islice(self.walk(key), count))

    def walk(self, key: bytes) -> Iterator[WorkerId]:
        """All workers, each once, clockwise from a key of at least 8 bytes."""
        points = self._points
        seen: set[WorkerId] = set()
        start = bisect_left(points, (int.from_bytes(key[:8], "big"), WorkerId("")))
        for step in range(len(points)):
            worker = points[(start + step) % len(points)][1]
            if worker not in seen:
                seen.add(worker)
                yield worker

    def _points_of(self, worker: WorkerId) -> list[int]:
        """Each BLAKE2b digest of 64 bytes gives eight points."""
        points: list[int] = []
        for batch in range((self._virtual_nodes + 7) // 8):
            data = f"{worker}/{batch}".encode()
            digest = hashlib.blake2b(data, digest_size=64, person=b"ring").digest()
            points += [int.from_bytes(digest[i : i + 8], "big") for i in range(0, 64, 8)]
        return points[: self._virtual_nodes]
