"""Tenants, a line, a real picker, and workers that compute one prompt after another, in virtual
time.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from array import array
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from picker_bench import COMPLETE, Bench, request

from trunkline.core.cost import CostModel
from trunkline.core.epochs import EpochTable, domain_of
from trunkline.core.identity import Epochs, Scope, ScopeKind
from trunkline.core.overload import Priority
from trunkline.core.principals import Principal
from trunkline.core.profiles import profile_named
from trunkline.core.records import WorkerId
from trunkline.errors import Busy
from trunkline.gateway.allowance import Allowance
from trunkline.gateway.contracts import OPEN_GRANT, Grant, InferenceRequest, Pick
from trunkline.gateway.fair_line import FairPicker, LineLimits

COST = CostModel(profile_named("tiny"), churn_weight=0.0)
NEVER = frozenset[WorkerId]()
LONG = 4_000
"""Tokens of a long prompt: 21 ms of the profile `tiny`."""
_REST = array("I", range(1, 20_000))


def fresh(number: int, count: int = LONG) -> array[int]:
    """A prompt that begins like no other."""
    return array("I", [number]) + _REST[: count - 1]


def prefill_ms(tokens: int) -> float:
    return COST.prefill_ms(tokens, 0)


@dataclass(slots=True, kw_only=True)
class Policy:
    """A quota as a tenant's policy has it."""

    requests_per_s: float | None = None
    tokens_per_s: float | None = None
    weight: float = 1.0
    priority: Priority = Priority.NORMAL


def grant(tenant: str) -> Grant:
    principal = Principal(org="o", tenant=tenant, actor=tenant, auth_method="key")
    scope = Scope(kind=ScopeKind.TENANT, org="o", tenant=tenant)
    return replace(
        OPEN_GRANT, principal=principal, scope=scope, domain=domain_of(scope, Epochs()),
        admission=EpochTable().admit(principal, ""),
    )  # fmt: skip


def asks(tenant: str, prompt: array[int], *, is_stream: bool = True) -> InferenceRequest:
    asked = request(prompt, is_stream=is_stream)
    asked.grant = grant(tenant)
    return asked


class Timers:
    """What a loop's `call_later` would do, when the test says so."""

    def __init__(self) -> None:
        self.due: list[tuple[float, Callable[[], None]]] = []

    def __call__(self, delay_s: float, work: Callable[[], None]) -> Timers:
        self.due.append((delay_s, work))
        return self

    def cancel(self) -> None:
        raise AssertionError("the line cancels no timer")

    def fire(self) -> None:
        due, self.due = self.due, []
        for _, work in due:
            work()


class Desk:
    """A line over a real picker; the workers do what the test says."""

    def __init__(self, *workers: WorkerId, renew: Callable[[InferenceRequest], None] | None = None,
                 **limits: float) -> None:  # fmt: skip
        self.bench = Bench(*workers, ttl_ms=1e9)
        self.policies: defaultdict[str, Policy] = defaultdict(Policy)
        self.timers = Timers()
        self.allowance = Allowance(self.policies.__getitem__, self.bench.clock)
        self.line = FairPicker(
            self.bench.picker,
            fleet=self.bench.fleet,
            clock=self.bench.clock,
            limits=LineLimits(**limits),  # pyright: ignore[reportArgumentType] - by name
            allowance=self.allowance,
            renew=renew,
            call_later=self.timers,
        )

    def pick(self, asked: InferenceRequest, tried: frozenset[WorkerId] = NEVER) -> Pick:
        """One that must not wait."""
        picked = self.line.pick(asked, tried)
        assert isinstance(picked, Pick), "it waits"
        return picked

    async def wait(self, asked: InferenceRequest) -> asyncio.Task[Pick]:
        """One that must."""
        waiting = self.line.pick(asked, NEVER)
        assert not isinstance(waiting, Pick), "it does not wait"
        task = asyncio.ensure_future(self._awaited(waiting))
        await turns()
        return task

    async def _awaited(self, waiting: Awaitable[Pick]) -> Pick:
        return await waiting

    def assert_clean(self) -> None:
        assert self.line.waiting_count == 0
        assert not self.line._arrivals
        assert len(self.timers.due) <= 1
        self.bench.assert_clean()


async def turns(count: int = 3) -> None:
    """Let what is ready run."""
    for _ in range(count):
        await asyncio.sleep(0)


@dataclass(slots=True, kw_only=True, eq=False)
class Served:
    """One request's life, in ms of virtual time."""

    tenant: str
    came_ms: float
    sent_ms: float = math.nan
    begun_ms: float = math.nan
    """First byte."""
    refused_ms: float = math.nan
    error: Busy | None = None
    uncached_tokens: int = 0
    task: asyncio.Task[None] | None = None

    @property
    def waited_ms(self) -> float:
        """In the line."""
        return self.sent_ms - self.came_ms

    @property
    def ttft_ms(self) -> float:
        return self.begun_ms - self.came_ms


class World(Desk):
    """The workers of the desk compute, first come, first served, as long as `tiny` takes."""

    def __init__(self, worker_count: int, *, room_ms: float, has_line: bool = True) -> None:
        super().__init__(*(WorkerId(f"w{n}") for n in range(worker_count)), room_ms=room_ms)
        self.front = self.line if has_line else self.bench.picker
        self.served: list[Served] = []
        self.order: list[Served] = []
        """In the order in which they were sent."""
        self._free_at_ms: defaultdict[WorkerId, float] = defaultdict(float)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def ask(self, tenant: str, prompt: array[int], at_ms: float) -> Served:
        """A request that will come at a time."""
        served = Served(tenant=tenant, came_ms=at_ms)
        self.served.append(served)
        self.at(at_ms, lambda: self._come(served, asks(tenant, prompt)))
        return served

    async def run(self) -> None:
        """To the end of all events."""
        while self._events or self.timers.due:
            for delay_s, work in self.timers.due:
                self.at(self.bench.clock.ms + delay_s * 1_000.0, work)
            self.timers.due.clear()
            at_ms, _, work = heapq.heappop(self._events)
            self.bench.clock.ms = max(self.bench.clock.ms, at_ms)
            work()
            await turns()

    def at(self, at_ms: float, work: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (at_ms, self._count, work))

    def _come(self, served: Served, asked: InferenceRequest) -> None:
        try:
            choice = self.front.pick(asked, NEVER)
        except Busy as error:
            self._refused(served, error)
            return
        if isinstance(choice, Pick):
            self._sent(served, choice)
        else:
            served.task = asyncio.ensure_future(self._go_later(served, choice))

    async def _go_later(self, served: Served, choice: Awaitable[Pick]) -> None:
        try:
            self._sent(served, await choice)
        except Busy as error:
            self._refused(served, error)

    def _refused(self, served: Served, error: Busy) -> None:
        served.refused_ms, served.error = self.bench.clock.ms, error

    def _sent(self, served: Served, pick: Pick) -> None:
        now_ms = self.bench.clock.ms
        decision = pick.ticket.decision
        served.sent_ms = now_ms
        served.uncached_tokens = decision.prompt_tokens - decision.matched_tokens
        self.order.append(served)
        start_ms = max(now_ms, self._free_at_ms[pick.worker])
        end_ms = start_ms + COST.prefill_ms(served.uncached_tokens, decision.matched_tokens)
        self._free_at_ms[pick.worker] = end_ms
        self.at(end_ms, lambda: self._begun(served, pick))

    def _begun(self, served: Served, pick: Pick) -> None:
        served.begun_ms = self.bench.clock.ms
        self.front.first_byte(pick)
        self.front.ended(pick, COMPLETE, None)
