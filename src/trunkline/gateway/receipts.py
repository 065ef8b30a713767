"""The latest decisions and what came true of them, for operators; and what of each one a client may
be told.

Who may not see decisions is told a name that means something to operators alone: workers and what
was predicted of them are a channel between tenants. Read `admin.py` for who asks.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from trunkline.core.decision import Decision, Outcome
from trunkline.core.records import WallTime
from trunkline.gateway.contracts import Grant
from trunkline.gateway.foregone import Ended

MAX_ATTEMPTS = 8
"""Kept of one request id, the latest: a client may use an id more than once."""


@dataclass(slots=True, kw_only=True, eq=False)
class Receipt:
    """One attempt: the choice, and what came of it once it is over."""

    decision: Decision
    at: WallTime
    """When it was chosen."""
    of: object
    """The request that it is an attempt of, whatever its id is."""
    outcome: Outcome | None = field(default=None)

    def as_dict(self) -> dict[str, Any]:
        """The whole record, ready for JSON."""
        return {
            "at": datetime.fromtimestamp(self.at, UTC).isoformat("T", "milliseconds"),
            **self.decision.as_dict(),
            "outcome": None if self.outcome is None else self.outcome.as_dict(),
        }


class Receipts:
    """The attempts of the last `kept` requests, by id. With `is_told`, answers carry the choice."""

    def __init__(self, *, kept: int, is_told: bool, key: bytes) -> None:
        """`key` (16 to 64 secret bytes) makes the names that tell nothing."""
        self._kept = kept
        self._is_told = is_told
        self._key = key
        self.ended_lately = Ended()
        self._attempts: OrderedDict[str, list[Receipt]] = OrderedDict()
        self._ids: dict[str, str] = {}
        """By the names that were told and mean nothing."""

    def __len__(self) -> int:
        return len(self._attempts)

    def newest_first(self) -> Iterator[Receipt]:
        """The last attempt of each request."""
        return (attempts[-1] for attempts in reversed(self._attempts.values()))

    def find(self, name: str) -> Sequence[Receipt]:
        """All attempts of a request, the first one first, by its id or by the name that its client
        was told. None for one that is not known, or not any more.
        """
        found = self._attempts.get(name) or self._attempts.get(self._ids.get(name, ""))
        return () if found is None else tuple(found)

    def requests(self, name: str) -> list[list[Receipt]]:
        """What `find` finds, of each request by itself, the latest first: clients choose ids, and
        two may choose one.
        """
        found: dict[object, list[Receipt]] = {}
        for receipt in self.find(name):
            found[receipt.of] = [*found.pop(receipt.of, []), receipt]
        return list(reversed(found.values()))

    def add(self, decision: Decision, at: WallTime, of: object) -> None:
        """`of`: equal in all attempts of one request."""
        if not self._kept:
            return
        before = self._attempts.pop(decision.request_id, [])[1 - MAX_ATTEMPTS :]
        self._attempts[decision.request_id] = [*before, Receipt(decision=decision, at=at, of=of)]
        if len(self._attempts) > self._kept:
            forgotten, _ = self._attempts.popitem(last=False)
            if self._ids:
                self._ids.pop(self._opaque(forgotten), None)

    def ended(self, decision: Decision, outcome: Outcome) -> None:
        """What came of a choice; of one that is not kept any more, nothing is kept."""
        if self._kept:
            self.ended_lately.add(decision, outcome)
        for receipt in self._attempts.get(decision.request_id, ()):
            if receipt.decision is decision:
                receipt.outcome = outcome

    def told(self, grant: Grant, decision: Decision) -> str:
        """What the client's answer says of it: all there is, a name, or nothing."""
        if not self._is_told:
            return ""
        if grant.sees_decisions:
            return decision.compact()
        name = self._opaque(decision.request_id)
        if decision.request_id in self._attempts:
            self._ids[name] = decision.request_id
        return name

    def _opaque(self, request_id: str) -> str:
        named = request_id.encode()
        made = hashlib.blake2b(named, digest_size=12, key=self._key, person=b"decision")
        return made.hexdigest()
