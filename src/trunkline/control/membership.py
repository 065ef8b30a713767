"""Which workers there are, what each can do, and whether it may be used now.

One supervised task a worker: find out what it is, let it join fleet and directory, then follow its
events, health and load until it leaves. A worker that cannot be asked is shown and tried again,
never guessed at. Must never: choose a worker (`core/routing.py` does), or let what one incarnation
said live on in the next. Read `member.py` for one worker, `engine.py` for what engines answer.
"""

from __future__ import annotations

import asyncio

from trunkline.control.flush import Flushed, flush
from trunkline.control.member import Member, MemberParts
from trunkline.control.supervised import Supervised
from trunkline.control.views import CheckView, Heartbeat, MemberView, WorkerSpec
from trunkline.core.digest import MAX_CHECKPOINTS_PER_HEARTBEAT
from trunkline.core.leases import LeaseTable
from trunkline.core.records import BootInstant, WorkerId
from trunkline.errors import ConfigError

MAX_WORKERS = 4_096
"""Most workers of one gateway; one more is refused with a clear error (C40)."""

_FAREWELL_BEAT_S = 0.1


class Membership(Supervised):
    """The workers of one gateway. An async context manager: leaving it ends all their tasks."""

    def __init__(self, parts: MemberParts, *, heartbeat_ttl_ms: float) -> None:
        super().__init__()
        self._parts = parts
        self._members: dict[str, Member] = {}
        self._lives: dict[str, asyncio.Task[None]] = {}
        self._farewells: dict[str, asyncio.Task[None]] = {}
        self._leases = LeaseTable()
        self._heartbeat_ttl_ms = heartbeat_ttl_ms

    def add(self, spec: WorkerSpec) -> str:
        """Take a worker in; its name. What is here already with the same spec stays as it is (C10).

        Raises ConfigError beyond 4,096 workers.
        """
        known = self._members.get(spec.name)
        if known is not None and known.spec == spec:
            return spec.name
        if known is None and len(self._members) >= MAX_WORKERS:
            raise ConfigError(f"{spec.name}: {MAX_WORKERS} workers are here, no more are taken")
        self.remove(spec.name)
        if self._parts.holdings is not None:
            self._parts.holdings.add(spec.name, spec.agent or spec.endpoint)
        member = Member(spec, self._parts)
        self._members[spec.name] = member
        self._lives[spec.name] = self.begin(member.live(), f"worker {spec.name}")
        return spec.name

    def remove(self, name: str) -> bool:
        """Forget a worker at once; requests it is answering go on. False when it is unknown."""
        member = self._members.pop(name, None)
        if member is None:
            return False
        self._lives.pop(name).cancel()
        self._stay(name)
        if self._parts.holdings is not None:
            self._parts.holdings.remove(name)
        workers = list(member.workers)
        member.leave()
        for worker in workers:
            self._leases.forget(worker)
        return True

    def spec(self, name: str) -> WorkerSpec | None:
        """How a worker was named when it was added; None when it is unknown."""
        member = self._members.get(name)
        return member.spec if member else None

    def drain(self, name: str, grace_secs: float | None = None) -> bool:
        """Send no new requests there; what runs goes on. With a grace the worker leaves when
        nothing runs there any more, or the grace is over: what still runs then is given up. False
        when it is unknown.
        """
        member = self._members.get(name)
        if member is None:
            return False
        self._stay(name)
        member.drain(is_draining=True)
        if grace_secs is not None:
            farewell = self._leave(name, member, grace_secs)
            self._farewells[name] = self.begin(farewell, f"farewell of {name}")
        return True

    def undrain(self, name: str) -> bool:
        """Send requests there again. False when it is unknown, or has left."""
        member = self._members.get(name)
        if member is None:
            return False
        self._stay(name)
        member.drain(is_draining=False)
        return True

    def _stay(self, name: str) -> None:
        farewell = self._farewells.pop(name, None)
        if farewell is not None:
            farewell.cancel()

    async def _leave(self, name: str, member: Member, grace_secs: float) -> None:
        clock, log = self._parts.clock, self._parts.log
        until = clock.now() + grace_secs * 1_000.0
        while member.in_flight_count and clock.now() < until:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(_FAREWELL_BEAT_S)
        member.stay.is_over = True
        log.info("worker.drained", worker=name, given_up=member.in_flight_count)
        del self._farewells[name]  # it is this task, and ends by itself
        self.remove(name)
        self._parts.on_left(name)

    async def check(self, name: str) -> CheckView | None:
        """Test a worker now; None when it is unknown, or cannot be reached."""
        member = self._members.get(name)
        return await member.check() if member is not None else None

    async def reset(self, name: str) -> Flushed | None:
        """Have a worker drop its whole prefix cache, and forget at once what it held; None when it
        is unknown.
        """
        member = self._members.get(name)
        if member is None:
            return None
        outcome = await flush(member.spec.endpoint, self._parts.fetch)
        for worker in member.workers if outcome is Flushed.DONE else ():
            self._parts.directory.clear(worker)
        return outcome

    def heartbeat(self, heartbeat: Heartbeat) -> str | None:
        """Take a heartbeat of a digest-mode worker; why it was refused, None when it was not."""
        member = self._members.get(heartbeat.name)
        if member is None or not member.workers:
            return f"{heartbeat.name}: no such worker here, or it is not reachable yet"
        if len(heartbeat.checkpoints) > MAX_CHECKPOINTS_PER_HEARTBEAT:
            return f"{heartbeat.name}: more than {MAX_CHECKPOINTS_PER_HEARTBEAT} checkpoint keys"
        if member.is_misread(heartbeat):
            return f"{heartbeat.name}: joined with another block size; it is asked anew"
        worker = member.workers[0]
        before = self._leases.boot_nonce(worker)
        refusal = self._leases.renew(worker, heartbeat.boot_nonce, heartbeat.counter)
        if refusal is None:
            ends_at = BootInstant(self._parts.clock.boot() + self._heartbeat_ttl_ms)
            is_new_life = before is not None and before != heartbeat.boot_nonce
            member.take_heartbeat(heartbeat, ends_at, is_new_life)
        return refusal

    def unheard(self) -> dict[WorkerId, str]:
        """Of which ranks nothing is heard now, and why."""
        return dict(pair for member in self._members.values() for pair in member.unheard())

    def views(self) -> list[MemberView]:
        """All workers as operators see them, in the order they were added."""
        return [member.view() for member in self._members.values()]

    def view(self, name: str) -> MemberView | None:
        member = self._members.get(name)
        return member.view() if member else None

    def is_starting(self) -> bool:
        """Workers were named and none has joined so far. A fleet that lost its workers is no start,
        and neither is one without any.
        """
        return bool(self._members) and not self._parts.model.has_joined

    @property
    def has_joined(self) -> bool:
        """Whether a worker of this model ever was in the fleet."""
        return self._parts.model.has_joined

    def lists(self, name: str) -> bool:
        """Whether a worker that is in the fleet answers to this name."""
        return any(name in member.models for member in self._members.values())

    def lengths(self, configured: int) -> list[tuple[str, int]]:
        """The model, and what its workers take of a prompt plus answer."""
        return [(name, self.max_model_len(configured)) for name in self.served_models()]

    def served_models(self) -> list[str]:
        """The model of this fleet; none until a worker has joined, where no setting names it."""
        name = self._parts.model.name
        return [name] if name else []

    def knows_model(self, name: str) -> bool:
        """Whether a worker answers to this name; True for any while none has joined."""
        if name == self._parts.model.name:
            return True
        listed = [member.models for member in self._members.values()]
        return any(name in models for models in listed) or not any(listed)

    def max_model_len(self, configured: int) -> int:
        """What every worker that says so can take, and no more than is configured."""
        told = [member.max_model_len for member in self._members.values()]
        return min([configured, *(most for most in told if most is not None)])
