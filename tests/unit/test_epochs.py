"""Epochs only grow, and decide who is admitted, what is shared, and what may still go out."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from trunkline.core.epochs import EpochTable, Subject, SubjectKind, scoped
from trunkline.core.identity import Epochs, ScopeKind
from trunkline.core.principals import Principal, narrowed

ACME = Principal(
    org="o1", tenant="t1", user="alice", actor="k1", auth_method="key", key_class="batch"
)
TENANT = Subject(kind=SubjectKind.TENANT, path="t1")
KINDS_OF_ACME = [kind for kind in SubjectKind if kind is not SubjectKind.PUBLIC]


def subject(kind: SubjectKind) -> Subject:
    paths = {
        SubjectKind.FLEET: "", SubjectKind.ORG: "o1", SubjectKind.TENANT: "t1",
        SubjectKind.USER: "t1/alice", SubjectKind.KEY_CLASS: "batch", SubjectKind.PUBLIC: "p1",
        SubjectKind.MODEL: "m", SubjectKind.ADAPTER: "a",
    }  # fmt: skip
    return Subject(kind=kind, path=paths[kind])


@pytest.mark.parametrize("kind", KINDS_OF_ACME)
@pytest.mark.parametrize("bars", [False, True])
def test_raising_any_part_ends_what_was_admitted_under_it(kind: SubjectKind, bars: bool) -> None:
    before = EpochTable()
    admitted = before.admit(ACME, "m", "a")

    after = before.raised(subject(kind), 1, rev=1, bars=bars)

    assert before.is_current(admitted)
    assert not after.is_current(admitted)
    assert after.may_leave(admitted) is not bars, "only a revocation fences what is running"


@pytest.mark.parametrize("kind", KINDS_OF_ACME)
def test_what_is_revoked_admits_nobody_until_it_is_enabled(kind: SubjectKind) -> None:
    revoked = EpochTable().raised(subject(kind), 1, rev=1, bars=True)

    with pytest.raises(PermissionError, match=kind.value):
        revoked.admit(ACME, "m", "a")
    enabled = revoked.enabled(subject(kind), rev=2)
    admitted = enabled.admit(ACME, "m", "a")

    assert getattr(admitted.epochs, kind.value) == 1, "the old names stay unreachable"
    assert enabled.may_leave(admitted)
    assert enabled.is_current(admitted)


def test_a_change_to_somebody_else_changes_nothing_here() -> None:
    admitted = EpochTable().admit(ACME, "m")
    other = Subject(kind=SubjectKind.TENANT, path="t2")

    after = EpochTable().raised(other, 1, rev=1, bars=True).advanced(rev=2)

    assert after.is_current(admitted)
    assert after.may_leave(admitted)
    assert after.admit(ACME, "m").epochs == admitted.epochs


@pytest.mark.parametrize("rev", [0, 1, 3])
def test_a_revision_is_neither_skipped_nor_repeated(rev: int) -> None:
    table = EpochTable().advanced(rev=1)

    with pytest.raises(ValueError, match="does not follow"):
        table.raised(TENANT, 1, rev=rev, bars=False)


@pytest.mark.parametrize("epoch", [0, 4, 5])
def test_an_epoch_never_falls_nor_stays(epoch: int) -> None:
    table = EpochTable().raised(TENANT, 5, rev=1, bars=False)

    with pytest.raises(ValueError, match="does not grow"):
        table.raised(TENANT, epoch, rev=2, bars=False)


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        (SubjectKind.FLEET, "x"), (SubjectKind.TENANT, ""), (SubjectKind.USER, "t1/a\nb"),
        (SubjectKind.MODEL, "m" * 513),
    ],
)  # fmt: skip
def test_a_subject_is_named_soundly(kind: SubjectKind, path: str) -> None:
    with pytest.raises(ValueError, match=kind.value):
        Subject(kind=kind, path=path)


ALL_RAISED = Epochs(**{f.name: 7 for f in fields(Epochs)})


@pytest.mark.parametrize(
    ("kind", "absent"),
    [
        (ScopeKind.SESSION, {"public"}), (ScopeKind.USER, {"public"}),
        (ScopeKind.TENANT, {"public", "user"}),
        (ScopeKind.ORG, {"public", "user", "tenant", "key_class"}),
        (ScopeKind.PUBLIC, {"user", "tenant", "key_class", "org"}),
    ],
)  # fmt: skip
def test_a_namespace_counts_the_epochs_of_its_own_parts(kind: ScopeKind, absent: set[str]) -> None:
    kept = scoped(ALL_RAISED, kind)

    assert {f.name for f in fields(Epochs) if getattr(kept, f.name) == 0} == absent


def test_a_request_narrows_its_scope_and_never_widens_it() -> None:
    user = narrowed(ACME, ScopeKind.USER, "")
    session = narrowed(ACME, ScopeKind.SESSION, "s1")

    assert narrowed(ACME, None, "") == narrowed(ACME, ScopeKind.TENANT, "")
    assert user is not None
    assert (user.tenant, user.user, user.session) == ("t1", "alice", "")
    assert session is not None
    assert session.session == "s1"
    assert narrowed(ACME, ScopeKind.NONE, "") is None
    for wider in (ScopeKind.ORG, ScopeKind.PUBLIC):
        with pytest.raises(PermissionError, match="wider"):
            narrowed(ACME, wider, "")
    careful = replace(ACME, default_scope=ScopeKind.USER)
    with pytest.raises(PermissionError, match="wider"):
        narrowed(careful, ScopeKind.TENANT, "")


@pytest.mark.parametrize(
    ("who", "wish", "wrong"),
    [
        (replace(ACME, user=""), ScopeKind.USER, "credential of a user"),
        (replace(ACME, user=""), ScopeKind.SESSION, "credential of a user"),
        (ACME, ScopeKind.SESSION, "session that the gateway began"),
    ],
)
def test_a_scope_without_its_part_is_an_error(who: Principal, wish: ScopeKind, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        narrowed(who, wish, "")


def test_an_organisation_that_opted_in_shares_by_default_and_may_narrow() -> None:
    shared = replace(ACME, default_scope=ScopeKind.ORG)

    wide = narrowed(shared, None, "")
    own = narrowed(shared, ScopeKind.TENANT, "")

    assert wide is not None
    assert wide.kind is ScopeKind.ORG
    assert not wide.tenant
    assert own is not None
    assert own.tenant == "t1"


def test_what_happened_to_others_need_not_have_been_seen() -> None:
    other = Subject(kind=SubjectKind.TENANT, path="t2")
    table = EpochTable().raised(TENANT, 1, rev=1, bars=False).raised(other, 1, rev=2, bars=True)

    assert table.admit(ACME, "m").min_rev == 1
    assert table.advanced(rev=3).admit(ACME, "m").min_rev == 1
