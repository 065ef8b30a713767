"""A worker as a holder of epochs: it takes the gateway's leases and carries out its orders.

    lease    a grant for the ask of the last call; the answer is a new ask
    revoke   epochs swapped, blocks unreachable: then the answer
    erased   how far the overwriting for one revision has come

What is to be done to blocks and to what runs is the worker's own (`Parts`); this keeps the books.
Must never: answer an order before it is carried out. Read `core/freshness.py` for the rules,
`control/holders.py` for who gives orders.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from trunkline.core.freshness import Freshness, Grant, Taken, Verb
from trunkline.core.records import BootInstant
from trunkline.kv.tickets import MAX_EPOCH, MAX_REV, subject_named

MAX_SUBJECTS = 65_536
"""Raised epochs a worker keeps. A grant beyond it is refused: no lease, so no reuse."""
MAX_ERASURES = 1_024
"""Receipts kept. At the bound the oldest that is complete goes, else the oldest."""
MAX_BODY_BYTES = 32 << 20


class BadOrder(ValueError):
    """What was sent is no lease and no order; `param` is the field at fault."""

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.status = status


class Stood(Protocol):
    """Something that stands on epochs: a block's owner, or a ticket."""

    @property
    def subjects(self) -> tuple[str, ...]: ...
    @property
    def epochs(self) -> tuple[int, ...]: ...


class Receipt(Protocol):
    """What one change of epochs condemned, and how far the overwriting has come."""

    rev: int

    @property
    def is_empty(self) -> bool: ...
    @property
    def is_done(self) -> bool: ...


