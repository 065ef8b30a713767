"""A registry that somebody knows to be behind: a worker was told of changes that it has forgotten.

Then it was restored from a backup, its audit log with it, and nothing but the worker remembers what
was revoked since. That is said loudly, the log is filled up to what the worker knows, and the
fleet's epoch is raised, so that no block of the lost time can be named. Until then such a worker
takes no grant of ours and reuses nothing. Must never: let one worker's word fill the log without a
bound. Read `registry.py` for the mending, `holders.py` for who tells.
"""

from __future__ import annotations

import asyncio

from trunkline.control.registry import Registry
from trunkline.control.revocation import Revoker
from trunkline.core.epochs import Subject, SubjectKind
from trunkline.core.freshness import Order, Verb
from trunkline.errors import GatewayError
from trunkline.observe import EventLog
from trunkline.ports.clock import Clock

MAX_TOLD_AHEAD = 10_000
"""So many changes are believed lost on one worker's word. A worker that tells of more is wrong, or
has another gateway with a registry of its own."""

MAX_MENDINGS = 8
"""Since start: workers may each know more than those before. Two gateways that raise each other's
revisions at one worker end here."""

MAX_NAMED = 4_096
"""Workers that are remembered as named already; at the bound they are named once more."""

RETRY_S = 5.0


class BackupWatch:
    """Give `tell` to the holders, and a task to `run`."""

    def __init__(self, clock: Clock, log: EventLog) -> None:
        self._clock = clock
        self._log = log
        self._told: dict[str, int] = {}
        """By witness; those that were looked at are gone from it."""
        self._has_news = asyncio.Event()
        self._refused: set[str] = set()
        """Witnesses whose word was not taken: each is named once."""
        self.mendings = 0

    def tell(self, witness: str, rev: int) -> None:
        """This worker knows a revision that the registry does not. Bound: the workers there are."""
        self._told[witness] = rev
        self._has_news.set()

    async def run(self, registry: Registry, revoker: Revoker) -> None:
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            told, self._told = self._told, {}
            for witness, rev in sorted(told.items()):
                await self._weigh(witness, rev, registry, revoker)

    async def _weigh(self, witness: str, rev: int, registry: Registry, revoker: Revoker) -> None:
        try:
            await registry.catch_up()  # what another gateway changed is not lost
        except GatewayError:
            return  # it cannot be told: the worker will say it again
        if rev <= registry.rev:
            return
        lost = rev - registry.rev
        if lost > MAX_TOLD_AHEAD or self.mendings >= MAX_MENDINGS:
            if witness not in self._refused:
                if len(self._refused) >= MAX_NAMED:
                    self._refused.clear()
                self._refused.add(witness)
                self._log.error(
                    "registry.behind",
                    worker=witness,
                    worker_rev=rev,
                    rev=registry.rev,
                    meaning="it reuses nothing: its word is not taken for so many lost changes",
                    remedy="one gateway with tenants for each worker; or restart the worker",
                )
            return
        self._log.error(
            "registry.restored",
            worker=witness,
            lost_revisions=lost,
            meaning="a backup: changes were forgotten, revoked keys and tenants may be back",
            remedy="revoke again what was revoked since; all caches are made unreachable",
        )
        self.mendings += 1
        try:
            await self.mend(rev, registry, revoker)
        except GatewayError as error:
            self._log.error("registry.unmended", why=str(error))
            await asyncio.sleep(RETRY_S)  # the worker will tell it again

    async def mend(self, rev: int, registry: Registry, revoker: Revoker) -> None:
        """Fill the log up to `rev` and make all caches unreachable, everywhere. Raises what
        `Registry.mend` and `Revoker.resume` do.
        """
        mended = await registry.mend(rev, round(self._clock.wall() * 1_000))
        subject = Subject(kind=SubjectKind.FLEET)
        order = Order(
            rev=mended.rev,
            subject=subject,
            epoch=mended.book.table.epochs[subject],
            verb=Verb.INVALIDATE,
        )
        await revoker.resume(order, mended.intent)
