"""Leases: an old life never comes back, and the end is the end."""

from __future__ import annotations

from trunkline.core.leases import LeaseTable
from trunkline.core.records import BootInstant, WorkerId

W1 = WorkerId("w1")


def at(ms: float) -> BootInstant:
    return BootInstant(ms)


def test_a_lease_holds_until_its_last_moment_and_not_at_it() -> None:
    table = LeaseTable(ttl_ms=3_000.0)
    assert table.renew(W1, "a", 1, at(0.0)) is None
    assert table.is_live(W1, at(2_999.9))
    assert not table.is_live(W1, at(3_000.0))


def test_a_worker_that_never_spoke_has_no_lease() -> None:
    assert not LeaseTable(ttl_ms=3_000.0).is_live(W1, at(0.0))


def test_repeated_and_late_heartbeats_renew_nothing() -> None:
    table = LeaseTable(ttl_ms=1_000.0)
    table.renew(W1, "a", 5, at(0.0))
    assert table.renew(W1, "a", 5, at(900.0)) == "w1: heartbeat 5 does not follow 5"
    assert table.renew(W1, "a", 4, at(900.0)) is not None
    assert not table.is_live(W1, at(1_000.0))


def test_a_late_heartbeat_of_an_earlier_life_never_resurrects_it() -> None:
    table = LeaseTable(ttl_ms=1_000.0)
    table.renew(W1, "a", 5, at(0.0))
    assert table.renew(W1, "b", 1, at(100.0)) is None
    refusal = table.renew(W1, "a", 6, at(200.0))
    assert refusal == "w1: this incarnation was replaced by a newer one"
    assert table.boot_nonce(W1) == "b"


def test_a_removed_worker_starts_afresh() -> None:
    table = LeaseTable(ttl_ms=1_000.0)
    table.renew(W1, "a", 5, at(0.0))
    table.forget(W1)
    assert not table.is_live(W1, at(1.0))
    assert table.renew(W1, "a", 1, at(2.0)) is None
