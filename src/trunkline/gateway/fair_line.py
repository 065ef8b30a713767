"""A picker with a line in front: while the fleet is full, tenants take turns by what they cost.

Workers serve what they were sent first come, first served, so whoever sends most gets most. Hence
no more is sent than keeps them busy: a worker has room while less than `room_ms` of prefill is
ahead of a new request there, the routing's own prediction, and the fleet has room while any worker
has. With room and nobody waiting a request passes straight through. Without, it waits in a
`FairQueue`, and goes when its turn has come and there is room: as attempts end or begin to answer,
and a few times a second since predictions fall due with time. What it costs its tenant is what the
chosen worker has to compute, known when it goes: cached tokens are free.

    pick ──(read)──► room, nobody waits ──────────────────────────► picked
        │       └──► waits ──(its turn, and room)──► picked
        │              └──(client left, no place, too long)──► out, nothing kept
        └──(overload: `core/overload.py`)──► refused unread

What a tenant that asks for little waits here, while others ask for all there is: for its turn, at
most one entry of each other tenant; and for room, at most the longest prefill ahead of it. What it
was sent behind is less than `room_ms` then. Whatever the others have waiting plays no part.

A further attempt never waits: it had its turn. A request belongs to one tenant by its grant, which
is renewed when it goes. Must never: look into a prompt, or keep anything of who left. Read
`core/fairness.py` for the order and its bounds, `picker.py` for the choice.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from trunkline.core.fairness import FairQueue, Full, Waiting
from trunkline.core.fleet import Fleet, WorkerState
from trunkline.core.overload import INTERVAL_MS, TARGET_MS, Outflow, Overload, Priority
from trunkline.core.rates import retry_after_s
from trunkline.core.records import Instant, WorkerId
from trunkline.errors import Busy
from trunkline.gateway.allowance import Allowance
from trunkline.gateway.contracts import AttemptEnd, InferenceRequest, Pick, Picker
from trunkline.gateway.deadline import unmet
from trunkline.gateway.metrics import Sample
from trunkline.ports.clock import Clock

ROOM_MS = 500.0
"""Enough that a worker never runs dry between two turns, little enough to be waited for: a full
batch of 8,192 tokens takes an 8B model 0.3 s and a 70B model on four GPUs 0.65 s, and a turn comes
within `TICK_S`. An idle fleet has room for any request; one tenant alone sees the same order as
without a line.
"""

TICK_S = 0.02
"""How often predictions are looked at while somebody waits."""

MAX_RELEASES = 32
"""Most requests that are sent in one turn of the loop: 2 ms or so."""


class ReadingPicker(Picker, Protocol):
    """What stands behind the line; `FleetPicker` is one."""

    def read(self, request: InferenceRequest) -> Awaitable[None] | None:
        """Make the prompt's tokens known, after which `pick` answers at once."""
        ...

    def settle(self) -> None:
        """Let predicted ends of prefills count, up to now."""
        ...

    def uncached_tokens(self, pick: Pick) -> int:
        """What the worker has to compute for it."""
        ...


class LineFull(Busy):
    """No place in the line, for this tenant or for anybody."""

    def __init__(self, text: str, wait_ms: float) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s(wait_ms)


class Overloaded(LineFull):
    """More is asked for than the fleet serves, and has been for a while."""

    code = "overloaded"


@dataclass(frozen=True, slots=True, kw_only=True)
class LineLimits:
    """Bounds of the line."""

    room_ms: float = ROOM_MS
    max_waiting: int = 8_192
    """At the bound the newest of the tenant that has most waiting has to leave, for one who has
    less; as many as `max_concurrent_requests` never meet it.
    """
    max_waiting_per_tenant: int = 2_048
    max_wait_ms: float = 600_000.0
    """After this a request is refused: capacity exists, and was contended for too long. A little
    less than `first_byte_timeout_ms`, or the exchange ends the wait itself, with a 504.
    """
    target_ms: float = TARGET_MS
    """What the oldest may wait without an end; 0 takes no wait for overload."""
    interval_ms: float = INTERVAL_MS


@dataclass(slots=True, kw_only=True)
class LineAccounts:
    """Plain counters since start."""

    passed: int = 0
    """First attempts that did not wait."""
    released: int = 0
    refused: int = 0
    """For want of a place, at once or when another tenant needed it."""
    timed_out: int = 0
    left: int = 0
    """Their client went while they waited."""
    waited_ms: float = 0.0
    """Sum over those that were released."""
    shed: dict[Priority, int] = field(default_factory=lambda: dict.fromkeys(Priority, 0))
    """Refused for overload, as they came or while they waited."""


