"""Revocation with proof: a change of one epoch, in force on every holder before it is answered.

    1 the caller has authorised      2 intent and epoch: one durable commit of the registry
    3 tell every holder, in parallel, again until it acks      4 each swaps, fences, drops, acks
    5 complete when each believing holder acked, or its lease provably ran out
    6 receipt and audit outcome; erasing goes on and is added to the receipt holder by holder

Must never: answer before step 5, or wait for the audit log. Authorisation is the caller's. Read
`core/freshness.py` for when it is complete, `holders.py` for one worker.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Container, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, Self

from trunkline.control.book import Check, subject_of
from trunkline.control.changes import EpochRaised, Intent, SubjectEnabled
from trunkline.control.outbox import Outbox
from trunkline.control.receipts import (
    Erase,
    Erasure,
    Fence,
    HolderAck,
    Receipt,
    ReceiptBook,
    summed,
    weakest_erase,
    weakest_fence,
)
from trunkline.control.supervised import Supervised
from trunkline.core.epochs import EpochTable, Subject
from trunkline.core.freshness import Fencing, LeaseGrants, Order, Verb
from trunkline.core.records import Instant
from trunkline.errors import (
    AccessEnded,
    Busy,
    ChangeRefused,
    GatewayError,
    WorkerLost,
    WorkerTimeout,
)
from trunkline.observe import EventLog
from trunkline.ports.clock import Clock

MAX_RUNNING = 64
"""Revocations at a time, each of at most 3.13 s. One more is told to come back: nothing has
happened for it yet."""

MAX_RUNNING_OF_TENANTS = 48
"""Of these, by all administrators of tenants and organisations. The rest is for emergencies."""

MAX_RUNNING_OF_ONE = 4
"""Of these, by the administrators of one."""

MAX_FOLLOWED = 128
"""Revocations whose erasing is followed; the oldest is let go and its receipt stays as it is."""

AUDIT_PATIENCE_MS = 50.0
"""How long a receipt waits for its audit record. 3,130 ms of the longest lease and this are within
the 3.2 s that a revocation may take."""

FOLLOW_MS = 60_000.0
"""How long a holder is told after the fact, and asked what it has erased."""

COMMIT_ATTEMPTS = 8
"""Of one revocation, where other gateways raise the same subject."""

_FIRST_PAUSE_MS = 20.0
_LONGEST_PAUSE_MS = 1_000.0
_SHORTEST_WAIT_MS = 1.0
"""The loop's clock and the boot clock are two: never spin on the rest between them."""


class Registry(Protocol):
    """The one writer of epochs."""

    @property
    def table(self) -> EpochTable: ...

    async def commit(
        self, change: EpochRaised | SubjectEnabled, intent: Intent, check: Check | None = None
    ) -> int:
        """The revision of the change, durable and in `table` when this returns. Raises StoreDown
        where it cannot be said whether it happened, and what `check` raises in the step that
        commits.
        """
        ...


class Audit(Protocol):
    """The audit log. Each raises AuditDown while no sink takes the record."""

    async def intent(self, action: str, subject: Subject, intent: Intent) -> None: ...
    async def outcome(self, receipt: Receipt, intent: Intent) -> None: ...
    async def erased(self, erasure: Erasure, intent: Intent) -> None: ...


class Holder(Protocol):
    """Who may hold what is revoked: a worker, or the gateway itself."""

    @property
    def name(self) -> str: ...
    @property
    def fence(self) -> Fence: ...
    @property
    def erase(self) -> Erase: ...

    @property
    def is_told(self) -> bool:
        """False for a stock engine: the salt fences it, and it has nobody to ask."""
        ...

    async def revoke(self, order: Order) -> HolderAck:
        """Raises WorkerLost or WorkerTimeout; then it is told again."""
        ...

    async def erased(self, rev: int) -> Erasure:
        """Raises WorkerLost or WorkerTimeout."""
        ...


HERE = "gateway"
"""What receipts call the gateway of this process."""


class Peers(Protocol):
    """The other gateways at the same registry."""

    async def settle(self, rev: int, fencing: Fencing) -> None:
        """Expect all that may go by less than `rev`, which is committed; ack for all others."""
        ...


class Here(Protocol):
    """The gateway of this process, holder without a lease: its own table is the registry's."""

    def __call__(self, order: Order) -> HolderAck:
        """Fence attempts, drop directory and speculative entries, at once."""
        ...


