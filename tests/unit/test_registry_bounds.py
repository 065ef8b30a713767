"""How much the registry takes: changes that wait, tables, epochs, keys, public prefixes."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from registry_bench import (
    ORG,
    TENANT,
    a_key,
    a_prefix,
    an_id,
    commit_all,
    intent,
    raised,
    run,
)

from hand_clock import WALL_MS, HandClock
from trunkline.control import registry as registry_module
from trunkline.control.book import Limits
from trunkline.control.changes import (
    Change,
    Entry,
    KeyAdded,
    KeyRevoked,
    OrgAdded,
    PublicApproved,
    PublicWithdrawn,
    TenantAdded,
    encode_entry,
)
from trunkline.control.draft import KEPT_ENDED_PUBLICS
from trunkline.control.key_shelf import KEPT_ENDED_KEYS
from trunkline.control.memory_store import MemoryStore
from trunkline.control.registry import Registry
from trunkline.core import credentials
from trunkline.core.publics import MAX_AUDIENCE, MAX_BOOK_TOKENS, MAX_PREFIXES
from trunkline.errors import Busy, ChangeRefused
from trunkline.worker.agent import MAX_SUBJECTS


async def fresh(*changes: Change, limits: Limits | None = None) -> Registry:
    registry = await Registry.load(MemoryStore(), HandClock(), limits=limits)
    await commit_all(registry, *changes)
    return registry


def test_changes_beyond_the_bound_of_waiting_ones_are_told_to_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry_module, "MAX_WAITING_COMMITS", 2)
    monkeypatch.setattr(registry_module, "KEPT_FOR_EPOCHS", 0)

    async def scenario() -> None:
        registry = await fresh()
        changes = [OrgAdded(org=an_id(n), name=f"o{n}") for n in range(3)]
        ends = await asyncio.gather(
            *(registry.commit(change, intent()) for change in changes), return_exceptions=True
        )
        assert ends[:2] == [1, 2]
        assert isinstance(ends[2], Busy)

    run(scenario())


def test_changes_that_wait_leave_room_for_what_takes_away_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry_module, "KEPT_FOR_EPOCHS", 1)
    monkeypatch.setattr(registry_module, "MAX_WAITING_COMMITS", 3)

    async def scenario() -> None:
        registry = await fresh(ORG, TENANT)
        changes = [a_key(1), a_key(2), a_key(3), raised(1)]
        ends = await asyncio.gather(
            *(registry.commit(change, intent()) for change in changes), return_exceptions=True
        )
        assert [isinstance(end, Busy) for end in ends] == [False, False, True, False]

    run(scenario())


@pytest.mark.parametrize(
    ("limits", "allowed", "refused"),
    [
        (Limits(orgs=1), ORG, OrgAdded(org=an_id(3), name="second")),
        (Limits(tenants=1), TENANT, TenantAdded(tenant=an_id(3), org=ORG.org, name="second")),
        (Limits(publics=1), a_prefix(50), a_prefix(51, "second")),
    ],
)
def test_each_table_has_a_bound(limits: Limits, allowed: Change, refused: Change) -> None:
    async def scenario() -> None:
        begin = [] if allowed is ORG else [ORG]
        registry = await fresh(*begin, allowed, limits=limits)
        with pytest.raises(ChangeRefused, match="at most 1"):
            await registry.commit(refused, intent())

    run(scenario())


def test_one_tenants_users_that_were_raised_have_a_bound_that_others_do_not_share() -> None:
    async def scenario() -> None:
        other = TenantAdded(tenant=an_id(3), org=ORG.org, name="globex")
        registry = await fresh(ORG, TENANT, other, limits=Limits(raised_users=2))

        async def user(name: str, epoch: int = 1, tenant: str = an_id(2), **how: bool) -> None:
            await registry.commit(raised(epoch, subject=f"user/{tenant}/{name}", **how), intent())

        await user("ann")
        await user("bob")
        with pytest.raises(ChangeRefused, match="the tenant as a whole"):
            await user("cyd")
        await user("ann", 2)
        await user("cyd", tenant=an_id(3))
        # Shutting somebody out has as much room again.
        await user("cyd", is_revoked=True)
        await user("dan", is_revoked=True)
        with pytest.raises(ChangeRefused, match="the tenant as a whole"):
            await user("eve", is_revoked=True)
        await commit_all(registry, raised(1))

    run(scenario())


def test_names_that_anyone_could_make_up_leave_room_for_tenants_and_these_for_the_fleet() -> None:
    async def scenario() -> None:
        registry = await fresh(ORG, TENANT, limits=Limits(raised_names=2, raised=3))
        await commit_all(registry, *(raised(1, subject=f"model/{name}") for name in "ab"))
        for subject in ("model/c", "adapter/c", "key_class/c", f"user/{TENANT.tenant}/c"):
            with pytest.raises(ChangeRefused, match="at most 2"):
                await commit_all(registry, raised(1, subject=subject))
        await commit_all(registry, raised(1))
        with pytest.raises(ChangeRefused, match="the fleet"):
            await commit_all(registry, raised(1, subject=f"org/{ORG.org}"))
        await commit_all(registry, raised(1, subject="fleet"), raised(2))

    run(scenario())


def test_all_that_may_be_raised_is_less_than_a_worker_takes() -> None:
    assert Limits().raised_names < Limits().raised < MAX_SUBJECTS - 1


OTHER = TenantAdded(tenant=an_id(3), org=ORG.org, name="globex")


def test_a_tenants_good_keys_have_a_bound_that_others_do_not_share() -> None:
    async def scenario() -> None:
        registry = await fresh(ORG, TENANT, OTHER, limits=Limits(tenant_keys=2))
        ends = msgspec.structs.replace(a_key(1), not_after_ms=WALL_MS + 1_000)
        await commit_all(registry, ends, a_key(2))
        with pytest.raises(ChangeRefused, match="at most 2"):
            await commit_all(registry, a_key(3))
        await commit_all(
            registry, a_key(4, tenant=OTHER.tenant), KeyRevoked(key_id=a_key(2).key_id)
        )
        await commit_all(registry, a_key(3))
        with pytest.raises(ChangeRefused, match="at most 2"):
            await commit_all(registry, a_key(5))
        await registry.commit(a_key(5), intent(wall_ms=WALL_MS + 1_000))
        assert [int(record.key_id, 16) for record in registry.book.keys] == [1, 2, 4, 3, 5]

    run(scenario())


def test_of_keys_that_ended_the_latest_are_kept_and_no_id_is_given_out_again() -> None:
    async def scenario() -> None:
        store = MemoryStore()
        registry = await Registry.load(store, HandClock())
        await commit_all(registry, ORG, TENANT, a_key(1))
        last = a_key(3 * KEPT_ENDED_KEYS)
        for number in range(2, 3 * KEPT_ENDED_KEYS):
            await commit_all(registry, a_key(number), KeyRevoked(key_id=a_key(number).key_id))
        await commit_all(registry, last)
        for book in (registry.book, (await Registry.load(store, HandClock())).book):
            assert KEPT_ENDED_KEYS < len(book.keys) < KEPT_ENDED_KEYS + 40
            assert book.key(a_key(2).key_id) is None
            for good in (a_key(1), last):
                assert book.key(good.key_id) is not None, "however old"
        with pytest.raises(ChangeRefused, match="taken"):
            await commit_all(registry, a_key(2))
        with pytest.raises(ChangeRefused, match="no live key"):
            await commit_all(registry, KeyRevoked(key_id=a_key(2).key_id))

    run(scenario())


def test_keys_that_ended_make_room_where_there_is_none_for_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(credentials, "MAX_KEYS", 5)

    async def scenario() -> None:
        registry = await fresh(ORG, TENANT, OTHER)
        for number in range(1, 9):
            await commit_all(registry, a_key(number), KeyRevoked(key_id=a_key(number).key_id))
        others = [a_key(number, tenant=OTHER.tenant) for number in range(20, 25)]
        await commit_all(registry, *others)
        assert [record.key_id for record in registry.book.keys] == [o.key_id for o in others]
        with pytest.raises(ChangeRefused, match="at most 5"):
            await commit_all(registry, a_key(30))

    run(scenario())


def test_a_replay_takes_the_revocation_of_a_key_that_it_has_forgotten_already() -> None:
    """Which of those that ended are kept is not in the log."""

    async def scenario() -> None:
        store = MemoryStore()
        registry = await Registry.load(store, HandClock())
        ends = msgspec.structs.replace(a_key(1), not_after_ms=WALL_MS + 1)
        await commit_all(registry, ORG, TENANT, ends)
        late = intent(wall_ms=WALL_MS + 1)
        changes: list[KeyAdded] = [a_key(number) for number in range(2, 3 * KEPT_ENDED_KEYS)]
        for change in changes:
            await registry.commit(change, late)
            await registry.commit(KeyRevoked(key_id=change.key_id), late)
        assert registry.book.key(ends.key_id) is None
        entry = Entry(change=KeyRevoked(key_id=ends.key_id), intent=late)
        await store.append(registry.rev, encode_entry(entry))
        assert (await Registry.load(store, HandClock())).rev == registry.rev + 1

    run(scenario())


def test_public_prefixes_that_ran_out_or_were_withdrawn_take_no_room_and_no_name() -> None:
    async def scenario() -> None:
        store = MemoryStore()
        registry = await Registry.load(store, HandClock(), limits=Limits(publics=2))
        ends_ms = WALL_MS + 1_000
        short = msgspec.structs.replace(a_prefix(50, "short"), not_after_ms=ends_ms)
        await commit_all(registry, ORG, short, a_prefix(51, "long"))
        with pytest.raises(ChangeRefused, match="at most 2"):
            await commit_all(registry, a_prefix(52, "third"))
        with pytest.raises(ChangeRefused, match="exists"):
            await commit_all(registry, a_prefix(52, "short"))
        late = intent(wall_ms=ends_ms)
        await registry.commit(a_prefix(52, "short"), late)
        with pytest.raises(ChangeRefused, match="at most 2"):
            await registry.commit(a_prefix(53, "third"), late)
        await registry.commit(PublicWithdrawn(public_id=an_id(51)), late)
        await registry.commit(a_prefix(53, "third"), late)
        for book in (registry.book, (await Registry.load(store, HandClock())).book):
            assert book.names["public/short"] == an_id(52)
            assert book.publics[an_id(50)].is_withdrawn
            assert list(book.publics) == [an_id(number) for number in (50, 51, 52, 53)]
        with pytest.raises(ChangeRefused, match="no public prefix"):
            await registry.commit(PublicWithdrawn(public_id=an_id(50)), late)

    run(scenario())


def test_no_prefix_is_registered_that_the_data_plane_would_leave_out() -> None:
    bounds = Limits()
    assert (bounds.publics, bounds.public_tokens) == (MAX_PREFIXES, MAX_BOOK_TOKENS)
    orgs = tuple(an_id(number) for number in range(100, 101 + MAX_AUDIENCE))
    crowd = msgspec.structs.replace(a_prefix(52, "crowd"), audience=orgs)

    async def scenario() -> None:
        registry = await fresh(ORG, limits=Limits(public_tokens=5 * 16))
        await commit_all(registry, a_prefix(50, "first", blocks=2), a_prefix(51, "second"))
        with pytest.raises(ChangeRefused, match="96 tokens of public prefixes, at most 80"):
            await commit_all(registry, a_prefix(52, "third", blocks=2))
        for number, org in enumerate(orgs):
            await commit_all(registry, OrgAdded(org=org, name=f"o{number}"))
        await commit_all(registry, PublicWithdrawn(public_id=an_id(51)))
        with pytest.raises(ChangeRefused, match="4097 organisations in the audience of crowd"):
            await commit_all(registry, crowd)

    run(scenario())


def test_what_was_proposed_under_wider_bounds_is_not_approved_beyond_them() -> None:
    async def scenario() -> None:
        store = MemoryStore()
        registry = await Registry.load(store, HandClock())
        await commit_all(registry, ORG, a_prefix(50, "first"), a_prefix(51, "second"))
        narrow = await Registry.load(store, HandClock(), limits=Limits(publics=1))
        with pytest.raises(ChangeRefused, match="2 public prefixes, at most 1"):
            await narrow.commit(PublicApproved(public_id=an_id(50)), intent("bob"))
        await commit_all(narrow, PublicWithdrawn(public_id=an_id(51)))
        await narrow.commit(PublicApproved(public_id=an_id(50)), intent("bob"))

    run(scenario())


def test_of_public_prefixes_that_ended_the_latest_are_kept_and_no_id_is_given_out_again() -> None:
    async def scenario() -> None:
        store = MemoryStore()
        registry = await Registry.load(store, HandClock())
        await commit_all(registry, ORG, a_prefix(9, "stays"))
        for number in range(10, 2 * KEPT_ENDED_PUBLICS + 10):
            withdrawn = PublicWithdrawn(public_id=an_id(number))
            await commit_all(registry, a_prefix(number, "comes-and-goes"), withdrawn)
        for book in (registry.book, (await Registry.load(store, HandClock())).book):
            assert len(book.publics) == 1 + KEPT_ENDED_PUBLICS + 1
            assert an_id(9) in book.publics
            assert an_id(10) not in book.publics
        with pytest.raises(ChangeRefused, match="given out before"):
            await commit_all(registry, a_prefix(10, "again"))

    run(scenario())
