"""Rates and turns of tenants over real sockets: what a client is told, and what is left behind."""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass

from scripted import (
    GONE,
    FixedPicker,
    Reply,
    Running,
    ScriptedWorker,
    answering,
    in_two,
    json_answer,
    patient,
    post,
    running,
    until,
    wire,
    worker,
)

from hand_clock import HandClock
from trunkline.config import UpstreamConfig
from trunkline.core.epochs import Subject, SubjectKind
from trunkline.core.fleet import Fleet, WorkerState
from trunkline.core.overload import Priority
from trunkline.core.principals import Principal
from trunkline.core.records import Instant, Slot, WorkerId
from trunkline.gateway.allowance import Allowance
from trunkline.gateway.contracts import AttemptEnd, Endpoint, InferenceRequest, Pick
from trunkline.gateway.fair_line import FairPicker, LineLimits
from trunkline.gateway.tenancy import Tenancy

PREFILL_MS = 1_000.0
NOW = Instant(5_000.0)


@dataclass(slots=True, kw_only=True)
class Policy:
    requests_per_s: float | None = None
    tokens_per_s: float | None = None
    weight: float = 1.0
    priority: Priority = Priority.NORMAL


class BookedPicker(FixedPicker):
    """Has one worker, and a second of prefill for each request. Time does not shorten its queue."""

    def __init__(self, at: ScriptedWorker, fleet: Fleet) -> None:
        super().__init__(at)
        self.state = WorkerState(worker=at.name, slot=Slot(0), block_tokens=16)
        fleet.add(self.state)

    def read(self, request: InferenceRequest) -> None:
        assert isinstance(request.prompt, array), "the prompts here are token ids"

    def settle(self) -> None:
        pass

    def uncached_tokens(self, pick: Pick) -> int:
        return 100

    def picked(self, request: InferenceRequest, name: WorkerId, endpoint: Endpoint) -> Pick:
        pick = super().picked(request, name, endpoint)
        self.state.queue.start(pick.ticket, PREFILL_MS, NOW)
        return pick

    def first_byte(self, pick: Pick) -> None:
        super().first_byte(pick)
        self.state.queue.first_token(pick.ticket, NOW)

    def ended(self, pick: Pick, end: AttemptEnd, cached_tokens: int | None) -> None:
        super().ended(pick, end, cached_tokens)
        self.state.queue.end(pick.ticket, NOW)


@dataclass(slots=True, kw_only=True)
class Stand:
    gateway: Running
    policies: defaultdict[str, Policy]
    clock: HandClock
    line: FairPicker
    books: BookedPicker
    tenancy: Tenancy
    lease: list[bool]

    async def ask(self, tenant: str, tokens: int = 100) -> Reply:
        return await self.gateway.ask(of(tenant, tokens))

    async def wait(self, tenant: str) -> asyncio.Task[Reply]:
        """One that finds no room; returns when it waits."""
        count = self.line.waiting_count
        task = asyncio.ensure_future(self.ask(tenant))
        await until(lambda: self.line.waiting_count == count + 1)
        return task


def of(tenant: str, tokens: int = 100) -> bytes:
    body = {"model": "m", "prompt": list(range(tokens))}
    return post(body, path="/v1/completions", extra=f"authorization: Bearer {tenant}\r\n")


@contextlib.asynccontextmanager
async def standing(
    at: ScriptedWorker, *, upstream: UpstreamConfig | None = None, **limits: float
) -> AsyncIterator[Stand]:
    """A gateway whose worker has room for one request at a time."""

    def authenticate(authorization: bytes, _source: str) -> Principal:
        tenant = authorization.decode().removeprefix("Bearer ")
        return Principal(org="o", tenant=tenant, actor=tenant, auth_method="key")

    clock, lease = HandClock(ms=float(NOW)), [True]
    policies: defaultdict[str, Policy] = defaultdict(Policy)
    allowance = Allowance(policies.__getitem__, clock)
    tenancy = Tenancy(
        authenticate=authenticate, has_lease=lambda: lease[0], session_key=bytes(32), draw=bytes,
        allowance=allowance,
    )  # fmt: skip
    fleet = Fleet(virtual_nodes=4, now=NOW)
    books = BookedPicker(at, fleet)
    bounds = LineLimits(room_ms=1.0, **limits)  # pyright: ignore[reportArgumentType] - by name
    line = FairPicker(
        books, fleet=fleet, clock=clock, limits=bounds, allowance=allowance, renew=tenancy.renew,
    )  # fmt: skip
    async with running(line, tenancy=tenancy, upstream=upstream) as gateway:
        stand = Stand(
            gateway=gateway, policies=policies, clock=clock, line=line, books=books,
            tenancy=tenancy, lease=lease,
        )  # fmt: skip
        yield stand
        await gateway.settled()
        assert line.waiting_count == 0
        assert books.open_count == 0


# -- rates -----------------------------------------------------------------------------------------


