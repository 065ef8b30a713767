"""The registry: what a change must keep, what a log must be, what is durable before it counts."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from registry_bench import (
    DAY_MS,
    ORG,
    TENANT,
    TENANT_SUBJECT,
    a_key,
    a_prefix,
    an_id,
    commit_all,
    intent,
    raised,
    run,
)

from hand_clock import WALL_MS, HandClock
from trunkline.control.book import Limits
from trunkline.control.changes import (
    MAX_PUBLIC_TOKENS,
    Change,
    Entry,
    KeyRevoked,
    OrgAdded,
    OrgPolicySet,
    OrgRemoved,
    PublicApproved,
    PublicWithdrawn,
    RevisionLost,
    SubjectEnabled,
    TenantAdded,
    TenantPolicySet,
    TenantRemoved,
    decode_entry,
    encode_entry,
)
from trunkline.control.key_shelf import key_added
from trunkline.control.memory_store import Fault, MemoryStore
from trunkline.control.registry import Committed, Registry
from trunkline.core.epochs import Subject, SubjectKind
from trunkline.core.identity import ScopeKind
from trunkline.errors import ChangeRefused, RegistryBroken, RegistryDown, UnknownName

TENANT_OF = Subject(kind=SubjectKind.TENANT, path=TENANT.tenant)
FLEET = Subject(kind=SubjectKind.FLEET)


async def fresh(*changes: Change, limits: Limits | None = None) -> Registry:
    registry = await Registry.load(MemoryStore(), HandClock(), limits=limits)
    await commit_all(registry, *changes)
    return registry


def records(*changes: Change) -> list[bytes]:
    return [encode_entry(Entry(change=change, intent=intent())) for change in changes]


def test_a_replay_gives_the_same_book() -> None:
    async def scenario() -> None:
        store = MemoryStore()
        registry = await Registry.load(store, HandClock())
        await commit_all(
            registry,
            ORG,
            TENANT,
            a_key(1),
            a_key(2),
            TenantPolicySet(tenant=TENANT.tenant, is_shared=True, cache_floor_bytes=5),
            raised(1, is_revoked=True),
            KeyRevoked(key_id=a_key(2).key_id),
            a_prefix(),
        )
        await registry.commit(PublicApproved(public_id=an_id(50)), intent("bob"))
        again = await Registry.load(store, HandClock())
        assert again.rev == 9
        assert again.table == registry.table
        assert list(again.book.keys) == list(registry.book.keys)
        assert again.book.tenants == registry.book.tenants
        assert again.book.publics == registry.book.publics

    run(scenario())


def test_a_key_record_comes_back_as_it_went_in() -> None:
    async def scenario() -> None:
        registry = await fresh(ORG, TENANT, a_key(1))
        record = registry.book.key(a_key(1).key_id)
        assert record is not None
        assert key_added(record) == a_key(1)

    run(scenario())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (OrgAdded(org=an_id(9), name="acme-corp"), "exists"),
        (OrgAdded(org=an_id(2), name="other"), "given out before"),
        (TenantAdded(tenant=an_id(9), org=an_id(8), name="x"), "no organisation"),
        (TenantAdded(tenant=an_id(9), org=an_id(1), name="acme"), "exists"),
        (TenantAdded(tenant="ab", org=an_id(1), name="x"), "pattern|regex"),
        (TenantAdded(tenant=an_id(9) + "\n", org=an_id(1), name="x"), "pattern|regex"),
        (TenantAdded(tenant=an_id(9), org=an_id(1), name="Not/A Name"), "pattern|regex"),
        (a_key(1), "is taken"),
        (a_key(2, tenant=an_id(7)), "no tenant"),
        (msgspec.structs.replace(a_key(2), roles=("root",)), "root"),
        (msgspec.structs.replace(a_key(2), secret_hash=b"short"), "length"),
        (KeyRevoked(key_id="ff"), "no live key"),
        (raised(9), "above"),
        (raised(1, subject="tenant/" + an_id(77)), "not known"),
        (raised(1, subject="planet/x"), "planet"),
        (raised(1, subject="fleet/x"), "fleet"),
        (SubjectEnabled(subject=TENANT_SUBJECT), "not revoked"),
        (TenantRemoved(tenant=TENANT.tenant), "revoke it before"),
        (OrgRemoved(org=ORG.org), "has tenants"),
        (TenantPolicySet(tenant=TENANT.tenant, default_scope="org"), "opting in"),
        (
            TenantPolicySet(tenant=TENANT.tenant, cache_floor_bytes=2, cache_cap_bytes=1),
            "above the cap",
        ),
        (PublicApproved(public_id=an_id(50)), "no public prefix"),
        (msgspec.structs.replace(a_prefix(), token_digest=bytes(32)), "digest"),
        (msgspec.structs.replace(a_prefix(), block_tokens=15), "whole blocks"),
        (msgspec.structs.replace(a_prefix(), not_after_ms=WALL_MS + 91 * DAY_MS), "90 days"),
        (msgspec.structs.replace(a_prefix(), not_after_ms=WALL_MS), "90 days"),
        (msgspec.structs.replace(a_prefix(), audience=()), "length"),
        (msgspec.structs.replace(a_prefix(), audience=(an_id(9),)), "no organisation"),
        (
            msgspec.structs.replace(a_prefix(), tokens=bytes(4 * MAX_PUBLIC_TOKENS + 4)),
            "length",
        ),
    ],
)
def test_a_change_that_does_not_fit_is_refused_and_leaves_nothing(
    change: Change, words: str
) -> None:
    async def scenario() -> None:
        registry = await fresh(ORG, TENANT, a_key(1))
        book = registry.book
        with pytest.raises(ChangeRefused, match=words):
            await registry.commit(change, intent())
        assert registry.book is book
        assert await registry.commit(a_key(3), intent()) == 4

    run(scenario())


def test_an_id_is_not_given_out_again_after_its_tenant_was_removed() -> None:
    async def scenario() -> None:
        registry = await fresh(
            ORG, TENANT, a_key(1), raised(1, is_revoked=True), TenantRemoved(tenant=TENANT.tenant)
        )
        key = registry.book.key(a_key(1).key_id)
        assert key is not None
        assert key.is_revoked
        with pytest.raises(ChangeRefused, match="given out before"):
            await registry.commit(TENANT, intent())
        # The name is free, for another id: nothing of the old one can be reached by it.
        fresh_id = TenantAdded(tenant=an_id(3), org=ORG.org, name="acme")
        await registry.commit(fresh_id, intent())
        assert registry.book.subject("tenant/acme").path == an_id(3)

    run(scenario())


def test_names_stand_for_subjects() -> None:
    async def scenario() -> None:
        book = (await fresh(ORG, TENANT, a_prefix())).book
        assert book.subject("fleet") == FLEET
        assert book.subject("tenant/acme") == TENANT_OF
        assert book.subject(f"tenant/{TENANT.tenant}") == TENANT_OF
        assert book.subject("user/acme/al/ice").path == f"{TENANT.tenant}/al/ice"
        assert book.subject("org/acme-corp").path == ORG.org
        assert book.subject("public/rules").path == an_id(50)
        assert book.subject("model/meta/llama-3").path == "meta/llama-3"
        assert book.subject("adapter/x").kind is SubjectKind.ADAPTER
        assert book.subject("key_class/ci").kind is SubjectKind.KEY_CLASS
        for name in ("user/acme/alice", "tenant/acme", "org/acme-corp", "public/rules", "fleet"):
            assert book.name_of(book.subject(name)) == name

    run(scenario())


@pytest.mark.parametrize(
    "name",
    [
        *("", "acme", "tenant", "tenant/", "tenant/nobody", "user/acme", "user/acme/", "user/no/x"),
        *("fleet/x", "model/", "public/none", "org/" + "x" * 600, "model/a\nb"),
    ],
)
def test_a_name_that_stands_for_nothing_is_an_error_that_says_so(name: str) -> None:
    async def scenario() -> None:
        book = (await fresh(ORG, TENANT)).book
        with pytest.raises(UnknownName):
            book.subject(name)

    run(scenario())


def test_org_is_the_scope_only_where_both_sides_opted_in() -> None:
    async def scenario() -> None:
        registry = await fresh(ORG, TENANT)
        policy = TenantPolicySet(tenant=TENANT.tenant, default_scope="org", is_shared=True)
        await registry.commit(policy, intent())
        assert registry.book.default_scope(TENANT.tenant) is ScopeKind.TENANT
        await registry.commit(OrgPolicySet(org=ORG.org, is_shared=True), intent())
        assert registry.book.default_scope(TENANT.tenant) is ScopeKind.ORG

    run(scenario())


def test_a_public_prefix_lives_with_two_approvers_until_its_end_or_withdrawal() -> None:
    async def scenario() -> None:
        registry = await fresh(ORG, a_prefix())
        approval = PublicApproved(public_id=an_id(50))
        live = [registry.book.publics[an_id(50)].is_live(WALL_MS)]
        with pytest.raises(ChangeRefused, match="others than its proposer"):
            await registry.commit(approval, intent("alice"))
        await registry.commit(approval, intent("bob"))
        live.append(registry.book.publics[an_id(50)].is_live(WALL_MS))
        with pytest.raises(ChangeRefused, match="already"):
            await registry.commit(approval, intent("bob"))
        await registry.commit(approval, intent("carol"))
        prefix = registry.book.publics[an_id(50)]
        live += [prefix.is_live(WALL_MS), prefix.is_live(WALL_MS + 30 * DAY_MS)]
        await registry.commit(PublicWithdrawn(public_id=an_id(50)), intent())
        live.append(registry.book.publics[an_id(50)].is_live(WALL_MS))
        assert live == [False, False, True, False, False]
        late = intent("dave", wall_ms=WALL_MS + 31 * DAY_MS)
        await registry.commit(a_prefix(51, "others"), intent())
        with pytest.raises(ChangeRefused, match="run out"):
            await registry.commit(PublicApproved(public_id=an_id(51)), late)

    run(scenario())


def test_an_approval_of_the_proposer_in_an_old_log_counts_for_nothing() -> None:
    async def scenario() -> None:
        store = MemoryStore()
        registry = await Registry.load(store, HandClock())
        await commit_all(registry, ORG, a_prefix())
        for number, actor in enumerate(("alice", "bob")):
            entry = Entry(change=PublicApproved(public_id=an_id(50)), intent=intent(actor))
            await store.append(2 + number, encode_entry(entry))
        again = await Registry.load(store, HandClock())
        assert again.book.publics[an_id(50)].approvers == ("bob",)
        assert not again.book.publics[an_id(50)].is_live(WALL_MS)

    run(scenario())


def test_subscribers_hear_of_each_change_in_order_and_after_it_is_durable() -> None:
    async def scenario() -> None:
        store = MemoryStore()
        registry = await Registry.load(store, HandClock())
        heard: list[tuple[str, int, int]] = []

        def hear(name: str) -> None:
            def take(committed: Committed) -> None:
                assert registry.book is committed.book
                heard.append((name, committed.rev, len(store.records)))

            registry.subscribe(take)

        hear("first")
        hear("second")
        async with asyncio.TaskGroup() as group:
            for change in (ORG, TENANT, a_key(1)):
                group.create_task(registry.commit(change, intent()))
        assert heard == [(n, rev, rev) for rev in (1, 2, 3) for n in ("first", "second")]

    run(scenario())


def test_a_subscriber_that_raises_does_not_keep_the_others_from_hearing() -> None:
    async def scenario() -> None:
        registry = await fresh()
        heard: list[int] = []

        def break_its_word(committed: Committed) -> None:
            raise LookupError(committed.rev)

        registry.subscribe(break_its_word)
        registry.subscribe(lambda committed: heard.append(committed.rev))
        with pytest.raises(LookupError):
            await registry.commit(ORG, intent())
        assert (heard, registry.rev) == ([1], 1)

    run(scenario())


def test_a_change_whose_answer_was_lost_counts_once() -> None:
    async def scenario() -> None:
        store = MemoryStore()
        registry = await Registry.load(store, HandClock())
        heard: list[int] = []
        registry.subscribe(lambda committed: heard.append(committed.rev))
        store.next_faults = [Fault.ANSWER_LOST]
        assert await registry.commit(ORG, intent()) == 1
        assert await registry.commit(TENANT, intent()) == 2
        assert (heard, len(store.records)) == ([1, 2], 2)

    run(scenario())


def test_a_change_that_was_not_kept_is_an_error_and_not_in_the_book() -> None:
    async def scenario() -> None:
        store = MemoryStore()
        registry = await Registry.load(store, HandClock())
        store.next_faults = [Fault.REFUSED]
        with pytest.raises(RegistryDown, match="was not kept"):
            await registry.commit(ORG, intent())
        assert registry.rev == 0
        assert await registry.commit(ORG, intent()) == 1

    run(scenario())


def test_what_was_written_unseen_is_taken_in_before_the_next_change() -> None:
    async def scenario() -> None:
        store = MemoryStore()
        registry = await Registry.load(store, HandClock())

        class Gone(MemoryStore):
            """Keeps the record, loses the answer, and cannot be read."""

            async def append(self, expected_rev: int, record: bytes) -> int:
                await store.append(expected_rev, record)
                self.is_down = True
                self._require_up()
                return 0

        registry._store = Gone()
        with pytest.raises(RegistryDown, match="unknown"):
            await registry.commit(ORG, intent())
        registry._store = store
        assert await registry.commit(TENANT, intent()) == 2
        assert registry.book.orgs.keys() == {ORG.org}

    run(scenario())


def test_a_cancelled_change_takes_effect_when_it_is_durable() -> None:
    async def scenario() -> None:
        begun, go_on = asyncio.Event(), asyncio.Event()

        class Slow(MemoryStore):
            async def append(self, expected_rev: int, record: bytes) -> int:
                begun.set()
                await go_on.wait()
                return await super().append(expected_rev, record)

        registry = await Registry.load(Slow(), HandClock())
        task = asyncio.ensure_future(registry.commit(ORG, intent()))
        await begun.wait()
        task.cancel()
        await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert registry.rev == 1

    run(scenario())


def test_a_log_with_a_gap_is_refused() -> None:
    class Gappy(MemoryStore):
        async def read(self, after_rev: int, limit: int) -> list[tuple[int, bytes]]:
            rows = await super().read(after_rev, limit)
            return [(rev, record) for rev, record in rows if rev != 2]

    async def scenario() -> None:
        with pytest.raises(RegistryBroken, match="revision 2 is missing"):
            await Registry.load(Gappy(records(ORG, TENANT, a_key(1))), HandClock())

    run(scenario())


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"\xc1",
        b"\x90" * 5_000,
        msgspec.msgpack.encode({"change": {"type": "moon-added"}, "intent": {"actor": "a"}}),
        msgspec.msgpack.encode(
            {
                "change": {"type": "org-added", "org": an_id(1), "name": "a", "extra": 1},
                "intent": {"actor": "a"},
            }
        ),
        msgspec.msgpack.encode(
            {"change": {"type": "org-added", "org": "1", "name": "a"}, "intent": {"actor": "a"}}
        ),
        msgspec.msgpack.encode({"change": {"type": "org-added", "org": an_id(1), "name": "a"}}),
    ],
)
def test_a_record_that_cannot_be_read_is_named_by_its_revision(record: bytes) -> None:
    async def scenario() -> None:
        with pytest.raises(RegistryBroken, match="revision 2 of the registry cannot be read"):
            await Registry.load(MemoryStore([*records(ORG), record]), HandClock())

    run(scenario())


def test_a_record_that_does_not_fit_the_ones_before_it_is_refused() -> None:
    async def scenario() -> None:
        with pytest.raises(RegistryBroken, match="revision 2 does not fit"):
            await Registry.load(MemoryStore(records(ORG, ORG)), HandClock())

    run(scenario())


@pytest.mark.parametrize("kept", range(6))
def test_a_restored_backup_raises_the_fleet_epoch_above_every_lost_one(kept: int) -> None:
    async def scenario() -> None:
        fleet = [raised(epoch, subject="fleet") for epoch in range(1, 5)]
        log = records(ORG, *fleet)
        restored = MemoryStore(log[:kept], high_water=5)
        registry = await Registry.load(restored, HandClock())
        if kept == 5:
            assert (registry.rev, registry.lost_revisions) == (5, 0)
            return
        assert registry.table.epochs[FLEET] > 4
        assert registry.rev == 6, "no holder sees the revision fall"
        assert registry.lost_revisions == 5 - kept
        again = await Registry.load(restored, HandClock())
        assert (again.rev, again.lost_revisions) == (6, 0)

    run(scenario())


def test_a_mending_that_was_cut_off_is_finished_at_the_next_start() -> None:
    async def scenario() -> None:
        store = MemoryStore(records(ORG, RevisionLost()), high_water=2)
        registry = await Registry.load(store, HandClock())
        assert registry.table.epochs[FLEET] == 3

    run(scenario())


def test_what_the_audit_log_remembers_shows_a_restored_backup_too() -> None:
    async def scenario() -> None:
        registry = await Registry.load(MemoryStore(records(ORG)), HandClock(), acknowledged_rev=4)
        assert registry.table.epochs == {FLEET: 5}

    run(scenario())


def test_an_entry_is_written_only_when_it_reads_back_the_same() -> None:
    entry = Entry(change=ORG, intent=intent())
    assert decode_entry(encode_entry(entry)) == entry
    with pytest.raises(ValueError, match="length"):
        encode_entry(Entry(change=ORG, intent=intent(reason="x" * 513)))
