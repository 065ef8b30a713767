"""The admin port's paths about tenants: keys, policies, revocations, audit, public prefixes.

Owns bodies and shapes, strict and bounded. What a name stands for, and whether it lies within the
caller's reach, the `TenancyBackend` knows; what it answers None is one 404 for all. Must never: put
a key's secret anywhere but into the answer to its making. Read `backend.py` next, for the records.
"""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from trunkline.core.audit import Kind
from trunkline.core.identity import ScopeKind
from trunkline.core.overload import Priority
from trunkline.core.principals import Role
from trunkline.gateway.backend import (
    AuditOrder,
    Call,
    KeyOrder,
    Page,
    PageOrder,
    PublicOrder,
    TenancyBackend,
)
from trunkline.gateway.listener import (
    call_of,
    decode,
    json_response,
    missing,
    problem_response,
    query_of,
    read_body,
    whole_number,
)
from trunkline.gateway.permissions import Act
from trunkline.gateway.tenant_views import Policy

MAX_PUBLIC_TOKENS = 131_072
MAX_PAGE = 1_000
MAX_EXPIRES_S = 10 * 366 * 86_400
MAX_PUBLIC_EXPIRES_S = 90 * 86_400

TENANCY_OFF = (
    "this gateway serves a single tenant; to have tenants and keys, start it with --auth keys"
    " (and without --api-key)"
)

Handler: TypeAlias = Callable[[Request], Awaitable[Response]]
TenancyRoute: TypeAlias = tuple[str, str, Act, Handler]

_Name: TypeAlias = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}\Z")]
_NoName: TypeAlias = Annotated[str, Meta(pattern=r"^([a-z0-9][a-z0-9._-]{0,63})?\Z")]
_Word: TypeAlias = Annotated[str, Meta(max_length=256)]
_Words: TypeAlias = Annotated[
    tuple[Annotated[str, Meta(min_length=1, max_length=256)], ...], Meta(max_length=256)
]
_Reason: TypeAlias = Annotated[str, Meta(max_length=500)]
_Subject: TypeAlias = Annotated[str, Meta(min_length=1, max_length=600)]
_Bytes: TypeAlias = Annotated[int, Meta(ge=0, le=2**53)]
_Rate: TypeAlias = Annotated[float, Meta(gt=0, le=1e12)]
_ScopeName: TypeAlias = Literal["none", "session", "user", "tenant", "org"]


class _OrgBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: _Name
    reason: _Reason = ""


class _OrgPolicyBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    shared: bool
    reason: _Reason = ""


class _TenantBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: _Name
    org: _NoName = ""
    create_org: bool = False
    reason: _Reason = ""


class _TenantPolicyBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    scope: _ScopeName = "tenant"
    shared: bool = False
    requests_per_s: _Rate | None = None
    tokens_per_s: _Rate | None = None
    cache_floor_bytes: _Bytes = 0
    cache_cap_bytes: _Bytes | None = None
    weight: Annotated[float, Meta(gt=0, le=1_000)] = 1.0
    priority: Literal["low", "normal", "high"] = "normal"
    reason: _Reason = ""


class _KeyBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tenant: _Name
    org: _NoName = ""
    create_tenant: bool = False
    user: _Word = ""
    roles: Annotated[tuple[Role, ...], Meta(min_length=1, max_length=len(Role))] = (
        Role.TENANT_USER,
    )
    models: _Words | None = None
    adapters: _Words | None = None
    expires_in_s: Annotated[int, Meta(ge=1, le=MAX_EXPIRES_S)] | None = None
    not_before_ms: _Bytes = 0
    key_class: _Word = ""
    scope: Literal["none", "session", "user"] | None = None
    reason: _Reason = ""


class _RevokeBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    subject: _Subject
    reason: Annotated[str, Meta(min_length=1, max_length=500)]


class _SubjectBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    subject: _Subject
    reason: _Reason = ""


