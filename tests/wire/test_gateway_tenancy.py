"""Tenants on the client listener: narrowing, sessions, and the fence at the exit."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from scripted import (
    COMPLETE,
    END,
    GONE,
    SSE_HEAD,
    STREAM,
    FixedPicker,
    Running,
    answering,
    event,
    get,
    in_two,
    json_answer,
    post,
    running,
    staying,
    until,
    wire,
    worker,
)

from trunkline.config import LimitsConfig
from trunkline.core.epochs import Subject, SubjectKind
from trunkline.core.identity import ScopeKind
from trunkline.core.principals import Principal, Role
from trunkline.gateway.contracts import EVERYBODY, ClientError, Refusal
from trunkline.gateway.tenancy import Tenancy

ALICE = Principal(org="o1", tenant="t1", user="alice", actor="k1", auth_method="key")
CALLERS = {
    b"Bearer alice": ALICE,
    b"Bearer tenant": replace(ALICE, user="", actor="k2"),
    b"Bearer other": Principal(org="o1", tenant="t2", actor="k3", auth_method="key"),
    b"Bearer sessions": replace(ALICE, actor="k5", default_scope=ScopeKind.SESSION),
    b"Bearer auditor": replace(ALICE, actor="k6", roles=frozenset({Role.AUDITOR})),
    b"Bearer limited": replace(ALICE, actor="k4", models=frozenset({"x"})),
}
TENANT = Subject(kind=SubjectKind.TENANT, path="t1")


@dataclass
class Lease:
    is_valid: bool = True


def tenancy(lease: Lease, *, lets_begun_finish: bool = False) -> Tenancy:
    def authenticate(authorization: bytes, _source: str) -> Principal:
        if authorization not in CALLERS:
            raise ClientError(Refusal(status=401, code="invalid_api_key", message="no"))
        return CALLERS[authorization]

    drawn = iter(range(1, 1_000))
    return Tenancy(
        authenticate=authenticate, has_lease=lambda: lease.is_valid, session_key=bytes(32),
        draw=lambda count: next(drawn).to_bytes(count, "little"),
        lets_begun_finish=lets_begun_finish,
    )  # fmt: skip


def of(who: str, extra: str = "", body: object = None) -> bytes:
    return post(body or STREAM, extra=f"authorization: Bearer {who}\r\n{extra}")


def revoke(gateway: Running, held: Tenancy) -> None:
    """As the registry's subscriber does it: one reference, then whatever runs."""
    table = held.table
    epoch = table.epochs.get(TENANT, 0) + 1
    held.swap(table.raised(TENANT, epoch, rev=table.rev + 1, bars=True))
    gateway.front.fence()


@wire
async def test_a_request_may_narrow_its_scope_and_never_widen_it() -> None:
    held = tenancy(Lease())
    async with (
        worker(answering(json_answer())) as w,
        running(FixedPicker(w), tenancy=held) as gateway,
    ):
        for wish, kind in [
            ("", ScopeKind.TENANT),
            ("user", ScopeKind.USER),
            ("USER", ScopeKind.USER),
        ]:
            extra = f"x-cache-scope: {wish}\r\n" if wish else ""
            assert (await gateway.ask(of("alice", extra))).status == 200
            scope = gateway.picker.requests[-1].grant.scope
            assert (scope.kind, scope.tenant) == (kind, "t1")
        assert (await gateway.ask(of("alice", "x-cache-scope: none\r\n"))).status == 200
        assert gateway.picker.requests[-1].grant.scope is None
        for wish in ("org", "tenant", "public", "public/x", "", "user, none"):
            reply = await gateway.ask(of("alice", f"x-cache-scope: {wish}\r\n"))
            assert (reply.status, reply.error["code"]) == (403, "scope_widening")
        reply = await gateway.ask(of("tenant", "x-cache-scope: user\r\n"))
        assert (reply.status, reply.error["code"]) == (400, "scope_not_available")


