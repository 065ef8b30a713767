"""Leases by the clock: when they begin and end, what arms them, who is waited for."""

from __future__ import annotations

import math

import pytest

from trunkline.core.freshness import (
    LEASE_TTL_MS,
    MAX_ASKS,
    MAX_HOLDERS,
    Freshness,
    Grant,
    LeaseGrants,
    Taken,
    grant_ms,
)
from trunkline.core.records import BootInstant

A, B = "tenant/a", "model/b"


def at(ms: float) -> BootInstant:
    return BootInstant(ms)


def grant(ask: str, rev: int = 1, ttl_ms: float = LEASE_TTL_MS, **epochs: int) -> Grant:
    return Grant(ask=ask, rev=rev, ttl_ms=ttl_ms, epochs={A: epochs.get("a", 0)} if epochs else {})


def test_a_lease_counts_from_when_it_was_asked_for() -> None:
    holder = Freshness("n")
    ask = holder.ask(at(1_000))
    assert holder.take(grant(ask)) is Taken.ARMED  # whenever that is
    assert holder.is_valid(at(3_999))
    assert not holder.is_valid(at(4_000))


def test_a_life_begins_without_a_lease() -> None:
    assert not Freshness("n").is_valid(at(-1e12))
    assert Freshness("n").ends_at == -math.inf


def test_what_is_no_answer_to_an_open_ask_of_this_life_arms_nothing() -> None:
    holder = Freshness("n")
    first, second = holder.ask(at(0)), holder.ask(at(10))
    assert holder.take(grant("m:0.000")) is Taken.OTHER_LIFE
    assert holder.take(grant("n:5.000")) is Taken.UNKNOWN_ASK
    assert holder.take(grant("")) is Taken.OTHER_LIFE
    assert not holder.is_valid(at(11))
    assert holder.take(grant(second)) is Taken.ARMED
    assert holder.take(grant(second)) is Taken.UNKNOWN_ASK
    assert holder.take(grant(first)) is Taken.UNKNOWN_ASK


def test_neither_revision_nor_epoch_ever_falls() -> None:
    holder = Freshness("n")
    holder.take(grant(holder.ask(at(0)), rev=7, a=3))
    assert holder.take(grant(holder.ask(at(1)), rev=6, a=2)) is Taken.BEHIND
    holder.obey(3, A, 1)
    assert (holder.rev, holder.epoch(A)) == (7, 3)
    assert holder.ends_at == LEASE_TTL_MS


def test_an_order_moves_the_revision_only_where_none_was_missed() -> None:
    holder = Freshness("n")
    holder.take(grant(holder.ask(at(0)), rev=7))
    holder.obey(8, A, 1)
    assert holder.rev == 8
    holder.obey(10, A, 2)  # what happened in 9 is not known here
    assert (holder.rev, holder.epoch(A)) == (8, 2)
    assert holder.may_use(8, at(1))
    assert not holder.may_use(9, at(1))


def test_a_use_stands_on_every_epoch() -> None:
    holder = Freshness("n")
    holder.obey(1, A, 2)
    assert holder.is_current([A, B], [2, 0])
    assert not holder.is_current([A, B], [1, 0])
    assert not holder.is_current([A, B], [2, 1]), "from ahead of us is not current either"


def test_a_grant_is_never_longer_than_the_holder_takes_them_for() -> None:
    holder = Freshness("n")
    holder.take(grant(holder.ask(at(0)), ttl_ms=1e9))
    assert holder.ends_at == LEASE_TTL_MS


def test_of_too_many_asks_the_oldest_is_forgotten() -> None:
    holder = Freshness("n")
    asks = [holder.ask(at(0)) for _ in range(MAX_ASKS + 1)]
    assert len(set(asks)) == len(asks), "asks of one moment differ"
    assert holder.take(grant(asks[0])) is Taken.UNKNOWN_ASK
    assert holder.take(grant(asks[1])) is Taken.ARMED


@pytest.mark.parametrize("clocks", [(1.0, 1.0), (1.01, 0.99), (0.99, 1.01)])
def test_a_grantor_outwaits_any_holder_whose_clock_is_one_percent_off(
    clocks: tuple[float, float],
) -> None:
    grantor_rate, holder_rate = clocks
    waited_ms, believed_ms = grant_ms() / grantor_rate, LEASE_TTL_MS / holder_rate
    assert waited_ms > believed_ms + 30.0
    assert grant_ms() == pytest.approx(3_130.0)


def grantor(now_ms: float = 0.0, *, has_earlier_life: bool = False) -> LeaseGrants:
    return LeaseGrants(at(now_ms), has_earlier_life=has_earlier_life)


def test_nothing_is_granted_below_a_committed_revision() -> None:
    grants = grantor()
    assert grants.grant("w#1", "1:0", rev=4, epochs={}, now=at(0)) is not None
    grants.fencing(5, at(1))
    assert grants.grant("w#1", "1:1", rev=4, epochs={}, now=at(2)) is None
    assert grants.until("w#1", at(2)) == grant_ms(), "a refused grant lengthens nothing"
    assert grants.grant("w#1", "1:1", rev=5, epochs={}, now=at(2)) is not None


def test_a_change_is_in_force_when_each_has_acked_or_run_out() -> None:
    grants = grantor()
    for holder, now_ms in (("a#1", 0), ("b#1", 500), ("c#1", 900)):
        grants.grant(holder, "x:0", rev=1, epochs={}, now=at(now_ms))
    fencing = grants.fencing(2, at(1_000))
    fencing.ack("c#1")
    fencing.ack("b#2")  # another life: it says nothing about the first
    assert fencing.silent() == ("a#1", "b#1")
    assert fencing.complete_at() == 500 + grant_ms()
    assert not fencing.is_complete(at(3_629))
    assert fencing.is_complete(at(3_630))
    fencing.ack("a#1")
    fencing.ack("b#1")
    assert fencing.is_complete(at(1_000))


def test_what_is_granted_after_the_commit_is_not_waited_for() -> None:
    grants = grantor()
    fencing = grants.fencing(2, at(0))
    grants.grant("a#1", "x:0", rev=2, epochs={}, now=at(1))
    assert fencing.is_complete(at(1))
    assert not grants.fencing(3, at(2)).is_complete(at(2))


def test_a_grantor_that_lost_its_table_waits_one_grant_time() -> None:
    fencing = grantor(5_000, has_earlier_life=True).fencing(2, at(5_100))
    fencing.ack("a#1")
    assert not fencing.is_complete(at(8_129))
    assert fencing.is_complete(at(8_130))


def test_a_holder_without_a_lease_must_ack() -> None:
    fencing = grantor().fencing(2, at(0))
    fencing.require("gateway")
    assert not fencing.is_complete(at(1e12))
    fencing.ack("gateway")
    assert fencing.is_complete(at(0))


def test_at_the_bound_of_holders_nobody_new_is_granted_until_one_has_run_out() -> None:
    grants = grantor()
    for number in range(MAX_HOLDERS):
        assert grants.grant(f"w{number}", "x:0", rev=1, epochs={}, now=at(number)) is not None
    assert grants.grant("late", "x:0", rev=1, epochs={}, now=at(3_000)) is None
    assert grants.grant("w1", "x:0", rev=1, epochs={}, now=at(3_000)) is not None
    assert grants.grant("late", "x:0", rev=1, epochs={}, now=at(3_131)) is not None