class Timer(Protocol):
    def cancel(self) -> None: ...


CallLater = Callable[[float, Callable[[], None]], Timer]


@dataclass(slots=True, kw_only=True, eq=False)
class _Waiter:
    request: InferenceRequest
    outcome: asyncio.Future[Pick]
    since: Instant


class FairPicker:
    """See the module. A `Picker`; one a gateway, on its event loop."""

    def __init__(
        self,
        picker: ReadingPicker,
        *,
        fleet: Fleet,
        clock: Clock,
        limits: LineLimits | None = None,
        allowance: Allowance | None = None,
        renew: Callable[[InferenceRequest], None] | None = None,
        on_read: Callable[[InferenceRequest], None] | None = None,
        call_later: CallLater | None = None,
    ) -> None:
        """`fleet` is the one that `picker` chooses from. Without an `allowance` all tenants weigh
        the same and no tokens are charged. `renew` brings the grant of a request that waited up to
        date, or raises ClientError. `on_read` hears of each request once, its prompt read.
        `call_later` is the running loop's where none is given.
        """
        self.accounts = LineAccounts()
        self._picker = picker
        self._fleet = fleet
        self._clock = clock
        self._limits = limits or LineLimits()
        self._room_ms = self._limits.room_ms
        self._allowance = allowance
        self._renew = renew
        self._on_read = on_read
        self._call_later = call_later or _on_running_loop
        max_waiting = self._limits.max_waiting
        self._max_per_tenant = min(self._limits.max_waiting_per_tenant, max_waiting)
        self._queue: FairQueue[_Waiter] = FairQueue(
            max_entries=max_waiting, max_per_tenant=self._max_per_tenant
        )
        self._arrivals: OrderedDict[Waiting[_Waiter], None] = OrderedDict()
        """All that wait, oldest first."""
        self._overload = Overload(
            target_ms=self._limits.target_ms, interval_ms=self._limits.interval_ms
        )
        self._outflow = Outflow()
        self._timer: Timer | None = None
        self._hint = 0
        """Index of a worker that had room when it was last looked at."""

    @property
    def waiting_count(self) -> int:
        return len(self._queue)

    def take(self, limits: LineLimits) -> None:
        """Other times from here on; how many may wait stays as it was."""
        self._limits = limits
        self._overload.take(target_ms=limits.target_ms, interval_ms=limits.interval_ms)

    @property
    def is_overloaded(self) -> bool:
        return self._overload.is_on

    def samples(self) -> Iterable[Sample]:
        """For the metrics."""
        accounts = self.accounts
        yield Sample("queue_depth", self.waiting_count)
        yield Sample("line_ended_total", accounts.released, ("sent",))
        yield Sample("line_ended_total", accounts.refused, ("refused",))
        yield Sample("line_ended_total", accounts.timed_out, ("timed-out",))
        yield Sample("line_ended_total", accounts.left, ("client-gone",))
        for priority, count in accounts.shed.items():
            yield Sample("line_shed_total", count, (priority.value,))
        yield Sample("line_overloaded", float(self.is_overloaded))
        yield Sample("line_waited_seconds_total", accounts.waited_ms / 1_000.0)

    # -- the Picker's three verbs ----------------------------------------------------------------

    def pick(self, request: InferenceRequest, tried: frozenset[WorkerId]) -> Pick | Awaitable[Pick]:
        """As the picker behind; awaitable while the request waits, too. Raises RateLimited for a
        tenant in debt, Overloaded, and from the awaitable LineFull (429).
        """
        if tried or request.had_turn:
            self._bring_up_to_date(request)
            return self._picker.pick(request, tried)
        if self._arrivals or self._overload.is_on:
            self._admit(request)
        reading = self._picker.read(request)
        if reading is not None:
            return self._pick_later(request, reading)
        self._charge(request)
        if not self._arrivals and self._has_room():
            self.accounts.passed += 1
            return self._picker.pick(request, tried)
        return self._wait(request)

    def first_byte(self, pick: Pick) -> None:
        self._picker.first_byte(pick)
        if self._arrivals:
            self._release()

    def pulled(self, pick: Pick, told: bytes) -> None:
        self._picker.pulled(pick, told)

    def ended(self, pick: Pick, end: AttemptEnd, cached_tokens: int | None) -> None:
        try:
            self._picker.ended(pick, end, cached_tokens)
        finally:
            if self._arrivals:
                self._release()

    # -- waiting ---------------------------------------------------------------------------------

    def _charge(self, request: InferenceRequest) -> None:
        """Against its tenant's rate of tokens, unless its tenant can have no place anyway; once,
        however many attempts it takes.
        """
        if self._allowance is not None:
            tenant = request.grant.principal.tenant
            if self._arrivals and self._queue.depth(tenant) >= self._max_per_tenant:
                raise self._full()
            self._allowance.charge(tenant, request)
        if self._on_read is not None:
            self._on_read(request)
        request.had_turn = True

    def _admit(self, request: InferenceRequest) -> None:
        """Raises Overloaded, or DeadlineUnmet, for one that would wait for too long. Its prompt
        need not be read for that.
        """
        now, tenant = self._clock.now(), request.grant.principal.tenant
        is_overloaded = self._overload.look(self._longest_wait_ms(), now)
        if not (self._arrivals and (is_overloaded or request.deadline is not None)):
            return
        ahead = self._queue.ahead_of(tenant, self._weight(tenant))
        turn_ms = self._outflow.wait_ms(ahead, now)
        if request.deadline is not None and now + turn_ms > request.deadline:
            raise unmet(turn_ms, request.deadline - now)
        if not is_overloaded:
            return
        priority = self._priority(tenant)
        if priority is Priority.LOW:
            ahead = float(len(self._queue))
            turn_ms = self._outflow.wait_ms(ahead, now)
        wait_ms = turn_ms + self._room()
        if wait_ms > self._overload.allowed_ms(priority) and ahead >= self._least_kept():
            raise self._shed(tenant, wait_ms, now)

    def _least_kept(self) -> int:
        """One that waits for each worker: where a single prompt takes longer than all may wait,
        nobody would wait else.
        """
        return len(self._fleet.usable(self._clock.boot())[0])

    def _shed(self, tenant: str, wait_ms: float, now: Instant) -> Overloaded:
        self._overload.refused(now)
        self.accounts.shed[self._priority(tenant)] += 1
        text = f"the fleet is overloaded: it would wait for {wait_ms / 1_000.0:.1f} s"
        return Overloaded(text, wait_ms)

    def _weight(self, tenant: str) -> float:
        return 1.0 if self._allowance is None else self._allowance.weight(tenant)

    def _priority(self, tenant: str) -> Priority:
        return Priority.NORMAL if self._allowance is None else self._allowance.priority(tenant)

    async def _pick_later(self, request: InferenceRequest, reading: Awaitable[None]) -> Pick:
        await reading
        self._charge(request)
        if self._arrivals or not self._has_room():
            return await self._wait(request)
        self.accounts.passed += 1
        return self._pick_now(request)

    async def _wait(self, request: InferenceRequest) -> Pick:
        """Cancelled, it leaves nothing behind: no entry, and no attempt that nobody carries out."""
        outcome = asyncio.get_running_loop().create_future()
        waiter = _Waiter(request=request, outcome=outcome, since=self._clock.now())
        entry = self._enter(waiter)
        try:
            return await outcome
        except asyncio.CancelledError:
            self._leave(entry)
            raise

    def _enter(self, waiter: _Waiter) -> Waiting[_Waiter]:
        tenant = waiter.request.grant.principal.tenant
        weight = self._weight(tenant)
        if not self._arrivals:
            self._outflow.resume(waiter.since)
        added = self._queue.add(tenant, 1.0, waiter, weight=weight)  # the cost is told when it goes
        if isinstance(added, Full):
            raise self._full()
        self._arrivals[added.entry] = None
        if added.pushed_out is not None:
            self._refuse(added.pushed_out, self._full())
        if len(self._arrivals) == 1:
            self._release()  # room may have come since it was looked for
        return added.entry

    def _leave(self, entry: Waiting[_Waiter]) -> None:
        """The client went. What had just been picked for it is given back."""
        self.accounts.left += 1
        if self._queue.cancel(entry):
            del self._arrivals[entry]
        outcome = entry.item.outcome
        if outcome.done() and not outcome.cancelled() and outcome.exception() is None:
            self.ended(outcome.result(), AttemptEnd.CLIENT_GONE, None)

    def _refuse(self, entry: Waiting[_Waiter], error: Exception) -> None:
        """End the wait of one that is out of the queue already."""
        del self._arrivals[entry]
        if not entry.item.outcome.done():
            entry.item.outcome.set_exception(error)

    def _full(self) -> LineFull:
        self.accounts.refused += 1
        return LineFull("too many requests wait for a worker", self._longest_wait_ms())

    def _longest_wait_ms(self) -> float:
        """How long the oldest has waited so far: the best guess at how long it takes."""
        oldest = next(iter(self._arrivals), None)
        return 0.0 if oldest is None else self._clock.now() - oldest.item.since

    # -- letting go ------------------------------------------------------------------------------

    def _release(self) -> None:
        """Send those whose turn it is while there is room."""
        self._picker.settle()
        left = MAX_RELEASES
        while self._arrivals and left and self._has_room():
            entry = self._queue.take()
            assert entry is not None, f"{len(self._arrivals)} wait and the queue is empty"
            self._outflow.left(self._clock.now())
            self._let_go(entry)
            left -= 1
        self._overload.look(self._longest_wait_ms(), self._clock.now())
        if self._arrivals and self._timer is None:
            self._timer = self._call_later(TICK_S if left else 0.0, self._tick)

    def _let_go(self, entry: Waiting[_Waiter]) -> None:
        del self._arrivals[entry]
        waiter = entry.item
        if waiter.outcome.done():
            self._queue.recharge(entry, 0.0)  # its client left, and its task has not run yet
            return
        try:
            pick = self._pick_now(waiter.request)
        except Exception as error:  # noqa: BLE001 - raised where the pick is awaited
            self._queue.recharge(entry, 0.0)
            waiter.outcome.set_exception(error)
            return
        self._queue.recharge(entry, float(self._picker.uncached_tokens(pick)))
        self.accounts.released += 1
        self.accounts.waited_ms += self._clock.now() - waiter.since
        waiter.outcome.set_result(pick)

    def _pick_now(self, request: InferenceRequest) -> Pick:
        self._bring_up_to_date(request)
        pick = self._picker.pick(request, frozenset())
        assert isinstance(pick, Pick), "the prompt was read, and is to be read again"
        return pick

    def _bring_up_to_date(self, request: InferenceRequest) -> None:
        if self._renew is not None:
            self._renew(request)

    def _tick(self) -> None:
        self._timer = None
        now = self._clock.now()
        self._end_waits(now)
        if self._overload.look(self._longest_wait_ms(), now):
            self._slough(now)
        if self._arrivals:
            self._release()

    def _end_waits(self, now: Instant) -> None:
        """Of those for whom there was no room for too long."""
        while self._longest_wait_ms() >= self._limits.max_wait_ms:
            entry = next(iter(self._arrivals))
            self._queue.cancel(entry)
            self.accounts.timed_out += 1
            text = f"no worker had room within {self._limits.max_wait_ms:.0f} ms"
            self._refuse(entry, LineFull(text, self._limits.room_ms))

    def _slough(self, now: Instant) -> None:
        """Let the oldest go that have waited for long, down to what is served soon: a burst is
        never thrown away whole, and no worker runs dry.
        """
        while self._longest_wait_ms() >= self._overload.slough_ms:
            wait_ms = self._outflow.wait_ms(len(self._queue), now)
            if wait_ms <= self._overload.target_ms or len(self._queue) <= self._least_kept():
                return
            entry = next(iter(self._arrivals))
            self._queue.cancel(entry)
            self._refuse(entry, self._shed(entry.tenant, wait_ms, now))

    # -- room ------------------------------------------------------------------------------------

    def _has_room(self) -> bool:
        """Whether any worker has; nearly always the one that had it last. So has a fleet of which
        no worker is usable: the picker says so, and nobody waits in vain.
        """
        states = self._fleet.usable(self._clock.boot())[0]
        now = self._clock.now()
        hint = self._hint
        if hint < len(states) and self._is_open(states[hint], now):
            return True
        for index, state in enumerate(states):
            if self._is_open(state, now):
                self._hint = index
                return True
        # Where all are above their watermark, routing takes them all.
        if all(state.is_full for state in states):
            room_ms = self._room()
            return not states or any(s.queue.queue_ms(now) < room_ms for s in states)
        return False

    def _room(self) -> float:
        return self._overload.room_ms(self._room_ms)

    def _is_open(self, state: WorkerState, now: Instant) -> bool:
        if state.is_full:
            return False
        queue_ms = state.queue.queue_ms(now)
        if queue_ms == 0.0 and self._queue.tenant_count and not self._arrivals:
            self._queue.restart()  # an idle worker and nobody waiting: nobody kept anybody waiting
        return queue_ms < self._room()


def _on_running_loop(delay_s: float, work: Callable[[], None]) -> Timer:
    return asyncio.get_running_loop().call_later(delay_s, work)
