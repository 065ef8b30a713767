"""The latest decisions, for operators; and what of each one a client may be told.

Who may not see decisions is told a name that means something to operators alone: workers and what
was predicted of them are a channel between tenants. Read `admin.py` for who asks.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator

from trunkline.core.decision import Decision
from trunkline.gateway.contracts import Grant


class Receipts:
    """The last `kept` decisions by request id. With `is_told`, answers carry them."""

    def __init__(self, *, kept: int, is_told: bool, key: bytes) -> None:
        """`key` (16 to 64 secret bytes) makes the names that tell nothing."""
        self._kept = kept
        self._is_told = is_told
        self._key = key
        self._decisions: OrderedDict[str, Decision] = OrderedDict()

    def __len__(self) -> int:
        return len(self._decisions)

    def newest_first(self) -> Iterator[Decision]:
        return reversed(self._decisions.values())

    def find(self, name: str) -> Decision | None:
        """The decision of a request, by its id or by the name that its client was told."""
        found = self._decisions.get(name)
        if found is not None:
            return found
        return next((d for d in self.newest_first() if self._opaque(d.request_id) == name), None)

    def add(self, decision: Decision) -> None:
        if self._kept:
            self._decisions.pop(decision.request_id, None)
            self._decisions[decision.request_id] = decision
            if len(self._decisions) > self._kept:
                self._decisions.popitem(last=False)

    def told(self, grant: Grant, decision: Decision) -> str:
        """What the client's answer says of it: all there is, a name, or nothing."""
        if not self._is_told:
            return ""
        return decision.compact() if grant.sees_decisions else self._opaque(decision.request_id)

    def _opaque(self, request_id: str) -> str:
        named = request_id.encode()
        made = hashlib.blake2b(named, digest_size=12, key=self._key, person=b"decision")
        return made.hexdigest()
