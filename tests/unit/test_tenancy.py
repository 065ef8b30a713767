"""Grants: what a caller runs under, and how long that holds."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest

from trunkline.core.epochs import EpochTable, Subject, SubjectKind
from trunkline.core.identity import Epochs, ModelIdentity, Namespace, Scope, ScopeKind
from trunkline.core.identity import derive_namespace as derived
from trunkline.core.principals import Principal, Role
from trunkline.core.records import NamespaceTag
from trunkline.gateway import tenancy as module
from trunkline.gateway.contracts import (
    OPEN_GRANT,
    ClientError,
    Grant,
    InferenceRequest,
    Route,
)
from trunkline.gateway.namespaces import Namespaces
from trunkline.gateway.tenancy import Asked, LeaseLost, Revoked, Tenancy

ALICE = Principal(org="o1", tenant="t1", user="alice", actor="k1", auth_method="key")
BOB = replace(ALICE, user="bob", actor="k2")
OTHER = Principal(org="o1", tenant="t2", user="alice", actor="k3", auth_method="key")
TENANT = Subject(kind=SubjectKind.TENANT, path="t1")


class Desk:
    """A tenancy whose lease is a switch."""

    def __init__(self) -> None:
        self.has_lease = True
        self.drawn = 0
        self.tenancy = Tenancy(
            authenticate=lambda _given, _source: ALICE,
            has_lease=lambda: self.has_lease,
            session_key=b"s" * 32,
            draw=self.draw,
        )

    def draw(self, count: int) -> bytes:
        self.drawn += 1
        return self.drawn.to_bytes(count, "little")


def asked(who: Principal = ALICE, wish: ScopeKind | None = None, session: str = "") -> Asked:
    return Asked(principal=who, model="m", wish=wish, session=session)


def under(grant: Grant) -> InferenceRequest:
    """A request that runs under a grant."""
    return InferenceRequest(
        request_id="r", route=Route.CHAT, method="POST", path="/", body=b"", grant=grant
    )


def test_a_grant_is_made_once_and_dropped_when_the_table_moves() -> None:
    desk = Desk()
    first = desk.tenancy.admit(asked())

    assert desk.tenancy.admit(asked()) is first
    desk.tenancy.swap(EpochTable().raised(TENANT, 1, rev=1, bars=False))
    second = desk.tenancy.admit(asked())

    assert second.domain != first.domain
    assert second.epochs == Epochs(tenant=1)


def test_a_table_never_goes_back() -> None:
    desk = Desk()
    newer = EpochTable().advanced(rev=1)
    desk.tenancy.swap(newer)

    with pytest.raises(ValueError, match="older"):
        desk.tenancy.swap(EpochTable())
    assert desk.tenancy.table is newer


def test_every_scope_has_a_domain_of_its_own() -> None:
    desk = Desk()
    domains = [
        desk.tenancy.admit(wanted).domain
        for wanted in (
            asked(), asked(OTHER), asked(wish=ScopeKind.USER), asked(BOB, ScopeKind.USER),
            asked(OTHER, ScopeKind.USER), asked(wish=ScopeKind.SESSION, session="1"),
            asked(wish=ScopeKind.SESSION, session="2"),
        )
    ]  # fmt: skip

    assert len(set(domains)) == len(domains)
    assert desk.tenancy.admit(asked(BOB)).domain == domains[0], "users of a tenant share"


def test_without_a_lease_a_request_runs_and_shares_nothing() -> None:
    desk = Desk()
    shared = desk.tenancy.admit(asked())
    desk.has_lease = False

    alone = desk.tenancy.admit(asked())

    assert (alone.scope, alone.domain) == (None, b"")
    assert isinstance(desk.tenancy.objection(under(shared)), LeaseLost)
    assert desk.tenancy.objection(under(alone)) is None
    desk.has_lease = True
    assert desk.tenancy.admit(asked()) == shared
    assert desk.tenancy.objection(under(shared)) is None


def test_output_of_what_was_revoked_is_objected_to_and_of_what_was_invalidated_is_not() -> None:
    desk = Desk()
    mine, theirs = desk.tenancy.admit(asked()), desk.tenancy.admit(asked(OTHER))
    table = EpochTable().raised(TENANT, 1, rev=1, bars=False)
    desk.tenancy.swap(table)
    assert desk.tenancy.objection(under(mine)) is None

    desk.tenancy.swap(table.raised(TENANT, 2, rev=2, bars=True))

    assert isinstance(desk.tenancy.objection(under(mine)), Revoked)
    assert desk.tenancy.objection(under(theirs)) is None
    with pytest.raises(ClientError) as caught:
        desk.tenancy.admit(asked())
    assert (caught.value.refusal.status, caught.value.refusal.code) == (403, "access_revoked")


def test_a_model_that_a_caller_may_not_use_looks_like_one_that_is_not_served() -> None:
    limited = replace(ALICE, models=frozenset({"other"}))

    with pytest.raises(ClientError) as caught:
        Desk().tenancy.admit(asked(limited))

    assert (caught.value.refusal.status, caught.value.refusal.code) == (404, "model_not_found")


def test_only_operators_and_open_gateways_see_decisions() -> None:
    desk = Desk()
    operator = replace(ALICE, actor="k9", roles=frozenset({Role.FLEET_OPERATOR}))

    assert not desk.tenancy.admit(asked()).sees_decisions
    assert desk.tenancy.admit(asked(operator)).sees_decisions


@pytest.mark.parametrize(
    "roles",
    [
        (),
        (Role.AUDITOR,),
        (Role.SECURITY_OFFICER,),
        (Role.FLEET_METRICS,),
        (Role.AUDITOR, Role.SECURITY_OFFICER, Role.FLEET_METRICS),
    ],
)
def test_who_has_no_role_that_asks_for_inference_is_refused_before_any_model(
    roles: tuple[Role, ...],
) -> None:
    watcher = replace(ALICE, actor="k9", roles=frozenset(roles), models=frozenset({"other"}))
    tenancy = Desk().tenancy

    for ask in (lambda: tenancy.admit(asked(watcher)), lambda: tenancy.require_access(watcher)):
        with pytest.raises(ClientError) as caught:
            ask()
        assert (caught.value.refusal.status, caught.value.refusal.code) == (403, "role_missing")


@pytest.mark.parametrize(
    "role", [Role.TENANT_USER, Role.TENANT_ADMIN, Role.ORG_ADMIN, Role.FLEET_OPERATOR]
)
def test_roles_of_those_who_run_things_may_ask_for_inference_too(role: Role) -> None:
    for roles in ({role}, {role, Role.AUDITOR}):
        caller = replace(ALICE, actor="k9", roles=frozenset(roles))
        tenancy = Desk().tenancy
        tenancy.require_access(caller)
        assert tenancy.admit(asked(caller)).scope is not None


def test_a_session_belongs_to_whoever_began_it() -> None:
    tenancy = Desk().tenancy
    name = tenancy.begin_session(ALICE)

    assert tenancy.session(ALICE, name) == name[:32]
    assert tenancy.begin_session(ALICE) != name
    tampered = ("0" if name[0] != "0" else "1") + name[1:]
    for who, given in [(BOB, name), (OTHER, name), (ALICE, tampered), (ALICE, name[:-1]),
                       (ALICE, ""), (ALICE, "\xe9" * 64), (ALICE, name + "0")]:  # fmt: skip
        with pytest.raises(ClientError) as caught:
            tenancy.session(who, given)
        assert caught.value.refusal.code == "unknown_session"


IN_SESSIONS = replace(ALICE, default_scope=ScopeKind.SESSION)


def admitted(
    desk: Desk, who: Principal, wish: ScopeKind | None = None, session: str | None = None
) -> InferenceRequest:
    request = InferenceRequest(
        request_id="1", route=Route.COMPLETION, method="POST", path="/", body=b""
    )
    desk.tenancy.admit_request(who, request, wish, None if session is None else session.encode())
    return request


def test_whose_default_is_a_session_begins_one_without_a_wish_and_can_go_on_in_it() -> None:
    desk = Desk()
    first = admitted(desk, IN_SESSIONS)
    again = admitted(desk, IN_SESSIONS, session=first.began_session)
    other = admitted(desk, IN_SESSIONS)

    assert first.grant.scope is not None
    assert first.grant.scope.kind is ScopeKind.SESSION
    assert again.grant is first.grant
    assert again.began_session == ""
    assert other.began_session not in ("", first.began_session)
    assert other.grant.domain != first.grant.domain


def test_whose_default_is_a_session_may_still_wish_for_nothing_and_not_for_more() -> None:
    desk = Desk()
    alone = admitted(desk, IN_SESSIONS, ScopeKind.NONE)

    assert (alone.grant.scope, alone.began_session) == (None, "")
    with pytest.raises(ClientError) as caught:
        admitted(desk, IN_SESSIONS, ScopeKind.USER)
    assert caught.value.refusal.code == "scope_widening"
    with pytest.raises(ClientError) as caught:
        admitted(desk, IN_SESSIONS, session="0" * 64)
    assert caught.value.refusal.code == "unknown_session"


def test_who_names_a_session_is_in_it_without_wishing_for_one() -> None:
    desk = Desk()
    name = desk.tenancy.begin_session(ALICE)

    grant = admitted(desk, ALICE, session=name).grant

    assert grant.scope is not None
    assert grant.scope.session == name[:32]


def test_grants_are_bounded_and_the_oldest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_GRANTS", 2)
    tenancy = Desk().tenancy
    first, second = tenancy.admit(asked()), tenancy.admit(asked(BOB))
    tenancy.admit(asked(OTHER))

    assert tenancy.admit(asked(BOB)) is second
    assert tenancy.admit(asked()) is not first


class Index:
    """What the directory would know."""

    def __init__(self) -> None:
        self.admitted: Counter[NamespaceTag] = Counter()
        self.retired: list[NamespaceTag] = []

    def admit_namespace(self, namespace: Namespace) -> int:
        self.admitted[namespace.tag] += 1
        return len(self.admitted)

    def retire_namespace(self, tag: NamespaceTag) -> bool:
        self.retired.append(tag)
        return True


def derive(scope: Scope, epochs: Epochs, block_tokens: int, adapter: str) -> Namespace:
    model = ModelIdentity(model_id="m", block_tokens=block_tokens, adapter_digest=adapter)
    return derived(b"r" * 32, scope, model, epochs)


def test_a_namespace_is_admitted_once_and_retired_when_its_epochs_were_raised() -> None:
    desk, index = Desk(), Index()
    namespaces = Namespaces(derive, index, draw=desk.draw)
    mine, theirs = desk.tenancy.admit(asked()), desk.tenancy.admit(asked(OTHER))
    before = namespaces.namespace(mine, 16)
    assert before is not None
    assert namespaces.namespace(mine, 16) is before
    namespaces.namespace(theirs, 16)
    table = EpochTable().raised(TENANT, 1, rev=1, bars=False)

    assert namespaces.retire_stale(EpochTable()) == 0
    assert namespaces.retire_stale(table) == 1

    assert index.retired == [before.tag]
    desk.tenancy.swap(table)
    after = namespaces.namespace(desk.tenancy.admit(asked()), 16)
    assert after is not None
    assert not {after.tag, after.salt, after.key} & {before.tag, before.salt, before.key}
    assert len(namespaces) == 2


class Kept:
    """Namespaces with a small bound, and which of them the directory knows."""

    def __init__(self, max_namespaces: int) -> None:
        self.desk, self.index = Desk(), Index()
        self.namespaces = Namespaces(
            derive, self.index, draw=self.desk.draw, max_namespaces=max_namespaces
        )

    def use(self, wanted: Asked, block_tokens: int = 16) -> NamespaceTag:
        return self.of(self.desk.tenancy.admit(wanted), block_tokens)

    def of(self, grant: Grant | None, block_tokens: int = 16) -> NamespaceTag:
        assert grant is not None
        namespace = self.namespaces.namespace(grant, block_tokens)
        assert namespace is not None
        return namespace.tag


def test_namespaces_are_bounded_and_the_least_used_of_a_tenant_is_retired() -> None:
    kept = Kept(2)
    theirs = kept.use(asked(OTHER))
    first, second = kept.use(asked()), kept.use(asked(), 32)
    assert kept.index.retired == [first], "the tenant has more than the other"

    kept.use(asked())

    assert kept.index.retired == [first, second]
    assert len(kept.namespaces) == 2
    assert kept.use(asked(OTHER)) == theirs
    assert len(kept.index.retired) == 2


def test_sessions_and_users_of_one_tenant_push_out_no_namespace_of_another() -> None:
    kept = Kept(64)
    shared = replace(OTHER, default_scope=ScopeKind.ORG)
    others = [
        kept.use(asked(shared)), kept.use(asked(OTHER, ScopeKind.TENANT)),
        kept.use(asked(OTHER, ScopeKind.USER)), kept.of(OPEN_GRANT),
        kept.of(kept.desk.tenancy.public_grant("p" * 32)),
    ]  # fmt: skip

    for number in range(500):
        kept.use(asked(wish=ScopeKind.SESSION, session=str(number)))
        kept.use(asked(replace(ALICE, user=str(number)), ScopeKind.USER))

    assert len(kept.namespaces) == 64
    assert not set(others) & set(kept.index.retired)
    assert len(kept.index.retired) == 1_005 - 64


def test_tenants_that_have_equally_many_give_way_by_who_was_quiet_longest() -> None:
    kept = Kept(3)
    tenants = [replace(ALICE, tenant=f"t{number}") for number in range(4)]
    first, second, _ = (kept.use(asked(who)) for who in tenants[:3])
    assert kept.use(asked(tenants[0])) == first

    kept.use(asked(tenants[3]))

    assert kept.index.retired == [second]


def test_where_nothing_may_be_shared_each_request_has_a_salt_of_its_own() -> None:
    desk, index = Desk(), Index()
    namespaces = Namespaces(derive, index, draw=desk.draw)
    alone = desk.tenancy.admit(asked(wish=ScopeKind.NONE))

    salts = {namespaces.salt(alone, 16) for _ in range(10)}

    assert len(salts) == 10
    assert all(len(salt) == 43 for salt in salts)
    assert namespaces.namespace(alone, 16) is None
    assert not index.admitted


def test_a_revoked_public_prefix_fences_the_answers_that_read_it() -> None:
    tenancy = Desk().tenancy
    public = tenancy.public_grant("p" * 32)
    assert public is not None
    request = under(tenancy.admit(asked()))
    request.also_under = public.admission
    assert tenancy.objection(request) is None

    prefix = Subject(kind=SubjectKind.PUBLIC, path="p" * 32)
    tenancy.swap(tenancy.table.raised(prefix, 1, rev=1, bars=True))

    assert isinstance(tenancy.objection(request), Revoked)
    assert not tenancy.is_current(request)
    assert tenancy.public_grant("p" * 32) is None


def test_a_ticket_names_the_class_of_its_own_key() -> None:
    desk = Desk()
    namespaces = Namespaces(derive, Index(), draw=desk.draw)
    ci = replace(ALICE, actor="k5", key_class="ci")
    for who in (ALICE, ci, BOB):
        namespaces.ticket(desk.tenancy.admit(asked(who)), 16)

    told = [
        json.loads(namespaces.ticket(desk.tenancy.admit(asked(who)), 16)) for who in (ALICE, ci)
    ]

    assert told[0]["ns"] == told[1]["ns"], "one namespace, as long as no class was raised"
    assert "key_class/ci" in told[1]["subjects"]
    assert "key_class/ci" not in told[0]["subjects"]


def test_raising_a_class_leaves_the_tenants_other_keys_their_namespace() -> None:
    desk, index = Desk(), Index()
    namespaces = Namespaces(derive, index, draw=desk.draw)
    ci = replace(ALICE, actor="k5", key_class="ci")
    first = namespaces.namespace(desk.tenancy.admit(asked(ci)), 16)
    table = EpochTable().raised(
        Subject(kind=SubjectKind.KEY_CLASS, path="ci"), 1, rev=1, bars=False
    )
    desk.tenancy.swap(table)

    assert namespaces.retire_stale(table) == 0
    assert namespaces.namespace(desk.tenancy.admit(asked(ALICE)), 16) is first
    moved = namespaces.namespace(desk.tenancy.admit(asked(ci)), 16)
    assert first is not None
    assert moved is not None
    assert moved.salt != first.salt


def test_a_request_that_waited_is_admitted_under_what_holds_now() -> None:
    desk = Desk()
    served = [""]
    desk.tenancy.served_model = lambda: served[0]
    limited = replace(ALICE, adapters=frozenset())
    request = under(desk.tenancy.admit(asked(limited)))
    request.model = "lora"
    served[0] = "m"  # the first worker joined meanwhile

    with pytest.raises(ClientError) as caught:
        desk.tenancy.renew(request)
    assert caught.value.refusal.code == "model_not_found"

    wide = replace(ALICE, default_scope=ScopeKind.ORG)
    shared = under(desk.tenancy.admit(asked(wide)))
    desk.tenancy.as_of_now = lambda principal: replace(principal, default_scope=ScopeKind.TENANT)
    desk.tenancy.renew(shared)
    assert shared.grant.scope is not None
    assert shared.grant.scope.kind is ScopeKind.TENANT


def test_d36_with_several_models_a_grant_is_of_the_model_that_its_name_asks_for() -> None:
    desk = Desk()
    meanings = {"a": ("a", ""), "alpha": ("a", ""), "b": ("b", ""), "lora": ("b", "lora")}
    desk.tenancy.meaning_of = lambda name: meanings.get(name, ("", ""))
    only_b = replace(ALICE, models=frozenset({"b"}))
    assert desk.tenancy.admit(Asked(principal=ALICE, model="alpha")).adapter == ""
    assert desk.tenancy.admit(Asked(principal=ALICE, model="lora")).adapter == "lora"
    with pytest.raises(ClientError) as caught:
        desk.tenancy.admit(Asked(principal=only_b, model="alpha"))
    assert caught.value.refusal.code == "model_not_found"
    assert desk.tenancy.admit(Asked(principal=only_b, model="b")).scope is not None

    barred = EpochTable().raised(Subject(kind=SubjectKind.MODEL, path="b"), 1, rev=1, bars=True)
    desk.tenancy.swap(barred)
    for name in ("b", "lora"):
        with pytest.raises(ClientError, match="revoked"):
            desk.tenancy.admit(Asked(principal=ALICE, model=name))
    assert desk.tenancy.admit(Asked(principal=ALICE, model="a")).scope is not None
    assert desk.tenancy.public_grant("p", "b") is None
    assert desk.tenancy.public_grant("p", "a") is not None

    meanings["lora"] = ("a", "lora")  # the adapter is another model's now
    assert desk.tenancy.admit(Asked(principal=ALICE, model="lora")).scope is not None
