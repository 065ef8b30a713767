"""Who may what at the admin port, over the wire: roles, reach, and what refusals tell (nothing)."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from admin_port import code_of
from starlette.routing import BaseRoute, Match
from tenant_port import OPERATOR_KEY, TenantPort, serving_tenants

from trunkline.administration import REFUSALS_BURST
from trunkline.control.book import Book
from trunkline.core.principals import Role
from trunkline.gateway.admin_tenancy import _ROUTES
from trunkline.gateway.pages import Pages
from trunkline.gateway.permissions import Act, extent_of

MADE_UP = "0123456789abcdef"
ROLES = [role.value for role in Role]


class Cast:
    """Two tenants of one organisation, one of another, and a key for each role."""

    def __init__(self, port: TenantPort) -> None:
        self.port = port
        port.operator.post("/tenants", json={"name": "acme", "org": "o1", "create_org": True})
        port.operator.post("/tenants", json={"name": "sister", "org": "o1"})
        self.texts = {role: port.key("acme", role) for role in ROLES}
        self.clients = {role: port.client(text) for role, text in self.texts.items()}
        self.foreign_key = port.key("globex").split("_")[1]
        self.sister_key = port.key("sister").split("_")[1]
        self.own_key = port.key("acme").split("_")[1]


@pytest.fixture(scope="module")
def cast(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cast]:
    with serving_tenants(tmp_path_factory.mktemp("access")) as port:
        yield Cast(port)


# --- the door ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        "",
        "Bearer",
        "Bearer wrong",
        f"Bearer {OPERATOR_KEY}x",
        "Bearer pk_",
        f"Bearer pk_{MADE_UP}_" + "a" * 43,
        f"Bearer pk_{MADE_UP}",
        "Bearer pk_\xe9",
        "Bearer eyJhbGciOiJub25lIn0.eyJzdWIiOiJ4In0.",
    ],
)
@pytest.mark.parametrize("path", ["/keys", "/audit", "/workers", "/dashboard/events", "/nothing"])
def test_d32_without_a_good_key_every_path_is_the_same_401(
    path: str, given: str, cast: Cast
) -> None:
    headers = [(b"authorization", given.encode("latin-1"))] if given else []
    answer = httpx.get(cast.port.url + path, headers=headers)
    assert code_of(answer) == (401, "unauthorized")
    assert answer.headers["www-authenticate"] == "Bearer"


def test_a_right_id_with_a_wrong_secret_is_the_same_401_as_a_made_up_id(cast: Cast) -> None:
    wrong = cast.texts["auditor"][:-4] + "AAAA"
    made_up = f"pk_{MADE_UP}_" + "a" * 43
    first, second = (cast.port.client(key).get("/audit") for key in (wrong, made_up))
    assert (first.status_code, first.content) == (second.status_code, second.content)


def test_a_revoked_an_expired_and_a_barred_key_are_out(tmp_path: Path) -> None:
    with serving_tenants(tmp_path) as port:
        gone = port.key("acme", "auditor")
        port.operator.delete(f"/keys/{gone.split('_')[1]}")
        short = port.key("acme", "auditor", expires_in_s=60)
        classed = port.key("acme", "auditor", key_class="leaked")
        barred = port.key("globex", "auditor")
        for subject in ("tenant/globex", "key_class/leaked"):
            port.operator.post("/revoke", json={"subject": subject, "reason": "r"})
        assert port.client(short).get("/audit").status_code == 200
        port.clock.ahead_s = 61.0
        for key in (gone, short, classed, barred):
            assert code_of(port.client(key).get("/audit")) == (401, "unauthorized")


def test_without_an_admin_key_whoever_brings_no_credential_is_the_operator(tmp_path: Path) -> None:
    with serving_tenants(tmp_path, key="") as port:
        auditor = port.key("acme", "auditor")
        assert port.client().post("/orgs", json={"name": "o"}).status_code == 201
        assert code_of(port.client(auditor).get("/orgs")) == (403, "forbidden")
        for wrong in ("pk_wrong", "some-other-text", auditor[1:]):
            assert code_of(port.client(wrong).get("/orgs")) == (401, "unauthorized")


# --- the table, over the wire -----------------------------------------------------------------

FLEET_PATHS = [
    ("GET", "/metrics", Act.METRICS_READ),
    ("GET", "/config", Act.CONFIG_READ),
    ("POST", "/reload", Act.CONFIG_RELOAD),
    ("POST", "/workers", Act.WORKERS_CHANGE),
    ("GET", "/workers", Act.WORKERS_READ),
    ("POST", "/workers/w/drain", Act.WORKERS_CHANGE),
    ("POST", "/workers/w/undrain", Act.WORKERS_CHANGE),
    ("POST", "/workers/w/check", Act.WORKERS_CHANGE),
    ("POST", "/workers/w/reset", Act.WORKERS_CHANGE),
    ("DELETE", "/workers/w", Act.WORKERS_CHANGE),
    ("GET", "/workers/w", Act.WORKERS_READ),
    ("POST", "/add_worker", Act.WORKERS_CHANGE),
    ("POST", "/remove_worker", Act.WORKERS_CHANGE),
    ("GET", "/list_workers", Act.WORKERS_READ),
    ("GET", "/doctor", Act.WORKERS_READ),
    ("GET", "/engine_metrics", Act.METRICS_READ),
    ("GET", "/get_loads", Act.WORKERS_READ),
    ("GET", "/get_server_info", Act.WORKERS_READ),
    ("GET", "/get_model_info", Act.WORKERS_READ),
    ("GET", "/health_generate", Act.WORKERS_CHANGE),
    ("POST", "/flush_cache", Act.WORKERS_CHANGE),
    ("POST", "/finish_session", Act.WORKERS_CHANGE),
    ("PUT", "/workers/w", Act.WORKERS_CHANGE),
    ("PATCH", "/workers/w", Act.WORKERS_CHANGE),
    ("GET", "/decisions", Act.DECISIONS_READ),
    ("POST", "/decisions", Act.DECISIONS_READ),
    ("GET", "/decisions/r1", Act.DECISIONS_READ),
    # With a parameter that it does not know: an answer that goes on would never be read to its end.
    ("GET", "/dashboard/events?x=1", Act.DASHBOARD_READ),
    ("GET", "/dashboard/snapshot", Act.DASHBOARD_READ),
    ("GET", "/dashboard/decisions", Act.DECISIONS_READ),
]
PATHS = FLEET_PATHS + [
    (method, path.format(name="acme", key_id=MADE_UP, rev="1"), act)
    for method, path, act, _ in _ROUTES
]


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(("method", "path", "act"), PATHS, ids=lambda part: str(part))
def test_a_path_is_403_for_each_role_without_it_and_looked_at_for_the_others(
    method: str, path: str, act: Act, role: str, cast: Cast
) -> None:
    # The body is no JSON: whoever may is told so (or is answered), whoever may not never is.
    answer = cast.clients[role].request(method, path, content=b"{")
    if extent_of(frozenset({Role(role)}), act) is None:
        assert code_of(answer) == (403, "forbidden")
    else:
        assert answer.status_code in (200, 400, 404, 409, 503)


def test_d32_every_path_of_the_port_is_in_these_tests(cast: Cast) -> None:
    routes = cast.port.app.routes

    def route_of(method: str, path: str) -> BaseRoute:
        bare = path.partition("?")[0]
        scope = {"type": "http", "method": method, "path": bare, "headers": []}
        return next(route for route in routes if route.matches(scope)[0] is Match.FULL)

    tried = {id(route_of(method, path)) for method, path, _ in PATHS}
    left = [getattr(route, "path", route) for route in routes if id(route) not in tried]
    assert left == ["/health", "/heartbeat", *Pages(wants_key=True).paths()]


# --- reach ------------------------------------------------------------------------------------


def alike(answers: list[httpx.Response]) -> None:
    """One 404 for all, byte for byte."""
    assert {answer.status_code for answer in answers} == {404}
    assert len({answer.content for answer in answers}) == 1
    assert code_of(answers[0]) == (404, "not_found")


def test_a_tenants_admin_invalidates_its_own_tenant_and_users_only(cast: Cast) -> None:
    admin = cast.clients["tenant.admin"]
    for subject in ("tenant/acme", "user/acme/alice"):
        receipt = admin.post("/invalidate", json={"subject": subject})
        assert receipt.status_code == 200
        assert (receipt.json()["acked"], receipt.json()["acked_count"]) == (None, 1)
    names = ["tenant/globex", "tenant/sister", "tenant/made-up", "org/o1", "org/made-up", "fleet"]
    names += ["model/m", "adapter/a", "key_class/c", "public/p", "user/globex/x", "user/no/x"]
    names += ["nonsense", "user/acme", "tenant/", f"tenant/{'0' * 32}"]
    alike([admin.post("/invalidate", json={"subject": name}) for name in names])


def test_an_organisations_admin_revokes_inside_it_only(tmp_path: Path) -> None:
    with serving_tenants(tmp_path) as port:
        cast = Cast(port)
        admin = cast.clients["org.admin"]
        for subject in ("tenant/sister", "user/sister/bob", "user/acme/alice"):
            body = {"subject": subject, "reason": "r"}
            assert admin.post("/revoke", json=body).status_code == 200
        names = ["tenant/globex", "tenant/made-up", "org/globex", "org/made-up", "fleet", "model/m"]
        names += ["user/globex/x", "key_class/c"]
        alike([admin.post("/revoke", json={"subject": n, "reason": "r"}) for n in names])
        shown = admin.get("/tenants").json()["tenants"]
        assert [row["tenant"] for row in shown] == ["acme", "sister"]
        assert admin.post("/revoke", json={"subject": "org/o1", "reason": "r"}).status_code == 200
        assert admin.get("/tenants").status_code == 401, "it has shut itself out"


def test_receipts_of_others_look_like_none(cast: Cast) -> None:
    operator, admin = cast.port.operator, cast.clients["tenant.admin"]
    foreign = operator.post("/invalidate", json={"subject": "tenant/globex"}).json()["rev"]
    own = operator.post("/invalidate", json={"subject": "tenant/acme"}).json()["rev"]
    assert admin.get(f"/revocations/{own}").json()["subject"] == "tenant/acme"
    alike([admin.get(f"/revocations/{rev}") for rev in (foreign, 999_999, "x", "-1")])
    shown = admin.get("/revocations").json()["revocations"]
    assert {row["subject"] for row in shown} <= {"tenant/acme", "user/acme/alice"}
    assert len(operator.get("/revocations").json()["revocations"]) > len(shown)


def test_a_tenants_admin_sees_and_revokes_keys_of_its_own_tenant_only(cast: Cast) -> None:
    admin = cast.clients["tenant.admin"]
    shown = admin.get("/keys").json()["keys"]
    assert {row["tenant"] for row in shown} == {"acme"}
    alike([admin.get("/keys", params={"tenant": name}) for name in ("globex", "sister", "no")])
    foreign = (cast.foreign_key, cast.sister_key, MADE_UP, "x", "%00")
    alike([admin.delete(f"/keys/{key}") for key in foreign])
    alike([admin.get("/keys", params={"after": key}) for key in foreign[:3]])
    assert admin.delete(f"/keys/{cast.own_key}").status_code == 200
    again = admin.delete(f"/keys/{cast.own_key}").json()
    assert again["rev"] is None, "it was revoked before"


def test_a_tenants_admin_makes_keys_in_its_own_tenant_only(cast: Cast) -> None:
    admin = cast.clients["tenant.admin"]
    made = admin.post("/keys", json={"tenant": "acme", "user": "carol"})
    assert made.status_code == 201
    bodies: list[dict[str, Any]] = [{"tenant": name} for name in ("globex", "sister", "made-up")]
    bodies += [{"tenant": "made-up", "create_tenant": True}, {"tenant": "acme", "org": "globex"}]
    bodies += [{"tenant": "acme", "org": "made-up"}]
    alike([admin.post("/keys", json=body) for body in bodies])


@pytest.mark.parametrize("end", ["revoked", "expired", "barred"])
def test_a_key_that_ended_while_its_order_came_changes_nothing(end: str, tmp_path: Path) -> None:
    with serving_tenants(tmp_path) as port:
        answers, before = _end_amid_orders(Cast(port), end)
        assert answers == [401] * 4
        assert port.registry.book is before


def _end_amid_orders(cast: Cast, end: str) -> tuple[list[int], Book]:
    """What is answered to the orders, and what held before they were whole."""
    port = cast.port
    text = port.key("acme", "tenant.admin", "security.officer", expires_in_s=60)
    head = "{} {} HTTP/1.1\r\nhost: {}\r\nauthorization: Bearer {}\r\ncontent-length: {}\r\n\r\n"
    orders = [
        ("POST", "/keys", b'{"tenant":"acme","expires_in_s":9}'),
        ("POST", "/revoke", b'{"subject":"tenant/globex","reason":"r"}'),
        ("POST", "/enable", b'{"subject":"model/m"}'),
        ("DELETE", f"/keys/{cast.foreign_key}", b"{}"),
    ]
    port.operator.post("/revoke", json={"subject": "model/m", "reason": "r"})
    host = port.url.removeprefix("http://")
    with contextlib.ExitStack() as stack:
        links: list[socket.socket] = []
        for method, path, body in orders:
            name, _, number = host.rpartition(":")
            link = stack.enter_context(socket.create_connection((name, int(number)), timeout=60))
            words = head.format(method, path, host, text, len(body)).encode()
            # It reads bodies only of those it let in: then it is waiting for the rest of this one.
            link.sendall(words.replace(b"\r\n\r\n", b"\r\nexpect: 100-continue\r\n\r\n"))
            assert b" 100 " in link.recv(65_536).partition(b"\r\n")[0]
            links.append(link)
        if end == "revoked":
            assert port.operator.delete("/keys/" + text.split("_")[1]).status_code == 200
        elif end == "expired":
            port.clock.ahead_s += 61
        else:
            port.operator.post("/revoke", json={"subject": "tenant/acme", "reason": "r"})
        before = port.registry.book
        answers: list[int] = []
        for link, (_, _, body) in zip(links, orders, strict=True):
            link.sendall(body)
            answers.append(int(link.recv(65_536).split()[1]))
    return answers, before


@pytest.mark.parametrize(
    "role", ["org.admin", "fleet.operator", "fleet.metrics", "security.officer", "auditor"]
)
def test_a_tenants_admin_cannot_give_what_it_does_not_have(role: str, cast: Cast) -> None:
    body = {"tenant": "acme", "roles": [role]}
    answer = cast.clients["tenant.admin"].post("/keys", json=body)
    assert code_of(answer) == (409, "change_refused")


def test_a_key_is_never_given_more_than_its_maker_has(cast: Cast) -> None:
    text = cast.port.key("acme", "tenant.admin", models=["m"], adapters=["a"])
    admin = cast.port.client(text)
    good = {"tenant": "acme", "models": ["m"], "adapters": ["a"]}
    assert admin.post("/keys", json=good).status_code == 201
    for change in (
        {"models": None},
        {"models": ["m", "n"]},
        {"adapters": None},
    ):
        assert code_of(admin.post("/keys", json=good | change)) == (409, "change_refused")


@pytest.mark.parametrize(
    ("own", "more", "enough"),
    [
        ({"expires_in_s": 3_600}, {}, {"expires_in_s": 1_800}),
        ({"expires_in_s": 3_600}, {"expires_in_s": 7_200}, {"expires_in_s": 1_800}),
        ({"user": "ann", "scope": "user"}, {}, {"user": "bob", "scope": "user"}),
        ({"user": "ann", "scope": "session"}, {"user": "bob", "scope": "user"}, {"scope": "none"}),
        ({"scope": "none"}, {"user": "bob", "scope": "session"}, {"scope": "none"}),
        ({"key_class": "ci"}, {}, {"key_class": "ci"}),
        ({"key_class": "ci"}, {"key_class": "other"}, {"key_class": "ci"}),
    ],
)
def test_a_key_is_not_made_wider_than_its_makers_own(
    own: dict[str, Any], more: dict[str, Any], enough: dict[str, Any], cast: Cast
) -> None:
    maker = cast.port.client(cast.port.key("acme", "tenant.admin", **own))
    refused = maker.post("/keys", json={"tenant": "acme", **more})
    assert code_of(refused) == (409, "change_refused")
    assert maker.post("/keys", json={"tenant": "acme", **enough}).status_code == 201


def test_an_officer_whose_key_ends_makes_none_that_does_not(cast: Cast) -> None:
    officer = cast.port.client(cast.port.key("acme", "security.officer", expires_in_s=3_600))
    body: dict[str, Any] = {"tenant": "globex", "key_class": "any"}
    assert code_of(officer.post("/keys", json=body)) == (409, "change_refused")
    assert officer.post("/keys", json=body | {"expires_in_s": 60}).status_code == 201


def test_an_officer_makes_no_officers(cast: Cast) -> None:
    officer = cast.clients["security.officer"]
    body = {"tenant": "globex", "roles": ["security.officer"]}
    assert code_of(officer.post("/keys", json=body)) == (409, "change_refused")
    assert officer.post("/keys", json=body | {"roles": ["auditor"]}).status_code == 201


def test_nobody_but_the_operator_makes_a_tenant_by_the_way(cast: Cast) -> None:
    body = {"tenant": "brand-new", "create_tenant": True}
    refused = cast.clients["security.officer"].post("/keys", json=body)
    assert code_of(refused) == (404, "unknown_name")
    assert cast.port.operator.get("/keys", params={"tenant": "brand-new"}).status_code == 404


def test_a_tenant_reads_its_own_audit_records_only_and_nothing_of_the_machine(cast: Cast) -> None:
    cast.port.settled()
    records = cast.clients["tenant.admin"].get("/audit", params={"limit": 1000}).json()["records"]
    whole = cast.port.records()
    assert 0 < len(records) < len(whole)
    keys = {row["key_id"] for row in cast.clients["tenant.admin"].get("/keys").json()["keys"]}
    for record in records:
        assert record["actor"] in keys | {"operator"}
        assert not set(record) & {"host", "boot_id", "hash", "prev_hash", "source", "proof"}
    own_seqs = {record["seq"] for record in records}
    name = cast.port.audit.pseudonym(f"tenant/{cast.port.registry.book.names['tenant/globex']}")
    foreign = {row["seq"] for row in whole if row["scope_path_hmac"] == name}
    assert foreign
    assert not own_seqs & foreign


# --- refusals in the audit log ------------------------------------------------------------------


def test_refused_calls_are_audited_sampled_and_bounded(tmp_path: Path) -> None:
    with serving_tenants(tmp_path) as port:
        user = port.client(port.key("acme"))
        port.clock.stop()
        for _ in range(3 * REFUSALS_BURST):
            assert user.get("/keys").status_code == 403
        port.client("marked-wrong-key").get("/keys")
        port.settled()
        refusals = [r for r in port.records() if r["kind"] == "REFUSED"]
        assert len(refusals) == REFUSALS_BURST
        assert refusals[0]["action"] == "keys.read"
        assert len(refusals[0]["actor"]) == 16
        assert port.administration.refusals_unrecorded > 0
        assert "marked-wrong-key" not in str(port.records())


def test_how_many_refusals_were_not_recorded_is_in_the_next_record(tmp_path: Path) -> None:
    with serving_tenants(tmp_path) as port:
        user = port.client(port.key("acme"))
        port.clock.stop()
        for _ in range(REFUSALS_BURST + 5):
            user.get("/keys")
        port.administration._refusals._level = 1.0  # as if a second had passed
        user.get("/keys")
        port.settled()
        last = [r for r in port.records() if r["kind"] == "REFUSED"][-1]
        assert "more before it were not recorded" in last["reason"]
