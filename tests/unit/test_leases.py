"""Leases: an old life never comes back, and a life only goes forwards."""

from __future__ import annotations

from trunkline.core.leases import FENCED_LIVES, LeaseTable
from trunkline.core.records import WorkerId

W1, W2 = WorkerId("w1"), WorkerId("w2")


def test_repeated_and_late_heartbeats_renew_nothing() -> None:
    table = LeaseTable()
    assert table.renew(W1, "a", 5) is None
    assert table.renew(W1, "a", 5) == "w1: heartbeat 5 does not follow 5"
    assert table.renew(W1, "a", 4) == "w1: heartbeat 4 does not follow 5"
    assert table.renew(W1, "a", 6) is None


def test_a_late_heartbeat_of_an_earlier_life_never_resurrects_it() -> None:
    table = LeaseTable()
    table.renew(W1, "a", 5)
    assert table.renew(W1, "b", 1) is None
    refusal = table.renew(W1, "a", 6)
    assert refusal == "w1: this incarnation was replaced by a newer one"
    assert table.boot_nonce(W1) == "b"


def test_not_only_the_last_life_is_fenced_but_all_before_it() -> None:
    table = LeaseTable()
    for nonce in "abc":
        assert table.renew(W1, nonce, 1) is None
    for nonce in "ab":
        assert "replaced by a newer one" in (table.renew(W1, nonce, 9) or "")
    assert table.boot_nonce(W1) == "c"


def test_so_many_lives_are_fenced_and_the_oldest_beyond_them_is_forgotten() -> None:
    table = LeaseTable()
    for number in range(FENCED_LIVES + 1):
        assert table.renew(W1, f"life {number}", 1) is None
    assert table.renew(W1, "life 0", 2) is not None, "at the bound"
    assert table.renew(W1, "one more", 1) is None
    assert table.renew(W1, "life 1", 2) is not None
    assert table.renew(W1, "life 0", 2) is None


def test_workers_have_lives_of_their_own() -> None:
    table = LeaseTable()
    table.renew(W1, "a", 5)
    assert table.renew(W2, "a", 1) is None
    assert table.renew(W2, "b", 1) is None
    assert table.renew(W1, "a", 6) is None


def test_a_removed_worker_starts_afresh() -> None:
    table = LeaseTable()
    table.renew(W1, "a", 5)
    table.renew(W1, "b", 5)
    table.forget(W1)
    assert table.boot_nonce(W1) is None
    assert table.renew(W1, "a", 1) is None