@wire
async def test_a_session_is_named_by_the_gateway_and_worth_nothing_to_another() -> None:
    async with (
        worker(answering(json_answer())) as w,
        running(FixedPicker(w), tenancy=tenancy(Lease())) as gateway,
    ):
        wish = "x-cache-scope: session\r\n"
        first = await gateway.ask(of("alice", wish))
        name = first.headers["x-trunkline-session"]
        again = await gateway.ask(of("alice", f"{wish}x-trunkline-session: {name}\r\n"))
        scopes = [request.grant.scope for request in gateway.picker.requests]
        assert scopes[0] == scopes[1]
        assert scopes[0].session
        assert "x-trunkline-session" not in again.headers
        assert (await gateway.ask(of("alice", f"x-trunkline-session: {name}\r\n"))).status == 200
        assert gateway.picker.requests[-1].grant.scope == scopes[0], "naming it is wishing it"
        fresh = await gateway.ask(of("alice", wish))
        assert fresh.headers["x-trunkline-session"] != name
        for stolen in (name[:-1] + "!", "x" * 64, ""):
            reply = await gateway.ask(of("alice", f"{wish}x-trunkline-session: {stolen}\r\n"))
            assert (reply.status, reply.error["code"]) == (403, "unknown_session")


@wire
async def test_a_caller_whose_default_is_a_session_is_told_its_name_unasked() -> None:
    async with (
        worker(answering(json_answer())) as w,
        running(FixedPicker(w), tenancy=tenancy(Lease())) as gateway,
    ):
        first = await gateway.ask(of("sessions"))
        name = first.headers["x-trunkline-session"]
        again = await gateway.ask(of("sessions", f"x-trunkline-session: {name}\r\n"))
        scopes = [request.grant.scope for request in gateway.picker.requests]
        assert (first.status, again.status) == (200, 200)
        assert scopes[0] == scopes[1]
        assert "x-trunkline-session" not in again.headers
        assert (await gateway.ask(of("alice", f"x-trunkline-session: {name}\r\n"))).status == 200
        assert gateway.picker.requests[-1].grant.scope == scopes[0], "naming it is wishing it"


@wire
async def test_an_auditor_reads_no_model_and_reaches_no_worker() -> None:
    async with (
        worker(answering(json_answer())) as w,
        running(FixedPicker(w), tenancy=tenancy(Lease()), models=lambda _who: []) as gateway,
    ):
        for ask in (of("auditor"), get("/v1/models", extra="authorization: Bearer auditor\r\n")):
            reply = await gateway.ask(ask)
            assert (reply.status, reply.error["code"]) == (403, "role_missing")
        assert not w.seen


@wire
async def test_nobody_unknown_is_served_and_a_foreign_model_is_not_there() -> None:
    async with (
        worker(answering(json_answer())) as w,
        running(FixedPicker(w), tenancy=tenancy(Lease())) as gateway,
    ):
        assert (await gateway.ask(of("nobody"))).status == 401
        assert (await gateway.ask(post(STREAM))).status == 401
        reply = await gateway.ask(of("limited"))
        assert (reply.status, reply.error["code"]) == (404, "model_not_found")
        assert not gateway.picker.requests


@wire
async def test_a_revoked_tenant_gets_not_one_byte_more_and_its_worker_is_told() -> None:
    held, go_on, gone = tenancy(Lease()), asyncio.Event(), asyncio.Event()
    async with (
        worker(staying(SSE_HEAD + event("mine"), gone)) as w,
        worker(in_two(SSE_HEAD + event("theirs"), go_on, event("more") + END), "w1") as v,
        running(FixedPicker(w), tenancy=held) as gateway,
    ):
        revoked = await gateway.client()
        await revoked.send(of("alice"))
        await revoked.reader.readuntil(b"mine")
        gateway.picker.workers = [(v.name, v.endpoint)]
        other = await gateway.client()
        await other.send(of("other"))
        await other.reader.readuntil(b"theirs")

        revoke(gateway, held)
        rest = await revoked.reader.readuntil(b"0\r\n\r\n")
        await gone.wait()
        go_on.set()
        theirs = await other.reader.readuntil(b"[DONE]")

        assert b"access_revoked" in rest
        assert b"[DONE]" not in rest
        assert b"more" in theirs
        refused = await gateway.ask(of("alice"))
        assert (refused.status, refused.error["code"]) == (403, "access_revoked")
        await gateway.settled()
        assert sorted(gateway.picker.ends) == sorted([("w0", GONE, None), ("w1", COMPLETE, None)])


