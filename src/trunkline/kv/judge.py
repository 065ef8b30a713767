"""A worker's word for its KV store and its pulls: what may be used, kept, given or taken now.

By its freshness lease and its epochs. Asked from the threads of pulls as well, and under the
store's lock: it reads two tables and a clock, and never waits. Read `core/freshness.py` for what a
lease is good for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from trunkline.core.freshness import Freshness
from trunkline.core.records import BootInstant
from trunkline.core.transfer import Grant, Reason
from trunkline.kv.records import Owner
from trunkline.kv.tickets import Ticket


class Believing(Protocol):
    """What a worker believes, and the clock that ends it."""

    @property
    def freshness(self) -> Freshness: ...
    @property
    def boot(self) -> Callable[[], BootInstant]: ...


@dataclass(frozen=True, slots=True)
class StoreJudge:
    """`records.Judge` by the worker's lease and epochs."""

    fence: Believing

    def fault(self, owner: Owner) -> Reason | None:
        return _fault(self.fence, 0, owner.subjects, owner.epochs)


@dataclass(frozen=True, slots=True)
class PullHost:
    """`server.Host` by the same."""

    fence: Believing

    def fault(self, grant: Grant) -> Reason | None:
        return _fault(self.fence, grant.rev, grant.subjects, grant.epochs)


def ticket_fault(fence: Believing, ticket: Ticket) -> Reason | None:
    """Why nothing may be used now for a request with this ticket; None when it may."""
    return _fault(fence, ticket.rev, ticket.subjects, ticket.epochs)


def _fault(
    fence: Believing, rev: int, subjects: Iterable[str], epochs: Iterable[int]
) -> Reason | None:
    freshness = fence.freshness
    if not freshness.may_use(rev, fence.boot()):
        return Reason.LEASE
    return None if freshness.is_current(subjects, epochs) else Reason.EPOCH