@wire
async def test_over_its_rate_of_requests_a_tenant_is_told_when_to_come_again() -> None:
    async with worker(answering(json_answer())) as w, standing(w) as stand:
        stand.policies["a"] = Policy(requests_per_s=0.4)
        assert (await stand.ask("a")).status == 200
        stand.clock.ms += 300.0

        refused = await stand.ask("a")
        other = await stand.ask("b")

        assert refused.status == 429
        assert refused.error["code"] == "rate_limit_exceeded"
        assert refused.error["type"] == "rate_limit_error"
        assert refused.error["param"] is None
        assert "0.4 requests per second" in refused.error["message"]
        assert refused.headers["retry-after"] == "3"  # 2.2 s
        assert refused.headers["x-ratelimit-limit-requests"] == "1"
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert refused.headers["x-ratelimit-reset-requests"] == "3s"
        assert other.status == 200
        stand.clock.ms += 2_199.0
        assert (await stand.ask("a")).status == 429
        stand.clock.ms += 1.0
        assert (await stand.ask("a")).status == 200
        assert stand.gateway.front.counters.refusals["rate_limit_exceeded"] == 2


@wire
async def test_good_answers_tell_of_the_limits_of_those_who_have_them_alone() -> None:
    async with worker(answering(json_answer())) as w, standing(w) as stand:
        stand.policies["a"] = Policy(requests_per_s=10.0, tokens_per_s=1_000.0)
        stand.policies["b"] = Policy(tokens_per_s=1_000.0)

        headers = [(await stand.ask(tenant, 250)).headers for tenant in "abc"]

        told = [{n: v for n, v in h.items() if n.startswith("x-ratelimit")} for h in headers]
        tokens = {
            "x-ratelimit-limit-tokens": "1000",
            "x-ratelimit-remaining-tokens": "750",
            "x-ratelimit-reset-tokens": "250ms",
        }
        requests = {
            "x-ratelimit-limit-requests": "10",
            "x-ratelimit-remaining-requests": "9",
            "x-ratelimit-reset-requests": "100ms",
        }
        assert told == [requests | tokens, tokens, {}]


@wire
async def test_a_tenant_in_debt_for_tokens_waits_until_it_is_paid() -> None:
    async with worker(answering(json_answer())) as w, standing(w) as stand:
        stand.policies["a"] = Policy(tokens_per_s=100.0)
        assert (await stand.ask("a", 350)).status == 200

        refused = await stand.ask("a", 1)

        assert (refused.status, refused.error["code"]) == (429, "rate_limit_exceeded")
        assert "100 tokens per second" in refused.error["message"]
        assert refused.headers["retry-after"] == "3"  # 2.5 s
        assert len(stand.books.requests) == 1
        stand.clock.ms += 2_500.0
        assert (await stand.ask("a", 1)).status == 200


@wire
async def test_a_changed_policy_counts_from_the_next_request_on() -> None:
    async with worker(answering(json_answer())) as w, standing(w) as stand:
        stand.policies["a"] = Policy(requests_per_s=0.1)
        assert [(await stand.ask("a")).status for _ in range(2)] == [200, 429]
        stand.policies["a"] = Policy()
        assert [(await stand.ask("a")).status for _ in range(20)] == [200] * 20
        stand.policies["a"] = Policy(requests_per_s=0.1)
        assert [(await stand.ask("a")).status for _ in range(2)] == [200, 429]


@wire
async def test_an_unknown_caller_is_refused_before_any_rate_is_asked() -> None:
    """And a refused request costs nobody else a thing."""
    async with worker(answering(json_answer())) as w, standing(w) as stand:
        stand.policies["a"] = Policy(requests_per_s=1.0)
        statuses = [(await stand.ask("a")).status for _ in range(30)]
        assert statuses == [200] + [429] * 29
        assert len(stand.books.requests) == 1


# -- turns -----------------------------------------------------------------------------------------


@wire
async def test_tenants_take_turns_while_the_worker_has_no_room() -> None:
    go_on = asyncio.Event()
    async with worker(in_two(b"", go_on, json_answer())) as w, standing(w) as stand:
        first = asyncio.ensure_future(stand.ask("flood"))
        await stand.books.begun.wait()
        flood = [await stand.wait("flood") for _ in range(6)]
        quiet = await stand.wait("quiet")

        go_on.set()
        replies = await asyncio.gather(first, *flood, quiet)

        assert {reply.status for reply in replies} == {200}
        order = [asked.grant.principal.tenant for asked in stand.books.requests]
        assert order == ["flood", "flood", "quiet", *["flood"] * 5]


@wire
async def test_a_client_that_leaves_the_line_is_not_sent_and_keeps_nobody_waiting() -> None:
    go_on = asyncio.Event()
    async with worker(in_two(b"", go_on, json_answer())) as w, standing(w) as stand:
        first = asyncio.ensure_future(stand.ask("a"))
        await stand.books.begun.wait()
        leaving = await stand.gateway.client()
        await leaving.send(of("b"))
        await until(lambda: stand.line.waiting_count == 1)
        staying = await stand.wait("c")

        leaving.reset()
        await until(lambda: stand.line.waiting_count == 1)
        go_on.set()

        assert [(await first).status, (await staying).status] == [200, 200]
        tenants = [asked.grant.principal.tenant for asked in stand.books.requests]
        assert tenants == ["a", "c"]
        assert GONE not in [end for _, end, _ in stand.books.ends]