@wire
async def test_a_request_that_waits_for_its_worker_ends_with_the_revocation() -> None:
    held = tenancy(Lease())
    async with worker(staying()) as w, running(FixedPicker(w), tenancy=held) as gateway:
        client = await gateway.client()
        await client.send(of("alice"))
        await gateway.picker.begun.wait()

        revoke(gateway, held)
        reply = await client.reply()

        assert (reply.status, reply.error["code"]) == (403, "access_revoked")


@wire
async def test_bytes_that_come_between_the_swap_and_the_sweep_do_not_go_out() -> None:
    """The fence is at the write: it holds although nobody has looked at the open requests yet."""
    held, go_on = tenancy(Lease()), asyncio.Event()
    script = in_two(SSE_HEAD + event("before"), go_on, event("after") + END)
    async with worker(script) as w, running(FixedPicker(w), tenancy=held) as gateway:
        client = await gateway.client()
        await client.send(of("alice"))
        await client.reader.readuntil(b"before")

        held.swap(held.table.raised(TENANT, 1, rev=1, bars=True))
        go_on.set()
        rest = await client.reader.readuntil(b"0\r\n\r\n")

        assert b"access_revoked" in rest
        assert b"after" not in rest


@wire
async def test_an_invalidation_lets_what_runs_come_to_its_end() -> None:
    held, go_on = tenancy(Lease()), asyncio.Event()
    script = in_two(SSE_HEAD + event("before"), go_on, event("after") + END)
    async with worker(script) as w, running(FixedPicker(w), tenancy=held) as gateway:
        client = await gateway.client()
        await client.send(of("alice"))
        await client.reader.readuntil(b"before")

        held.swap(held.table.raised(TENANT, 1, rev=1, bars=False))
        gateway.front.fence()
        go_on.set()

        assert b"after" in await client.reader.readuntil(b"[DONE]")


@wire
async def test_a_lost_lease_stops_reuse_and_not_the_service() -> None:
    lease = Lease()
    async with (
        worker(answering(json_answer())) as w,
        running(FixedPicker(w), tenancy=tenancy(lease)) as gateway,
    ):
        lease.is_valid = False
        assert (await gateway.ask(of("alice"))).status == 200
        assert gateway.picker.requests[-1].grant.scope is None
        lease.is_valid = True
        assert (await gateway.ask(of("alice"))).status == 200
        assert gateway.picker.requests[-1].grant.scope is not None


@wire
async def test_a_lease_lost_before_the_answer_has_it_computed_anew_by_the_only_worker() -> None:
    lease, go_on = Lease(), asyncio.Event()
    async with (
        worker(in_two(b"", go_on, json_answer())) as w,
        running(FixedPicker(w), tenancy=tenancy(lease)) as gateway,
    ):
        client = await gateway.client()
        await client.send(of("alice"))
        await gateway.picker.begun.wait()

        lease.is_valid = False
        go_on.set()

        assert (await client.reply()).status == 200
        assert len(gateway.picker.requests) == 2
        assert gateway.picker.requests[-1].grant.scope is None


@wire
async def test_a_stream_that_began_under_a_lease_may_be_let_go_on_to_its_end() -> None:
    lease, go_on = Lease(), asyncio.Event()
    script = in_two(SSE_HEAD + event("before"), go_on, event("after") + END)
    lenient = tenancy(lease, lets_begun_finish=True)
    async with worker(script) as w, running(FixedPicker(w), tenancy=lenient) as gateway:
        client = await gateway.client()
        await client.send(of("alice"))
        await client.reader.readuntil(b"before")

        lease.is_valid = False
        go_on.set()
        rest = await client.reader.readuntil(b"0\r\n\r\n")

        assert b"after" in rest
        assert b"reuse_lease_lost" not in rest