class _PublicBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: _Name
    owner: _Name
    model: Annotated[str, Meta(min_length=1, max_length=256)]
    tokens: Annotated[
        list[Annotated[int, Meta(ge=0, lt=2**32)]], Meta(min_length=1, max_length=MAX_PUBLIC_TOKENS)
    ]
    block_tokens: Annotated[int, Meta(ge=1, le=65_536)]
    audience: Literal["all"] | Annotated[tuple[_Name, ...], Meta(min_length=1, max_length=1_000)]
    expires_in_s: Annotated[int, Meta(ge=1, le=MAX_PUBLIC_EXPIRES_S)]
    reason: Annotated[str, Meta(min_length=1, max_length=500)]
    weights_digest: _Word = ""
    tokenizer_digest: _Word = ""
    template_digest: _Word = ""


class _ReasonBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    reason: _Reason = ""


def tenancy_routes(backend: TenancyBackend | None) -> list[TenancyRoute]:
    """Method, path, act and handler of each path; without a backend they all say why."""
    if backend is None:
        return [(method, path, act, _off) for method, path, act, _ in _ROUTES]
    tenancy = _Tenancy(backend)
    return [(method, path, act, partial(show, tenancy)) for method, path, act, show in _ROUTES]


async def _off(_request: Request) -> Response:
    return problem_response(409, TENANCY_OFF, "tenancy_off")