_Receipt = TypeVar("_Receipt", bound=Receipt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts(Generic[_Receipt]):
    """What the worker does for its holder; `raised` is the new epoch of each subject."""

    receipt: Callable[[], _Receipt]
    """A new one, of revision 0."""
    condemn: Callable[[Mapping[str, int], _Receipt], None]
    """Nothing older can be found from now on, in any tier."""
    abort: Callable[[Mapping[str, int], _Receipt], None]
    """End what runs under something older."""


class _WireGrant(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    ask: str
    rev: int
    ttl_ms: float
    epochs: dict[str, int]


class _WireLease(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    grant: _WireGrant | None


class _WireOrder(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    rev: int
    subject: str
    epoch: int
    verb: Verb


_Wire = TypeVar("_Wire", _WireLease, _WireOrder)


class Holder(Generic[_Receipt]):
    """Not safe for threads: of one loop, or under its owner's lock. Raises BadOrder."""

    def __init__(
        self,
        freshness: Freshness,
        boot: Callable[[], BootInstant],
        parts: Parts[_Receipt],
        *,
        max_subjects: int = MAX_SUBJECTS,
        max_erasures: int = MAX_ERASURES,
    ) -> None:
        self._freshness = freshness
        self._boot = boot
        self._parts = parts
        self._max_subjects = max_subjects
        self._max_erasures = max_erasures
        self._subjects: dict[str, None] = {}
        self._orders: dict[int, _WireOrder] = {}
        self._early: OrderedDict[str, tuple[int, _Receipt]] = OrderedDict()
        """What grants condemned whose order has not come yet: its receipt counts it."""
        self._erasures: OrderedDict[int, _Receipt] = OrderedDict()

    def lease(self, raw: bytes | bytearray) -> Taken | None:
        """Take the grant of a call; None where there is none in it."""
        wire = _decoded(raw, _WireLease)
        return None if wire.grant is None else self._take(wire.grant)

    def ask(self) -> dict[str, Any]:
        """The answer to a lease, but for what the worker says of itself."""
        freshness = self._freshness
        return {
            "ask": freshness.ask(self._boot()),
            "boot_nonce": freshness.boot_nonce,
            "rev": freshness.rev,
        }

    def revoke(self, raw: bytes | bytearray) -> _Receipt:
        """Carry out an order; one that was carried out before is only told again."""
        wire = _decoded(raw, _WireOrder)
        _check_number("rev", wire.rev, MAX_REV)
        _check_number("epoch", wire.epoch, MAX_EPOCH)
        _check_subject(wire.subject)
        told = self._orders.get(wire.rev)
        if told is not None and told != wire:
            raise BadOrder(f"revision {wire.rev} was another order", "rev")
        return self._erasures.get(wire.rev) or self._carry_out(wire)

    def erased(self, rev: str) -> _Receipt:
        """The receipt of a revision, as its text in a query has it."""
        if not (rev.isascii() and rev.isdigit() and len(rev) <= len(str(MAX_REV))):
            raise BadOrder("rev must be a whole number", "rev")
        receipt = self._erasures.get(int(rev))
        if receipt is None:
            raise BadOrder(f"no order of revision {int(rev)} is known here", "rev", status=404)
        return receipt

    def _take(self, wire: _WireGrant) -> Taken:
        """What was made of it. A grant that cannot be believed arms nothing."""
        _check_number("rev", wire.rev, MAX_REV)
        if not wire.ttl_ms > 0:
            raise BadOrder(f"ttl_ms is {wire.ttl_ms}, needed is more than 0", "ttl_ms")
        for subject, epoch in wire.epochs.items():
            _check_subject(subject)
            _check_number("epochs", epoch, MAX_EPOCH)
        self._check_room(wire.epochs)
        freshness = self._freshness
        grant = Grant(ask=wire.ask, rev=wire.rev, ttl_ms=wire.ttl_ms, epochs=wire.epochs)
        before = {subject: freshness.epoch(subject) for subject in wire.epochs}
        taken = freshness.take(grant)
        for subject, epoch in before.items():
            if freshness.epoch(subject) > epoch:
                self._learn(subject, freshness.epoch(subject))
        return taken

    def _learn(self, subject: str, epoch: int) -> None:
        """A grant was faster than the order, or the order is lost."""
        self._subjects[subject] = None
        receipt = self._parts.receipt()
        self._parts.condemn({subject: epoch}, receipt)
        if not receipt.is_empty:
            self._early[subject] = (epoch, receipt)
        if len(self._early) > self._max_erasures:
            self._early.popitem(last=False)

    def _carry_out(self, order: _WireOrder) -> _Receipt:
        self._check_room({order.subject: order.epoch})
        self._subjects[order.subject] = None
        self._freshness.obey(order.rev, order.subject, order.epoch)
        epoch, receipt = self._early.pop(order.subject, (order.epoch, self._parts.receipt()))
        if epoch != order.epoch:
            receipt = self._parts.receipt()
        receipt.rev = order.rev
        raised = {order.subject: order.epoch}
        self._parts.condemn(raised, receipt)
        if order.verb is Verb.REVOKE:
            self._parts.abort(raised, receipt)
        self._keep(order, receipt)
        return receipt

    def _check_room(self, epochs: Mapping[str, int]) -> None:
        new = sum(1 for subject in epochs if subject not in self._subjects)
        if len(self._subjects) + new > self._max_subjects:
            raise BadOrder(f"more than {self._max_subjects} subjects would be known", "epochs")

    def _keep(self, order: _WireOrder, receipt: _Receipt) -> None:
        self._erasures[order.rev] = receipt
        self._orders[order.rev] = order
        if len(self._erasures) > self._max_erasures:
            done = (rev for rev, kept in self._erasures.items() if kept.is_done)
            oldest = next(done, next(iter(self._erasures)))
            del self._erasures[oldest], self._orders[oldest]


def is_raised(whose: Stood, raised: Mapping[str, int]) -> bool:
    """Whether something stands on an epoch below one of these."""
    epochs = zip(whose.subjects, whose.epochs, strict=True)
    return any(epoch < raised.get(subject, 0) for subject, epoch in epochs)


def _check_number(name: str, value: int, high: int) -> None:
    if not 0 <= value <= high:
        raise BadOrder(f"{name} is {value}, allowed are 0 to {high}", name)


def _check_subject(text: str) -> None:
    try:
        subject_named(text)
    except ValueError as error:
        raise BadOrder(f"{text[:80]!r} is not a subject", "subject") from error


def _decoded(raw: bytes | bytearray, kind: type[_Wire]) -> _Wire:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadOrder(f"the body is not what is wanted here: {error}") from error
