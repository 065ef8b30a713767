"""The agent beside the engine: it takes the gateway's leases and carries out its orders.

    POST /trunkline/lease    a grant for the ask of the last call; the answer is a new ask
    POST /trunkline/revoke   epochs swapped, sequences ended, blocks unreachable: then the answer
    GET  /trunkline/erased   how far the overwriting for one revision has come

The worker's port is reachable from gateways only. Must never: answer an order before it is carried
out. Read `kv/holder.py` for its books, `fence.py` for what a lease is good for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from trunkline.kv.holder import (
    MAX_BODY_BYTES,
    MAX_ERASURES,
    MAX_SUBJECTS,
    BadOrder,
    Holder,
    Parts,
    is_raised,
)
from trunkline.worker.blocks import PLAIN, Erasure, Stamp
from trunkline.worker.bodies import read_body
from trunkline.worker.engine import Engine
from trunkline.worker.fence import Fence
from trunkline.worker.jobs import Failure, Job
from trunkline.worker.requests import BadRequest
from trunkline.worker.storage import Storage

_FLEET = "fleet"
_REVOKED = Failure(status=500, message="the request was aborted: what it ran under was revoked")


@dataclass(slots=True, kw_only=True)
class Agent:
    """Handlers over all ranks of a worker."""

    engines: Sequence[Engine]
    fence: Fence
    storage: Storage | None = None
    max_subjects: int = MAX_SUBJECTS
    max_erasures: int = MAX_ERASURES
    _holder: Holder[Erasure] = field(init=False)

    def __post_init__(self) -> None:
        parts = Parts(receipt=lambda: Erasure(rev=0), condemn=self._condemn, abort=self._abort)
        self._holder = Holder(
            self.fence.freshness,
            self.fence.boot,
            parts,
            max_subjects=self.max_subjects,
            max_erasures=self.max_erasures,
        )

    def routes(self) -> list[Route]:
        return [
            Route("/trunkline/lease", self.lease, methods=["POST"]),
            Route("/trunkline/revoke", self.revoke, methods=["POST"]),
            Route("/trunkline/erased", self.erased),
        ]

    async def lease(self, request: Request) -> Response:
        raw = await read_body(request, MAX_BODY_BYTES)
        try:
            taken = self._holder.lease(raw)
        except BadOrder as error:
            raise _bad(error) from error
        if taken is not None:
            self.fence.grants[taken] += 1
        told = self._holder.ask()
        told |= {"fence": "worker", "erase": "namespace", "salt_regions": True}
        if self.storage is not None:
            self.storage.tier.tend()
            address = self.storage.address()
            told |= {} if address is None else {"pull": address}
        return JSONResponse(told)

    async def revoke(self, request: Request) -> Response:
        raw = await read_body(request, MAX_BODY_BYTES)
        try:
            erasure = self._holder.revoke(raw)
        except BadOrder as error:
            raise _bad(error) from error
        return JSONResponse(
            {
                "rev": erasure.rev,
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
        try:
            erasure = self._holder.erased(request.query_params.get("rev", ""))
        except BadOrder as error:
            raise _bad(error) from error
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

    def _condemn(self, raised: Mapping[str, int], erasure: Erasure) -> None:
        """In every tier."""
        for engine in self.engines:
            engine.condemn(lambda stamp: _is_stale(stamp, raised), erasure)
        if self.storage is not None:
            tier = self.storage.tier
            erasure.behind.append(tier.condemn(lambda owner: is_raised(owner, raised)))
            tier.erase_soon()

    def _abort(self, raised: Mapping[str, int], erasure: Erasure) -> None:
        for engine in self.engines:
            erasure.aborted += engine.abort_all(
                lambda job: _runs_under(job, raised, erasure), _REVOKED
            )


def _is_stale(stamp: Stamp, raised: Mapping[str, int]) -> bool:
    if stamp is PLAIN:
        return _FLEET in raised
    return is_raised(stamp, raised)


def _runs_under(job: Job, raised: Mapping[str, int], erasure: Erasure) -> bool:
    """Whether a job was admitted under what is revoked, or reads blocks of it."""
    ticket = job.terms.ticket
    if ticket is None:
        return _FLEET in raised
    if is_raised(ticket, raised):
        return True
    blocks = job.sequence.blocks if job.sequence is not None else ()
    return any(block.erasure is erasure for block in blocks)


def _bad(error: BadOrder) -> BadRequest:
    return BadRequest(str(error), error.param, error.status)
