"""Registry and audit log together: no grant is unrecorded, no taking away is held back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
from audit_bench import SMALL, AuditBench, login
from registry_bench import (
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

from hand_clock import HandClock
from trunkline.control.audit import AuditLog
from trunkline.control.changes import (
    Change,
    KeyRevoked,
    OrgPolicySet,
    PublicApproved,
    PublicWithdrawn,
    SubjectEnabled,
    TenantPolicySet,
)
from trunkline.control.ledger import Ledger
from trunkline.control.memory_store import Fault, MemoryStore
from trunkline.control.receipts import Erase, Erasure, Fence, Receipt
from trunkline.control.registry import Registry
from trunkline.core.audit import pseudonym
from trunkline.core.epochs import Subject, SubjectKind
from trunkline.core.freshness import Verb
from trunkline.errors import AuditDown, ChangeRefused, RegistryDown

FLEET = Subject(kind=SubjectKind.FLEET)


class LedgerBench:
    """One process over a store in memory and two audit folders."""

    def __init__(self, root: Path) -> None:
        self.audit_bench = AuditBench(root)
        self.store = MemoryStore()
        self.is_shared = False

    async def begin(self) -> None:
        self.audit: AuditLog = self.audit_bench.begin()
        await self.audit.open()
        self.registry = await Registry.load(
            self.store, HandClock(), acknowledged_rev=self.audit.audited_rev
        )
        self.ledger = Ledger(self.registry, self.audit, is_shared=self.is_shared)

    async def settle(self, *changes: Change) -> None:
        for change in changes:
            assert (await self.ledger.commit(change, intent())).is_audited

    def lose_sinks(self) -> None:
        for sink in self.audit_bench.sinks:
            sink.is_down = True

    async def regain_sinks(self) -> None:
        for sink in self.audit_bench.sinks:
            sink.is_down = False
        self.audit_bench.clock.ms += 1_000.0
        await self.ledger.tick()

    def of_registry(self) -> list[tuple[object, object]]:
        """Revision and action of each record that stands for a revision."""
        records = self.audit_bench.records("a")
        return [(r["rev"], r["action"]) for r in records if r["rev"] and r["kind"] != "OUTCOME"]


def played(root: Path, scenario: Callable[[LedgerBench], Awaitable[None]]) -> LedgerBench:
    bench = LedgerBench(root)

    async def play() -> None:
        await bench.begin()
        try:
            await scenario(bench)
        finally:
            for sink in bench.audit_bench.sinks:
                sink._thread.shutdown()

    run(play())
    report = bench.audit_bench.verified("a")
    assert report.fault is None
    return bench


def test_a_grant_is_in_the_audit_log_before_it_is_in_the_registry(tmp_path: Path) -> None:
    async def scenario(bench: LedgerBench) -> None:
        seen: list[object] = []
        bench.registry.subscribe(lambda _: seen.extend(bench.audit_bench.actions("a")))
        await bench.settle(ORG)
        assert seen == ["wanted.org-added"]

    bench = played(tmp_path, scenario)
    assert bench.audit_bench.actions("a") == ["wanted.org-added", "registry.org-added"]
    wanted, done = bench.audit_bench.records("a")
    assert (wanted["rev"], done["rev"], done["actor"], done["reason"]) == (0, 1, "alice", "test")


@pytest.mark.parametrize(
    "change",
    [
        OrgPolicySet(org=ORG.org, is_shared=True),
        TenantPolicySet(tenant=TENANT.tenant, weight=9.0),
        a_key(2),
        SubjectEnabled(subject="model/x"),
        a_prefix(51, "more"),
        PublicApproved(public_id=an_id(50)),
    ],
    ids=lambda change: type(change).__name__,
)
def test_nothing_is_granted_without_a_sink(tmp_path: Path, change: Change) -> None:
    async def scenario(bench: LedgerBench) -> None:
        barred = raised(1, subject="model/x", is_revoked=True)
        await bench.settle(ORG, TENANT, a_key(1), barred, a_prefix())
        book = bench.registry.book
        bench.lose_sinks()
        with pytest.raises(AuditDown):
            await bench.ledger.commit(change, intent())
        assert bench.registry.book is book
        await bench.regain_sinks()
        await bench.ledger.commit(change, intent("bob"))

    bench = played(tmp_path, scenario)
    assert [rev for rev, _ in bench.of_registry()] == list(range(1, 7))


@pytest.mark.parametrize(
    "change",
    [
        KeyRevoked(key_id=a_key(1).key_id),
        raised(1),
        raised(1, is_revoked=True),
        PublicWithdrawn(public_id=an_id(50)),
    ],
    ids=lambda change: type(change).__name__,
)
def test_what_takes_away_goes_on_without_a_sink_and_is_filled_in(
    tmp_path: Path, change: Change
) -> None:
    async def scenario(bench: LedgerBench) -> None:
        await bench.settle(ORG, TENANT, a_key(1), a_prefix())
        bench.lose_sinks()
        recorded = await bench.ledger.commit(change, intent(reason="stolen laptop"))
        assert (recorded.rev, recorded.is_audited) == (5, False)
        assert bench.registry.rev == 5
        await bench.regain_sinks()
        assert bench.audit_bench.records("a")[-1]["reason"] == "stolen laptop"

    bench = played(tmp_path, scenario)
    assert [rev for rev, _ in bench.of_registry()] == [1, 2, 3, 4, 5]


def test_what_no_sink_took_is_filled_in_after_a_restart_too(tmp_path: Path) -> None:
    async def scenario(bench: LedgerBench) -> None:
        await bench.settle(ORG, TENANT)
        bench.lose_sinks()
        await bench.ledger.commit(raised(1, is_revoked=True), intent())
        await bench.audit_bench.die()
        await bench.begin()
        await bench.ledger.tick()
        await bench.ledger.tick()

    bench = played(tmp_path, scenario)
    assert [rev for rev, _ in bench.of_registry()] == [1, 2, 3]
    last = bench.audit_bench.records("a")[-1]
    assert (last["kind"], last["rev"], last["result"]) == ("OUTCOME", 3, "effective")


@pytest.mark.parametrize("is_shared", [False, True])
def test_an_outcome_that_is_unknown_is_laid_to_this_process_only_where_no_other_writes(
    tmp_path: Path, is_shared: bool
) -> None:
    async def scenario(bench: LedgerBench) -> None:
        await commit_all(bench.registry, ORG, TENANT, raised(1))
        await bench.audit_bench.die()
        bench.is_shared = is_shared
        await bench.begin()
        await bench.ledger.tick()

    bench = played(tmp_path, scenario)
    last = bench.audit_bench.records("a")[-1]
    assert (last["kind"], last["rev"]) == ("OUTCOME", 3)
    assert str(last["reason"]).startswith("another gateway") is is_shared


def test_each_revision_has_one_record_over_many_lives(tmp_path: Path) -> None:
    async def scenario(bench: LedgerBench) -> None:
        await bench.settle(ORG, TENANT)
        for epoch in range(1, 30):
            await bench.settle(raised(epoch))
            if epoch % 4 == 0:
                await bench.audit_bench.die()
                await bench.begin()

    bench = played(tmp_path, scenario)
    assert [rev for rev, _ in bench.of_registry()] == list(range(1, 32))


def test_how_far_the_registry_is_told_of_is_known_behind_many_other_records(
    tmp_path: Path,
) -> None:
    async def scenario(bench: LedgerBench) -> None:
        await bench.settle(ORG, TENANT)
        for number in range(10 * SMALL):
            await bench.audit.write(login(number))
        await bench.audit_bench.die()
        await bench.begin()
        assert bench.audit.audited_rev == 2
        await bench.settle(a_key(1))

    bench = played(tmp_path, scenario)
    assert [rev for rev, _ in bench.of_registry()] == [1, 2, 3]


def test_a_change_that_the_registry_refuses_leaves_its_outcome(tmp_path: Path) -> None:
    async def scenario(bench: LedgerBench) -> None:
        await bench.settle(ORG)
        with pytest.raises(ChangeRefused):
            await bench.ledger.commit(ORG, intent())
        bench.store.next_faults = [Fault.REFUSED]
        with pytest.raises(RegistryDown):
            await bench.ledger.commit(TENANT, intent())

    bench = played(tmp_path, scenario)
    records = bench.audit_bench.records("a")[2:]
    wanted, exists, again, down = [(r["kind"], r["result"], r["reason"]) for r in records]
    assert wanted == again == ("INTENT", "", "test")
    assert exists == ("OUTCOME", "refused", "change_refused")
    assert down == ("OUTCOME", "refused", "registry_down")


def test_no_token_no_name_and_no_id_of_a_tenant_is_in_the_log(tmp_path: Path) -> None:
    prefix = a_prefix(50, "rules")
    key = msgspec.structs.replace(a_key(1), secret_hash=bytes(range(100, 132)))

    async def scenario(bench: LedgerBench) -> None:
        await bench.settle(ORG, TENANT, key, prefix, raised(1))
        for refused in (ORG, TENANT, prefix, TenantPolicySet(tenant=an_id(2), default_scope="org")):
            with pytest.raises(ChangeRefused):
                await bench.ledger.commit(refused, intent())
        await bench.ledger.outcome(_receipt(), intent())
        erasure = Erasure(holder="acme-worker:8000", rev=5, is_done=True)
        await bench.ledger.erased(erasure, intent())

    bench = played(tmp_path, scenario)
    text = b"".join(path.read_bytes() for path in bench.audit_bench.folder("a").glob("*.jsonl"))
    forbidden = [
        *(prefix.tokens, prefix.token_digest, key.secret_hash),
        *(an_id(number).encode() for number in (1, 2, 50)),
        *(b"acme", b"rules", b"llama", b"bob"),
    ]
    for word in forbidden:
        assert word not in text
        assert word.hex().encode() not in text
    ids = {r["scope_path_hmac"] for r in bench.audit_bench.records("a")}
    assert pseudonym(bytes(32), TENANT_SUBJECT) in ids


def _receipt() -> Receipt:
    return Receipt(
        rev=5,
        subject=Subject(kind=SubjectKind.TENANT, path=TENANT.tenant),
        verb=Verb.INVALIDATE,
        epoch=1,
        acked=("w1", "gateway"),
        fenced=("w2",),
        fence=Fence.WORKER,
        erase=Erase.NAMESPACE,
        aborted=3,
        condemned_blocks=7,
        condemned_bytes={"device": 5, "host": 6},
        ms=12.4,
    )


def test_outcome_and_erasures_tell_the_counts(tmp_path: Path) -> None:
    erasure = Erasure(holder="w1", rev=5, is_done=True, blocks=7, bytes={"device": 11})

    async def scenario(bench: LedgerBench) -> None:
        await bench.ledger.outcome(_receipt(), intent())
        await bench.ledger.erased(erasure, intent())
        bench.lose_sinks()
        with pytest.raises(AuditDown):
            await bench.ledger.outcome(_receipt(), intent())
        with pytest.raises(AuditDown):
            await bench.ledger.intent("enable", FLEET, intent())

    outcome, erased = played(tmp_path, scenario).audit_bench.records("a")
    counts = {"acked": 2, "fenced": 1, "aborted": 3, "blocks": 7, "bytes": 11, "ms": 12}
    assert outcome["counts"] == counts
    assert (erased["kind"], erased["counts"]) == ("ERASED", {"blocks": 7, "device_bytes": 11})


def test_the_intent_of_a_revocation_is_the_record_of_its_revision(tmp_path: Path) -> None:
    async def scenario(bench: LedgerBench) -> None:
        await bench.settle(ORG, TENANT)
        await bench.registry.commit(raised(1), intent())
        for _ in range(2):
            await bench.ledger.intent("invalidate", FLEET, intent())

    bench = played(tmp_path, scenario)
    assert bench.of_registry()[2:] == [(3, "registry.epoch-raised")]


def test_an_audit_log_that_knows_more_than_the_registry_shows_a_restored_backup(
    tmp_path: Path,
) -> None:
    async def scenario(bench: LedgerBench) -> None:
        await bench.settle(ORG, TENANT, raised(1))
        await bench.audit_bench.die()
        bench.store = MemoryStore(bench.store.records[:1])
        await bench.begin()
        assert bench.registry.lost_revisions == 2
        assert bench.registry.table.epochs == {FLEET: 4}
        await bench.ledger.tick()

    bench = played(tmp_path, scenario)
    assert [rev for rev, _ in bench.of_registry()] == [1, 2, 3, 4]


def test_sinks_that_come_up_after_a_restored_registry_refuse_to_go_on_with_it(
    tmp_path: Path,
) -> None:
    async def scenario(bench: LedgerBench) -> None:
        await bench.settle(ORG, TENANT)
        await bench.audit_bench.die()
        audit = bench.audit_bench.begin()
        bench.lose_sinks()
        registry = await Registry.load(MemoryStore(bench.store.records[:1]), HandClock())
        bench.ledger = Ledger(registry, audit)
        await bench.regain_sinks()
        with pytest.raises(AuditDown):
            await bench.ledger.commit(TENANT, intent())

    played(tmp_path, scenario)