@wire
async def test_a_stream_that_reused_ends_in_an_error_when_the_lease_is_lost() -> None:
    lease, go_on = Lease(), asyncio.Event()
    script = in_two(SSE_HEAD + event("before"), go_on, event("after") + END)
    async with worker(script) as w, running(FixedPicker(w), tenancy=tenancy(lease)) as gateway:
        client = await gateway.client()
        await client.send(of("alice"))
        await client.reader.readuntil(b"before")

        lease.is_valid = False
        go_on.set()
        rest = await client.reader.readuntil(b"0\r\n\r\n")

        assert b"reuse_lease_lost" in rest
        assert b"after" not in rest
        await until(lambda: gateway.front.counters.active_requests == 0)


@wire
async def test_an_open_gateway_offers_no_scopes_and_says_so() -> None:
    async with worker(answering(json_answer())) as w, running(FixedPicker(w)) as gateway:
        reply = await gateway.ask(post(extra="x-cache-scope: user\r\n"))
        assert (reply.status, reply.error["code"]) == (400, "scope_not_available")
        reply = await gateway.ask(post(extra="x-cache-scope: org\r\n"))
        assert (reply.status, reply.error["code"]) == (403, "scope_widening")


@wire
async def test_a_revoked_tenant_is_not_told_the_models_either() -> None:
    held = tenancy(Lease())
    async with (
        worker(answering(json_answer())) as w,
        running(FixedPicker(w), tenancy=held) as gateway,
    ):
        asking = get("/v1/models", "authorization: Bearer alice\r\n")
        assert (await gateway.ask(asking)).status == 200
        revoke(gateway, held)
        reply = await gateway.ask(asking)
        assert (reply.status, reply.error["code"]) == (403, "access_revoked")
        other = await gateway.ask(get("/v1/models", "authorization: Bearer other\r\n"))
        assert other.status == 200


@wire
async def test_a_tenant_that_takes_all_there_is_leaves_room_for_one_that_takes_little() -> None:
    limits = LimitsConfig(max_concurrent_requests=16)
    async with (
        worker(staying(SSE_HEAD + event("on"))) as w,
        running(FixedPicker(w), tenancy=tenancy(Lease()), limits=limits) as gateway,
    ):
        clients = [await gateway.client() for _ in range(14)]
        for client in clients:
            await client.send(of("alice"))
            await client.reader.readuntil(b"on")
        refused = await gateway.ask(of("alice"))
        assert (refused.status, refused.error["code"]) == (429, "busy")

        late = [await gateway.client() for _ in range(2)]
        for client in late:
            await client.send(of("other"))
            await client.reader.readuntil(b"on")
        full = await gateway.ask(of("other"))
        assert full.status == 429, "the bound of all holds for everybody"

        for client in (*clients, *late):
            client.close()
        await gateway.settled()
        again = await gateway.client()
        await again.send(of("alice"))
        await again.reader.readuntil(b"on")
        again.close()


@wire
async def test_where_all_are_one_tenant_nothing_is_kept_back_for_others() -> None:
    single = Tenancy(
        authenticate=lambda _authorization, _source: EVERYBODY, has_lease=lambda: True,
        session_key=bytes(32), draw=bytes,
    )  # fmt: skip
    limits = LimitsConfig(max_concurrent_requests=16)
    async with (
        worker(staying(SSE_HEAD + event("on"))) as w,
        running(FixedPicker(w), tenancy=single, limits=limits) as gateway,
    ):
        clients = [await gateway.client() for _ in range(16)]
        for client in clients:
            await client.send(post(STREAM))
            await client.reader.readuntil(b"on")
        assert (await gateway.ask(post(STREAM))).status == 429
        for client in clients:
            client.close()
        await gateway.settled()
