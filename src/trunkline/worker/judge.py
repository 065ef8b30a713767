"""The fence's word for the KV store and for pulls: what may be used, kept, given or taken now.

Asked from the threads of pulls as well, and under the store's lock: it reads two tables and a
clock, and never waits. Read `fence.py` for what a lease is good for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from trunkline.core.transfer import Grant, Reason
from trunkline.kv.records import Owner
from trunkline.worker.fence import Fence


@dataclass(frozen=True, slots=True)
class StoreJudge:
    """`kv.records.Judge` by the worker's lease and epochs."""

    fence: Fence

    def fault(self, owner: Owner) -> Reason | None:
        return _fault(self.fence, 0, owner.subjects, owner.epochs)


@dataclass(frozen=True, slots=True)
class PullHost:
    """`kv.server.Host` by the same."""

    fence: Fence

    def fault(self, grant: Grant) -> Reason | None:
        return _fault(self.fence, grant.rev, grant.subjects, grant.epochs)


def _fault(fence: Fence, rev: int, subjects: Iterable[str], epochs: Iterable[int]) -> Reason | None:
    freshness = fence.freshness
    if not freshness.may_use(rev, fence.boot()):
        return Reason.LEASE
    return None if freshness.is_current(subjects, epochs) else Reason.EPOCH
