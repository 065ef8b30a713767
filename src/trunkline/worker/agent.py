"""The agent beside the engine: it takes the gateway's leases and carries out its orders.

    POST /trunkline/lease    a grant for the ask of the last call; the answer is a new ask
    POST /trunkline/revoke   epochs swapped, sequences ended, blocks unreachable: then the answer
    GET  /trunkline/erased   how far the overwriting for one revision has come

The worker's port is reachable from gateways only. Must never: answer an order before it is carried
out. Read `fence.py` for what a lease is good for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from trunkline.core.freshness import Grant, Taken, Verb
from trunkline.kv.records import Owner
from trunkline.worker.blocks import PLAIN, Erasure, Stamp
from trunkline.worker.bodies import read_body
from trunkline.worker.engine import Engine
from trunkline.worker.fence import Fence
from trunkline.worker.jobs import Failure, Job
from trunkline.worker.requests import BadRequest
from trunkline.worker.storage import Storage
from trunkline.worker.ticket import MAX_EPOCH, MAX_REV, Ticket, subject_named

MAX_SUBJECTS = 65_536
"""Raised epochs a worker keeps. A grant beyond it is refused: no lease, so no reuse."""
MAX_ERASURES = 1_024
"""Receipts kept. At the bound the oldest that is complete goes, else the oldest."""
MAX_BODY_BYTES = 32 << 20
_FLEET = "fleet"
_REVOKED = Failure(status=500, message="the request was aborted: what it ran under was revoked")


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


@dataclass(slots=True, kw_only=True)
class Agent:
    """Handlers over all ranks of a worker."""

    engines: Sequence[Engine]
    fence: Fence
    storage: Storage | None = None
    max_subjects: int = MAX_SUBJECTS
    max_erasures: int = MAX_ERASURES
    _subjects: dict[str, None] = field(default_factory=dict[str, None])
    _orders: dict[int, _WireOrder] = field(default_factory=dict[int, _WireOrder])
    _early: OrderedDict[str, tuple[int, Erasure]] = field(
        default_factory=OrderedDict[str, tuple[int, Erasure]]
    )
    """What grants condemned whose order has not come yet: its receipt counts it."""
    _erasures: OrderedDict[int, Erasure] = field(default_factory=OrderedDict[int, Erasure])

    def routes(self) -> list[Route]:
        return [
            Route("/trunkline/lease", self.lease, methods=["POST"]),
            Route("/trunkline/revoke", self.revoke, methods=["POST"]),
            Route("/trunkline/erased", self.erased),
        ]

    async def lease(self, request: Request) -> Response:
        wire = await _decoded(request, _WireLease)
        if wire.grant is not None:
            self.fence.grants[self._take(wire.grant)] += 1
        freshness = self.fence.freshness
        told = {
            "ask": freshness.ask(self.fence.boot()),
            "boot_nonce": freshness.boot_nonce,
            "rev": freshness.rev,
            "fence": "worker",
            "erase": "namespace",
            "salt_regions": True,
        }
        if self.storage is not None:
            self.storage.tier.tend()
            address = self.storage.address()
            told |= {} if address is None else {"pull": address}
        return JSONResponse(told)

    async def revoke(self, request: Request) -> Response:
        wire = await _decoded(request, _WireOrder)
        _check_number("rev", wire.rev, MAX_REV)
        _check_number("epoch", wire.epoch, MAX_EPOCH)
        _check_subject(wire.subject)
        told = self._orders.get(wire.rev)
        if told is not None and told != wire:
            raise BadRequest(f"revision {wire.rev} was another order", "rev")
        erasure = self._erasures.get(wire.rev) or self._carry_out(wire)
        return JSONResponse(
            {
                "rev": wire.rev,
                "boot_nonce": self.fence.freshness.boot_nonce,
                "aborted": erasure.aborted,
                "condemned_blocks": erasure.condemned_blocks
                + sum(behind.condemned_blocks for behind in erasure.behind),
                "condemned_bytes": {
                    "device": erasure.condemned_bytes,
                    **self._behind(behind.condemned_bytes() for behind in erasure.behind),
                },
            }
        )

    async def erased(self, request: Request) -> Response:
        text = request.query_params.get("rev", "")
        if not (text.isascii() and text.isdigit() and len(text) <= len(str(MAX_REV))):
            raise BadRequest("rev must be a whole number", "rev")
        erasure = self._erasures.get(int(text))
        if erasure is None:
            raise BadRequest(f"no order of revision {int(text)} is known here", "rev", status=404)
        return JSONResponse(
            {
                "rev": erasure.rev,
                "done": erasure.is_done,
                "blocks": erasure.erased_blocks
                + sum(behind.erased_blocks for behind in erasure.behind),
                "bytes": {
                    "device": erasure.erased_bytes,
                    **self._behind(behind.erased_bytes() for behind in erasure.behind),
                },
            }
        )

    def _behind(self, counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
        """Bytes of the tiers that there are."""
        tiers = self.storage.tiers if self.storage else ()
        told = list(counts)
        return {tier: sum(count[tier] for count in told) for tier in tiers}

    # -- what a holder does ------------------------------------------------------------------------

    def _take(self, wire: _WireGrant) -> Taken:
        """What was made of it. A grant that cannot be believed arms nothing."""
        _check_number("rev", wire.rev, MAX_REV)
        if not wire.ttl_ms > 0:
            raise BadRequest(f"ttl_ms is {wire.ttl_ms}, needed is more than 0", "ttl_ms")
        for subject, epoch in wire.epochs.items():
            _check_subject(subject)
            _check_number("epochs", epoch, MAX_EPOCH)
        self._check_room(wire.epochs)
        freshness = self.fence.freshness
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
        erasure = Erasure(rev=0)
        self._condemn({subject: epoch}, erasure)
        if not erasure.is_empty:
            self._early[subject] = (epoch, erasure)
        if len(self._early) > self.max_erasures:
            self._early.popitem(last=False)

    def _carry_out(self, order: _WireOrder) -> Erasure:
        self._check_room({order.subject: order.epoch})
        self._subjects[order.subject] = None
        self.fence.freshness.obey(order.rev, order.subject, order.epoch)
        epoch, erasure = self._early.pop(order.subject, (order.epoch, Erasure(rev=0)))
        if epoch != order.epoch:
            erasure = Erasure(rev=0)
        erasure.rev = order.rev
        raised = {order.subject: order.epoch}
        self._condemn(raised, erasure)
        if order.verb is Verb.REVOKE:
            for engine in self.engines:
                erasure.aborted += engine.abort_all(
                    lambda job: _runs_under(job, raised, erasure), _REVOKED
                )
        self._keep(order, erasure)
        return erasure

    def _condemn(self, raised: Mapping[str, int], erasure: Erasure) -> None:
        """In every tier."""
        for engine in self.engines:
            engine.condemn(lambda stamp: _is_stale(stamp, raised), erasure)
        if self.storage is not None:
            tier = self.storage.tier
            erasure.behind.append(tier.condemn(lambda owner: _is_raised(owner, raised)))
            tier.erase_soon()

    def _check_room(self, epochs: Mapping[str, int]) -> None:
        new = sum(1 for subject in epochs if subject not in self._subjects)
        if len(self._subjects) + new > self.max_subjects:
            raise BadRequest(f"more than {self.max_subjects} subjects would be known", "epochs")

    def _keep(self, order: _WireOrder, erasure: Erasure) -> None:
        self._erasures[order.rev] = erasure
        self._orders[order.rev] = order
        if len(self._erasures) > self.max_erasures:
            done = (rev for rev, kept in self._erasures.items() if kept.is_done)
            oldest = next(done, next(iter(self._erasures)))
            del self._erasures[oldest], self._orders[oldest]


def _is_stale(stamp: Stamp, raised: Mapping[str, int]) -> bool:
    if stamp is PLAIN:
        return _FLEET in raised
    return _is_raised(stamp, raised)


def _is_raised(whose: Stamp | Owner | Ticket, raised: Mapping[str, int]) -> bool:
    epochs = zip(whose.subjects, whose.epochs, strict=True)
    return any(epoch < raised.get(subject, 0) for subject, epoch in epochs)


def _runs_under(job: Job, raised: Mapping[str, int], erasure: Erasure) -> bool:
    """Whether a job was admitted under what is revoked, or reads blocks of it."""
    ticket = job.terms.ticket
    if ticket is None:
        return _FLEET in raised
    if _is_raised(ticket, raised):
        return True
    blocks = job.sequence.blocks if job.sequence is not None else ()
    return any(block.erasure is erasure for block in blocks)


def _check_number(name: str, value: int, high: int) -> None:
    if not 0 <= value <= high:
        raise BadRequest(f"{name} is {value}, allowed are 0 to {high}", name)


def _check_subject(text: str) -> None:
    try:
        subject_named(text)
    except ValueError as error:
        raise BadRequest(f"{text[:80]!r} is not a subject", "subject") from error


async def _decoded(request: Request, kind: type[_Wire]) -> _Wire:
    raw = await read_body(request, MAX_BODY_BYTES)
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body is not what is wanted here: {error}") from error