@dataclass(slots=True, kw_only=True)
class RevokerParts:
    """What a revoker works with."""

    registry: Registry
    grants: LeaseGrants
    holders: Callable[[], Sequence[Holder]]
    """All workers as of now."""
    here: Here
    audit: Audit
    clock: Clock
    log: EventLog
    audit_patience_ms: float = AUDIT_PATIENCE_MS
    peers: Peers | None = None
    """None where the registry is this gateway's alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Command:
    """What somebody wants, before it is committed."""

    verb: Verb
    subject: Subject
    intent: Intent
    check: Check | None
    party: str
    """The tenant or organisation whose administrator it is; empty for those of the fleet."""


@dataclass(slots=True, kw_only=True)
class _Running:
    """One change on its way."""

    order: Order
    intent: Intent
    fencing: Fencing
    acks: list[HolderAck] = field(default_factory=list[HolderAck])
    has_acked: asyncio.Event = field(default_factory=asyncio.Event)
    is_over: asyncio.Event = field(default_factory=asyncio.Event)
    """Its receipt is in the book, or there will be none."""
    tasks: list[asyncio.Task[None]] = field(default_factory=list[asyncio.Task[None]])
    """One a holder that is told and asked."""

    def is_on_its_way(self) -> bool:
        return not self.is_over.is_set() or any(not task.done() for task in self.tasks)

    def take(self, ack: HolderAck) -> None:
        self.fencing.ack(ack.life)
        self.acks.append(ack)
        self.has_acked.set()


class Revoker(Supervised):
    """Carries revocations out. An async context manager: leaving it ends what is followed."""

    def __init__(self, parts: RevokerParts) -> None:
        super().__init__()
        self._parts = parts
        self.receipts = ReceiptBook()
        self.outbox = Outbox(parts.log)
        self._commits = asyncio.Lock()
        self._running_count = 0
        self._running_of_tenants = 0
        self._commands: Counter[str] = Counter()
        """By party: those that run, and those that joined one."""
        self._uncommitted: dict[tuple[Verb, Subject], asyncio.Future[Receipt]] = {}
        self._followed: list[_Running] = []

    @property
    def pending_count(self) -> int:
        """Those that are not in force with everybody yet."""
        return self._running_count

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self.begin(self.outbox.run(), "audit outbox")
        return self

    async def invalidate(
        self, subject: Subject, intent: Intent, check: Check | None = None, *, party: str = ""
    ) -> Receipt:
        """Make what is cached of `subject` unreachable; who runs finishes. Raises as `revoke`."""
        return await self._command(
            _Command(verb=Verb.INVALIDATE, subject=subject, intent=intent, check=check, party=party)
        )

    async def revoke(
        self, subject: Subject, intent: Intent, check: Check | None = None, *, party: str = ""
    ) -> Receipt:
        """As `invalidate`, and abort what runs and refuse what comes until `enable`.

        Goes on to its end when the caller is cancelled. Raises Busy when too many run, StoreDown
        when the registry cannot say that it is durable; nothing is proven then. Raises what
        `check` raises, in the step that commits.

        Those of one subject that wait for their commit together become one, with a record for each.
        `party` is the tenant or organisation whose administrator asks: these are few at a time, so
        that the fleet's own operators and officers always get through.
        """
        return await self._command(
            _Command(verb=Verb.REVOKE, subject=subject, intent=intent, check=check, party=party)
        )

    async def enable(
        self, subject: Subject, intent: Intent, check: Check | None = None
    ) -> int | None:
        """Admit a revoked subject again, under its new epoch; the revision. None if it was not
        revoked. Raises AuditDown: what widens is in the audit log first.
        """
        if subject not in self._parts.registry.table.barred:
            return None
        await self._parts.audit.intent("enable", subject, intent)
        async with self._commits:
            change = SubjectEnabled(subject=str(subject))
            return await self._parts.registry.commit(change, intent, check)

    async def resume(self, order: Order, intent: Intent) -> Receipt:
        """Carry out what the registry's log holds already, and a restart cut off."""
        return await self._to_the_end(self._enforce(order, intent, self._parts.clock.now()))

    async def follow(self, order: Order, intent: Intent) -> Receipt:
        """Carry out at this gateway and its workers what another one has committed, and answers
        for. Raises as `resume` does.
        """
        work = self._enforce(order, intent, self._parts.clock.now(), is_ours=False)
        return await self._to_the_end(work)

    def acknowledged(self, life: str, revs: Container[int]) -> None:
        """A life of another gateway has these in force."""
        for running in self._followed:
            if running.order.rev in revs and life not in running.fencing.acked:
                running.take(HolderAck(life=life))

    async def _command(self, command: _Command) -> Receipt:
        if not command.party:
            return await self._joined(command)
        if self._commands[command.party] >= MAX_RUNNING_OF_ONE:
            raise Busy(f"{MAX_RUNNING_OF_ONE} revocations of yours are on their way already")
        self._commands[command.party] += 1
        try:
            return await self._joined(command)
        finally:
            self._commands[command.party] -= 1
            if not self._commands[command.party]:
                del self._commands[command.party]

    async def _joined(self, command: _Command) -> Receipt:
        """By the one that waits for its commit and does the same, or by one of its own."""
        key = command.verb, command.subject
        while (waiting := self._uncommitted.get(key)) is not None:
            try:
                receipt = await asyncio.shield(waiting)
            except AccessEnded:
                continue  # the right of the other, which says nothing of ours
            self.outbox.put(partial(self._parts.audit.outcome, receipt, command.intent))
            return receipt
        limit = MAX_RUNNING_OF_TENANTS if command.party else MAX_RUNNING
        running = self._running_of_tenants if command.party else self._running_count
        if running >= limit or self._running_count >= MAX_RUNNING:
            raise Busy(f"{running} revocations are on their way, no more are taken")
        return await self._to_the_end(self._carry_out(command), command)

    async def _to_the_end(
        self, work: Coroutine[Any, Any, Receipt], command: _Command | None = None
    ) -> Receipt:
        """What `work` returns or raises. It is not cancelled with the caller. Where it carries out
        a command, others may join it until that is committed.
        """
        self._running_count += 1
        result: asyncio.Future[Receipt] = asyncio.get_running_loop().create_future()
        if command is not None:
            self._uncommitted[command.verb, command.subject] = result
            if command.party:
                self._running_of_tenants += 1
                result.add_done_callback(self._tenants_is_over)
        self.begin(self._settle(work, result), "revocation")
        return await asyncio.shield(result)

    def _tenants_is_over(self, _result: asyncio.Future[Receipt]) -> None:
        self._running_of_tenants -= 1

    async def _settle(
        self, work: Coroutine[Any, Any, Receipt], result: asyncio.Future[Receipt]
    ) -> None:
        try:
            result.set_result(await work)
        except GatewayError as error:
            self._parts.log.warning("revocation.failed", why=str(error))
            result.set_exception(error)
            result.exception()  # seen, should nobody wait for it any more
        except Exception as error:  # noqa: BLE001  # handed to the caller, who may be gone
            self._parts.log.error("revocation.failed", cause=error)
            result.set_exception(error)
            result.exception()  # seen, should nobody wait for it any more
        finally:
            self._running_count -= 1
            result.cancel()  # nothing where it has its result

    async def _carry_out(self, command: _Command) -> Receipt:
        parts, began_at = self._parts, self._parts.clock.now()
        verb, subject, intent = command.verb, command.subject, command.intent
        async with self._commits:
            # From here on its epoch may be in force, and what comes later be cached under it.
            del self._uncommitted[verb, subject]
            epoch, rev = await self._committed(command)
        assert parts.registry.table.rev >= rev, "a committed change is in the table"
        order = Order(rev=rev, subject=subject, epoch=epoch, verb=verb)
        return await self._enforce(order, intent, began_at)

    async def _committed(self, command: _Command) -> tuple[int, int]:
        """The epoch that was raised, and the revision that did it."""
        registry, subject, verb = self._parts.registry, command.subject, command.verb
        for attempt in range(COMMIT_ATTEMPTS):
            epoch = registry.table.epochs.get(subject, 0) + 1
            change = EpochRaised(
                subject=str(subject), epoch=epoch, verb=verb.value, bars=verb is Verb.REVOKE
            )
            try:
                return epoch, await registry.commit(change, command.intent, command.check)
            except ChangeRefused:
                # Another gateway may have raised it to just that in the meantime.
                is_raised = registry.table.epochs.get(subject, 0) >= epoch
                if not is_raised or attempt == COMMIT_ATTEMPTS - 1:
                    raise
        raise AssertionError("the last attempt returns or raises")

    async def _enforce(
        self, order: Order, intent: Intent, began_at: Instant, *, is_ours: bool = True
    ) -> Receipt:
        parts = self._parts
        fencing = parts.grants.fencing(order.rev, parts.clock.boot())
        fencing.require(HERE)
        running = _Running(order=order, intent=intent, fencing=fencing)
        self.outbox.put(partial(parts.audit.intent, order.verb.value, order.subject, intent))
        holders = list(parts.holders())
        self._follow(running, [holder for holder in holders if holder.is_told])
        try:
            running.take(replace(parts.here(order), life=HERE))
            if parts.peers is not None and is_ours:
                await parts.peers.settle(order.rev, fencing)
            await self._until_in_force(running)
            receipt = _receipt(running, holders, parts.clock.now() - began_at)
            self.receipts.add(receipt)
        finally:
            running.is_over.set()
        is_recorded = self.outbox.put(partial(self._record, receipt, intent))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(parts.audit_patience_ms / 1_000.0):
                await is_recorded.wait()
        return self.receipts.get(order.rev) or receipt

    async def _until_in_force(self, running: _Running) -> None:
        clock, fencing = self._parts.clock, running.fencing
        while not fencing.is_complete(boot := clock.boot()):
            running.has_acked.clear()
            with contextlib.suppress(TimeoutError):
                left_ms = max(_SHORTEST_WAIT_MS, fencing.complete_at() - boot)
                async with asyncio.timeout(left_ms / 1_000.0):
                    await running.has_acked.wait()

    async def _record(self, receipt: Receipt, intent: Intent) -> None:
        await self._parts.audit.outcome(receipt, intent)
        self.receipts.recorded(receipt.rev)

    def _follow(self, running: _Running, holders: list[Holder]) -> None:
        """Tell all of them at once, and ask what they have erased afterwards."""
        self._followed = [each for each in self._followed if each.is_on_its_way()]
        self._followed.append(running)
        over = [each for each in self._followed if each.is_over.is_set()]
        for oldest in over[: max(0, len(self._followed) - MAX_FOLLOWED)]:
            self._followed.remove(oldest)
            for task in oldest.tasks:
                task.cancel()
        for holder in holders:
            name = f"revision {running.order.rev} at {holder.name}"
            running.tasks.append(self.begin(self._serve(holder, running), name))

    async def _serve(self, holder: Holder, running: _Running) -> None:
        until = Instant(self._parts.clock.now() + FOLLOW_MS)
        try:
            await self._tell(holder, running, until)
            await running.is_over.wait()
            await self._ask_erased(holder, running, until)
        except Exception as error:  # noqa: BLE001  # one holder troubles no other; it counts as silent
            self._parts.log.error("revocation.holder_failed", cause=error, holder=holder.name)

    async def _tell(self, holder: Holder, running: _Running, until: Instant) -> None:
        async for _ in self._attempts(until):
            with contextlib.suppress(WorkerLost, WorkerTimeout):
                running.take(await holder.revoke(running.order))
                return

    async def _ask_erased(self, holder: Holder, running: _Running, until: Instant) -> None:
        erasure: Erasure | None = None
        async for _ in self._attempts(until):
            with contextlib.suppress(WorkerLost, WorkerTimeout):
                erasure = await holder.erased(running.order.rev)
                self.receipts.erased(erasure)
                if erasure.is_done:
                    break
        if erasure is not None:
            self.outbox.put(partial(self._parts.audit.erased, erasure, running.intent))

    async def _attempts(self, until: Instant) -> AsyncGenerator[None]:
        pause_ms = _FIRST_PAUSE_MS
        while self._parts.clock.now() < until:
            yield
            await asyncio.sleep(pause_ms / 1_000.0)
            pause_ms = min(2.0 * pause_ms, _LONGEST_PAUSE_MS)


def order_of(rev: int, change: EpochRaised) -> Order:
    """What holders are told of a change that is in the log."""
    return Order(
        rev=rev,
        subject=subject_of(change.subject),
        epoch=change.epoch,
        verb=Verb(change.verb),
    )


def _receipt(running: _Running, holders: Sequence[Holder], ms: float) -> Receipt:
    order, acks = running.order, running.acks
    return Receipt(
        rev=order.rev,
        subject=order.subject,
        verb=order.verb,
        epoch=order.epoch,
        acked=running.fencing.acked,
        fenced=running.fencing.silent(),
        fence=weakest_fence(holder.fence for holder in holders),
        erase=weakest_erase(holder.erase for holder in holders),
        aborted=sum(ack.aborted for ack in acks),
        condemned_blocks=sum(ack.condemned_blocks for ack in acks),
        condemned_bytes=summed(ack.condemned_bytes for ack in acks),
        ms=ms,
    )
