"""Which tokens have come to their end: a heap that forgets what was given back.

Pure. Must never: grow beyond a constant times what is live. Read `store.py` next.
"""

from __future__ import annotations

import heapq

from trunkline.core.records import Instant

_SLACK = 64


class Deadlines:
    """A set of tokens, each with an instant that may be moved to later."""

    def __init__(self) -> None:
        self._until: dict[bytes, Instant] = {}
        self._heap: list[tuple[Instant, bytes]] = []
        """One item for each live token, at its end or at an earlier one; and some of dead ones."""

    def __len__(self) -> int:
        return len(self._until)

    def add(self, token: bytes, until: Instant) -> None:
        assert token not in self._until
        self._until[token] = until
        heapq.heappush(self._heap, (until, token))

    def extend(self, token: bytes, until: Instant) -> None:
        """Never to earlier."""
        self._until[token] = max(self._until[token], until)

    def drop(self, token: bytes) -> None:
        del self._until[token]
        if len(self._heap) > 2 * len(self._until) + _SLACK:
            self._heap = [(until, token) for token, until in self._until.items()]
            heapq.heapify(self._heap)

    def due(self, now: Instant) -> list[bytes]:
        """The tokens whose end has come. They are dropped."""
        ended: list[bytes] = []
        while self._heap and self._heap[0][0] <= now:
            _, token = heapq.heappop(self._heap)
            until = self._until.get(token)
            if until is None:
                continue
            if until > now:
                heapq.heappush(self._heap, (until, token))
                continue
            del self._until[token]
            ended.append(token)
        return ended