class _Tenancy:
    """The handlers, one for each route."""

    def __init__(self, backend: TenancyBackend) -> None:
        self._backend = backend

    # -- organisations and tenants ---------------------------------------------------------------

    async def orgs(self, request: Request) -> Response:
        call, order = call_of(request), _page_order(query_of(request, "limit", "after"))
        return self._list("orgs", call, await self._backend.orgs(call, order))

    async def add_org(self, request: Request) -> Response:
        body = decode(_ORG, await read_body(request))
        done = await self._backend.add_org(_because(request, body.reason), body.name)
        return json_response(done, 201)

    async def set_org_policy(self, request: Request) -> Response:
        body = decode(_ORG_POLICY, await read_body(request))
        call, name = _because(request, body.reason), request.path_params["name"]
        return self._answer(
            call, await self._backend.set_org_policy(call, name, shared=body.shared)
        )

    async def tenants(self, request: Request) -> Response:
        call, order = call_of(request), _page_order(query_of(request, "limit", "after"))
        page = await self._backend.tenants(call, order)
        others = {"others": self._backend.others(call)}
        return self._answer(call, page and {"tenants": page.items, "next": page.next, **others})

    async def add_tenant(self, request: Request) -> Response:
        body = decode(_TENANT, await read_body(request))
        call = _because(request, body.reason)
        done = await self._backend.add_tenant(
            call, body.name, org=body.org, create_org=body.create_org
        )
        return self._answer(call, done, 201)

    async def set_tenant_policy(self, request: Request) -> Response:
        body = decode(_TENANT_POLICY, await read_body(request))
        policy = Policy(
            scope=ScopeKind(body.scope),
            shared=body.shared,
            requests_per_s=body.requests_per_s,
            tokens_per_s=body.tokens_per_s,
            cache_floor_bytes=body.cache_floor_bytes,
            cache_cap_bytes=body.cache_cap_bytes,
            weight=body.weight,
            priority=Priority(body.priority),
        )
        call, name = _because(request, body.reason), request.path_params["name"]
        return self._answer(call, await self._backend.set_tenant_policy(call, name, policy))

    # -- keys ------------------------------------------------------------------------------------

    async def keys(self, request: Request) -> Response:
        query, call = query_of(request, "limit", "after", "tenant"), call_of(request)
        order, tenant = _page_order(query), query.get("tenant", "")
        return self._list("keys", call, await self._backend.keys(call, order, tenant=tenant))

    async def create_key(self, request: Request) -> Response:
        body = decode(_KEY, await read_body(request))
        order = KeyOrder(
            tenant=body.tenant,
            org=body.org,
            create_tenant=body.create_tenant,
            user=body.user,
            roles=frozenset(body.roles),
            models=None if body.models is None else frozenset(body.models),
            adapters=None if body.adapters is None else frozenset(body.adapters),
            expires_in_s=body.expires_in_s,
            not_before_ms=body.not_before_ms,
            key_class=body.key_class,
            scope=None if body.scope is None else ScopeKind(body.scope),
        )
        call = _because(request, body.reason)
        return self._answer(call, await self._backend.create_key(call, order), 201)

    async def revoke_key(self, request: Request) -> Response:
        call = await self._with_reason(request)
        return self._answer(call, await self._backend.revoke_key(call, _named(request, "key_id")))

    # -- revocations -----------------------------------------------------------------------------

    async def revoke(self, request: Request) -> Response:
        body = decode(_REVOKE, await read_body(request))
        call = _because(request, body.reason)
        return self._answer(call, await self._backend.revoke(call, body.subject))

    async def invalidate(self, request: Request) -> Response:
        body = decode(_SUBJECT, await read_body(request))
        call = _because(request, body.reason)
        return self._answer(call, await self._backend.invalidate(call, body.subject))

    async def enable(self, request: Request) -> Response:
        body = decode(_SUBJECT, await read_body(request))
        call = _because(request, body.reason)
        return self._answer(call, await self._backend.enable(call, body.subject))

    async def receipts(self, request: Request) -> Response:
        limit = whole_number(query_of(request, "limit"), "limit", 100, 1, MAX_PAGE)
        receipts = await self._backend.receipts(call_of(request), limit)
        return json_response({"revocations": receipts})

    async def receipt(self, request: Request) -> Response:
        text = request.path_params["rev"]
        if not (text.isascii() and text.isdecimal() and len(text) < 17):
            return missing()
        call = call_of(request)
        return self._answer(call, await self._backend.receipt(call, int(text)))

    # -- audit -----------------------------------------------------------------------------------

    async def audit(self, request: Request) -> Response:
        names = ("limit", "after", "kind", "from_ms", "to_ms", "subject", "wanted")
        query = query_of(request, *names)
        kind = query.get("kind", "")
        if kind and kind not in _KINDS:
            raise HTTPException(400, f"kind is none of {', '.join(sorted(_KINDS))}")
        wanted = query.get("wanted", "yes")
        if wanted not in ("yes", "no"):
            raise HTTPException(400, "wanted is yes or no")

        def bound(name: str) -> int | None:
            return whole_number(query, name, 0, 0, 2**53) if name in query else None

        order = AuditOrder(
            limit=whole_number(query, "limit", 100, 1, MAX_PAGE),
            after_seq=bound("after"),
            kind=kind,
            from_ms=bound("from_ms"),
            to_ms=bound("to_ms"),
            subject=query.get("subject", ""),
            has_wanted=wanted == "yes",
        )
        call = call_of(request)
        return self._answer(call, await self._backend.audit(call, order))

    async def verify_audit(self, request: Request) -> Response:
        text = query_of(request, "checkpoint").get("checkpoint", "")
        checkpoint = decode(_CHECKPOINT, text.encode()) if text else None
        try:
            return json_response(await self._backend.verify_audit(call_of(request), checkpoint))
        except ValueError as error:
            raise HTTPException(400, f"checkpoint: {error}") from error

    # -- public prefixes -------------------------------------------------------------------------

    async def publics(self, request: Request) -> Response:
        call, order = call_of(request), _page_order(query_of(request, "limit", "after"))
        return self._list("public", call, await self._backend.publics(call, order))

    async def propose_public(self, request: Request) -> Response:
        body = decode(_PUBLIC, await read_body(request))
        order = PublicOrder(
            name=body.name,
            owner=body.owner,
            tokens=struct.pack(f"<{len(body.tokens)}I", *body.tokens),
            block_tokens=body.block_tokens,
            model=body.model,
            audience=None if body.audience == "all" else body.audience,
            expires_in_s=body.expires_in_s,
            weights_digest=body.weights_digest,
            tokenizer_digest=body.tokenizer_digest,
            template_digest=body.template_digest,
        )
        call = _because(request, body.reason)
        return json_response(await self._backend.propose_public(call, order), 201)

    async def approve_public(self, request: Request) -> Response:
        call = await self._with_reason(request)
        return self._answer(call, await self._backend.approve_public(call, _named(request, "name")))

    async def withdraw_public(self, request: Request) -> Response:
        call = await self._with_reason(request)
        return self._answer(
            call, await self._backend.withdraw_public(call, _named(request, "name"))
        )

    # -- inside ----------------------------------------------------------------------------------

    async def _with_reason(self, request: Request) -> Call:
        """A body is optional here, and may hold a reason."""
        raw = await read_body(request)
        return _because(request, decode(_REASON, raw).reason if raw.strip() else "")

    def _list(self, name: str, call: Call, page: Page[object] | None) -> Response:
        shown = None if page is None else {name: page.items, "next": page.next}
        return self._answer(call, shown)

    def _answer(self, call: Call, outcome: object, status: int = 200) -> Response:
        if outcome is not None:
            return json_response(outcome, status)
        caller = call.caller
        self._backend.refused(caller, call.act.value, caller.source, "nothing of that name")
        return missing()


