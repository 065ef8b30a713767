"""What a revocation proves: who acked, who was fenced by its lease's end, what was condemned.

Plain records, and a bounded book of the receipts given. Read `revocation.py` for who writes them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from trunkline.core.epochs import Subject
from trunkline.core.freshness import Verb

MAX_RECEIPTS = 1_024
"""Receipts that are kept for asking; the oldest goes first. The audit log keeps all of them."""


class Fence(Enum):
    """Where old blocks are refused; the later is the weaker."""

    WORKER = "worker"
    """At the point of use, by the worker's own table and lease."""
    GATEWAY = "gateway"
    """By the salt alone: nobody sends the old one again."""


class Erase(Enum):
    """How bytes go physically; the later is the weaker."""

    NAMESPACE = "namespace"
    WHOLE = "whole"
    """Only the whole cache at once, when idle."""
    RESTART = "restart"
    """Only by drain and restart."""


class AuditState(Enum):
    """Whether the outcome is in the audit log yet. The intent always is in the registry's."""

    RECORDED = "recorded"
    PENDING = "pending"


@dataclass(frozen=True, slots=True, kw_only=True)
class HolderAck:
    """One holder went over to the new epoch. Counts what it condemned, before any is erased."""

    life: str
    """Which life of it acked, as the leases call it."""
    aborted: int = 0
    condemned_blocks: int = 0
    condemned_bytes: Mapping[str, int] = field(default_factory=dict[str, int])
    """By tier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Erasure:
    """What one holder has physically erased for one revision."""

    holder: str
    rev: int
    is_done: bool
    blocks: int = 0
    bytes: Mapping[str, int] = field(default_factory=dict[str, int])
    """By tier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """One revocation or invalidation that is in force: no holder uses what was revoked."""

    rev: int
    subject: Subject
    verb: Verb
    epoch: int
    acked: tuple[str, ...]
    """Lives of holders that acked."""
    fenced: tuple[str, ...]
    """Lives of holders that said nothing, and whose lease provably ran out."""
    fence: Fence
    """The weakest in the fleet."""
    erase: Erase
    """The weakest in the fleet."""
    aborted: int
    condemned_blocks: int
    condemned_bytes: Mapping[str, int]
    """By tier."""
    ms: float
    """From the command until it was in force."""
    audit: AuditState = AuditState.PENDING
    erasures: tuple[Erasure, ...] = ()
    """What holders have reported so far, a line each."""


class ReceiptBook:
    """The latest receipts by revision; at the bound the oldest is forgotten."""

    def __init__(self) -> None:
        self._receipts: OrderedDict[int, Receipt] = OrderedDict()
        self.count = 0
        """All that were ever in it."""
        self.ms = 0.0
        """Sum of the time until each was in force."""

    def add(self, receipt: Receipt) -> None:
        self.count += 1
        self.ms += receipt.ms
        self._receipts[receipt.rev] = receipt
        if len(self._receipts) > MAX_RECEIPTS:
            self._receipts.popitem(last=False)

    def get(self, rev: int) -> Receipt | None:
        return self._receipts.get(rev)

    def latest(self) -> list[Receipt]:
        """Newest first."""
        return list(reversed(self._receipts.values()))

    def recorded(self, rev: int) -> None:
        """Its outcome is in the audit log."""
        if rev in self._receipts:
            self._receipts[rev] = replace(self._receipts[rev], audit=AuditState.RECORDED)

    def erased(self, erasure: Erasure) -> None:
        """A holder's newest word on what it erased replaces the one before."""
        receipt = self._receipts.get(erasure.rev)
        if receipt is not None:
            others = [e for e in receipt.erasures if e.holder != erasure.holder]
            self._receipts[erasure.rev] = replace(receipt, erasures=(*others, erasure))


def weakest_fence(fences: Iterable[Fence]) -> Fence:
    """Without any worker the gateway's salt is all there is."""
    return max(fences, key=list(Fence).index, default=Fence.GATEWAY)


def weakest_erase(erases: Iterable[Erase]) -> Erase:
    """Without any worker nothing is left to erase."""
    return max(erases, key=list(Erase).index, default=Erase.NAMESPACE)


def summed(byte_counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Bytes by tier, over all holders."""
    total: dict[str, int] = {}
    for counts in byte_counts:
        for tier, count in counts.items():
            total[tier] = total.get(tier, 0) + count
    return dict(sorted(total.items()))