@wire
async def test_c96_a_full_line_is_429_with_a_time_to_come_again() -> None:
    go_on = asyncio.Event()
    async with (
        worker(in_two(b"", go_on, json_answer())) as w,
        standing(w, max_waiting_per_tenant=2, target_ms=0.0) as stand,
    ):
        first = asyncio.ensure_future(stand.ask("a"))
        await stand.books.begun.wait()
        waiting = [await stand.wait("a"), await stand.wait("a")]
        stand.clock.ms += 4_100.0

        refused = await stand.ask("a")

        assert (refused.status, refused.error["code"]) == (429, "busy")
        assert refused.headers["retry-after"] == "5"
        go_on.set()
        assert [(await task).status for task in (first, *waiting)] == [200] * 3


@wire
async def test_c96_a_wait_that_is_too_long_is_429_since_there_is_a_worker() -> None:
    go_on = asyncio.Event()
    async with (
        worker(in_two(b"", go_on, json_answer())) as w,
        standing(w, max_wait_ms=10_000.0) as stand,
    ):
        first = asyncio.ensure_future(stand.ask("a"))
        await stand.books.begun.wait()
        waiting = await stand.wait("b")

        stand.clock.ms += 10_000.0
        refused = await waiting

        assert (refused.status, refused.error["code"]) == (429, "busy")
        assert "10000 ms" in refused.error["message"]
        assert refused.headers["retry-after"]
        go_on.set()
        assert (await first).status == 200


@wire
async def test_a_wait_ends_with_the_first_byte_time_out_whatever_the_line_does() -> None:
    limits = patient(first_byte_timeout_ms=300)
    async with worker(answering(json_answer())) as w, standing(w, upstream=limits) as stand:
        queue = stand.books.state.queue
        queue.start(1_000_000, PREFILL_MS, NOW)  # nobody's request that times out meanwhile

        reply = await (await stand.wait("b"))

        assert reply.status == 504
        assert stand.line.accounts.left == 1
        assert stand.books.requests == []
        queue.end(1_000_000, NOW)


@wire
async def test_a_tenant_that_is_revoked_while_it_waits_is_refused_at_once() -> None:
    go_on = asyncio.Event()
    async with worker(in_two(b"", go_on, json_answer())) as w, standing(w) as stand:
        first = asyncio.ensure_future(stand.ask("a"))
        await stand.books.begun.wait()
        barred, good = await stand.wait("b"), await stand.wait("c")

        subject = Subject(kind=SubjectKind.TENANT, path="b")
        stand.tenancy.swap(stand.tenancy.table.raised(subject, 1, rev=1, bars=True))
        stand.gateway.front.fence()
        reply = await barred
        go_on.set()

        assert (reply.status, reply.error["code"]) == (403, "access_revoked")
        assert [(await first).status, (await good).status] == [200, 200]
        tenants = [asked.grant.principal.tenant for asked in stand.books.requests]
        assert tenants == ["a", "c"]


@wire
async def test_who_waited_through_an_invalidation_is_sent_under_the_new_epoch() -> None:
    """What was cached before must not serve what is sent after."""
    go_on = asyncio.Event()
    async with worker(in_two(b"", go_on, json_answer())) as w, standing(w) as stand:
        first = asyncio.ensure_future(stand.ask("a"))
        await stand.books.begun.wait()
        waiting = await stand.wait("b")

        subject = Subject(kind=SubjectKind.TENANT, path="b")
        stand.tenancy.swap(stand.tenancy.table.raised(subject, 1, rev=1, bars=False))
        stand.gateway.front.fence()
        go_on.set()

        assert [(await first).status, (await waiting).status] == [200, 200]
        assert [asked.grant.epochs.tenant for asked in stand.books.requests] == [0, 1]


@wire
async def test_a_gateway_that_stops_answers_those_in_the_line() -> None:
    go_on = asyncio.Event()
    async with worker(in_two(b"", go_on, json_answer())) as w, standing(w) as stand:
        first = asyncio.ensure_future(stand.ask("a"))
        await stand.books.begun.wait()
        waiting = await stand.wait("b")

        await stand.gateway.front.close()

        assert [(await first).status, (await waiting).status] == [503, 503]
        assert stand.line.waiting_count == 0


@wire
async def test_a_lost_lease_does_not_send_one_that_waits_twice() -> None:
    go_on = asyncio.Event()
    async with worker(in_two(b"", go_on, json_answer())) as w, standing(w) as stand:
        waiting = await stand.gateway.client()  # connected first, fenced first
        first = asyncio.ensure_future(stand.ask("a"))
        await stand.books.begun.wait()
        await waiting.send(of("b"))
        await until(lambda: stand.line.waiting_count == 1)

        stand.lease[0] = False
        stand.gateway.front.fence()
        go_on.set()

        assert (await waiting.reply()).status == 200
        await first  # its one worker was tried
        sent = [a for a in stand.books.requests if a.grant.principal.tenant == "b"]
        assert [asked.grant.scope for asked in sent] == [None]
        assert stand.line.accounts.released == 1