_ROUTES = (
    ("GET", "/orgs", Act.ORGS_READ, _Tenancy.orgs),
    ("POST", "/orgs", Act.ORGS_ADD, _Tenancy.add_org),
    ("PUT", "/orgs/{name}/policy", Act.ORG_POLICY, _Tenancy.set_org_policy),
    ("GET", "/tenants", Act.TENANTS_READ, _Tenancy.tenants),
    ("POST", "/tenants", Act.TENANTS_ADD, _Tenancy.add_tenant),
    ("PUT", "/tenants/{name}/policy", Act.TENANT_POLICY, _Tenancy.set_tenant_policy),
    ("GET", "/keys", Act.KEYS_READ, _Tenancy.keys),
    ("POST", "/keys", Act.KEYS_CREATE, _Tenancy.create_key),
    ("DELETE", "/keys/{key_id}", Act.KEYS_REVOKE, _Tenancy.revoke_key),
    ("POST", "/revoke", Act.REVOKE, _Tenancy.revoke),
    ("POST", "/invalidate", Act.INVALIDATE, _Tenancy.invalidate),
    ("POST", "/enable", Act.ENABLE, _Tenancy.enable),
    ("GET", "/revocations", Act.RECEIPTS_READ, _Tenancy.receipts),
    ("GET", "/revocations/{rev}", Act.RECEIPTS_READ, _Tenancy.receipt),
    ("GET", "/audit", Act.AUDIT_READ, _Tenancy.audit),
    ("GET", "/audit/verify", Act.AUDIT_VERIFY, _Tenancy.verify_audit),
    ("GET", "/public", Act.PUBLIC_READ, _Tenancy.publics),
    ("POST", "/public", Act.PUBLIC_PROPOSE, _Tenancy.propose_public),
    ("POST", "/public/{name}/approve", Act.PUBLIC_APPROVE, _Tenancy.approve_public),
    ("DELETE", "/public/{name}", Act.PUBLIC_WITHDRAW, _Tenancy.withdraw_public),
)
_ORG = msgspec.json.Decoder(_OrgBody)
_ORG_POLICY = msgspec.json.Decoder(_OrgPolicyBody)
_TENANT = msgspec.json.Decoder(_TenantBody)
_TENANT_POLICY = msgspec.json.Decoder(_TenantPolicyBody)
_KEY = msgspec.json.Decoder(_KeyBody)
_REVOKE = msgspec.json.Decoder(_RevokeBody)
_SUBJECT = msgspec.json.Decoder(_SubjectBody)
_PUBLIC = msgspec.json.Decoder(_PublicBody)
_REASON = msgspec.json.Decoder(_ReasonBody)
_CHECKPOINT = msgspec.json.Decoder(dict[str, str])
_KINDS = frozenset(kind.value for kind in Kind)


def _because(request: Request, reason: str) -> Call:
    if not reason.isprintable():
        raise HTTPException(400, "the reason holds what cannot be printed on a line")
    return replace(call_of(request), reason=reason)


def _named(request: Request, name: str) -> str:
    return str(request.path_params[name])


def _page_order(query: dict[str, str]) -> PageOrder:
    limit = whole_number(query, "limit", 100, 1, MAX_PAGE)
    return PageOrder(limit=limit, after=query.get("after", ""))
