"""What `cache_control` asks for: so long, for so many prompts of a tenant, where no events tell."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from picker_bench import W0, Bench, ids, request

from trunkline.gateway.contracts import ClientError
from trunkline.gateway.retention import (
    DEFAULT_MS,
    MAX_KEPT,
    MAX_TENANTS,
    TTLS_MS,
    Retention,
    asked_ms,
)

HOUR, FIVE = {"type": "ephemeral", "ttl": "1h"}, {"type": "ephemeral", "ttl": "5m"}


def text(control: Any) -> dict[str, Any]:
    return {"type": "text", "text": "x", "cache_control": control}


@pytest.mark.parametrize(
    ("body", "asked"),
    [
        ({}, 0.0),
        ({"cache_control": FIVE}, 300_000.0),
        ({"system": [text(HOUR)], "messages": []}, 3_600_000.0),
        ({"tools": [{"name": "f", "cache_control": {"type": "ephemeral"}}]}, DEFAULT_MS),
        ({"messages": [{"role": "user", "content": [text(FIVE), text(HOUR)]}]}, 3_600_000.0),
        ({"messages": [{"role": "user", "content": [text({"ttl": None})]}]}, DEFAULT_MS),
        ({"messages": [{"role": "user", "content": [text("1h")]}]}, 0.0),
    ],
)
def test_the_longest_time_that_any_part_asks_for_counts(body: dict[str, Any], asked: float) -> None:
    assert asked_ms(body) == asked


@pytest.mark.parametrize("ttl", ["9d", "", "5M", 300, ["1h"], {"1h": 1}, True])
@pytest.mark.parametrize("place", ["body", "system", "tools", "messages", "parts"])
def test_a_time_that_is_not_known_is_refused_with_those_that_are(ttl: Any, place: str) -> None:
    part = text({"type": "ephemeral", "ttl": ttl})
    in_parts = {"messages": [{"role": "user", "content": [text(HOUR), part]}]}
    with pytest.raises(ClientError) as caught:
        asked_ms(part if place == "body" else in_parts if place == "parts" else {place: [part]})
    refusal = caught.value.refusal
    assert (refusal.code, refusal.param) == ("invalid_value", "cache_control.ttl")
    assert refusal.message == "cache_control.ttl must be one of 5m, 1h"


@pytest.mark.parametrize("ttl", TTLS_MS)
def test_c59_a_pin_lives_as_long_as_it_was_asked_for(ttl: str) -> None:
    bench = Bench(W0, ttl_ms=120_000.0)
    target = bench.picker.target(W0)
    assert target is not None
    bench.picker.add_target(replace(target, is_exact=False))
    asked = replace(request(ids(64)), keep_ms=TTLS_MS[ttl])
    bench.picker.pick(asked, frozenset())
    bench.clock.ms += TTLS_MS[ttl] - 1_000.0
    assert bench.expected(W0, ids(64)) > 0
    bench.clock.ms += 2_000.0
    bench.directory.expire(bench.clock.now())
    assert bench.expected(W0, ids(64)) == 0


def test_where_events_tell_what_is_there_no_wish_does() -> None:
    bench = Bench(W0, ttl_ms=5_000.0)
    bench.picker.pick(replace(request(ids(64)), keep_ms=TTLS_MS["1h"]), frozenset())
    bench.clock.ms += 6_000.0
    bench.directory.expire(bench.clock.now())
    assert bench.expected(W0, ids(64)) == 0


def test_a_tenant_has_so_many_at_a_time_and_others_have_theirs() -> None:
    retention = Retention()
    granted = [retention.granted_ms("a", 300_000.0, 0.0) for _ in range(MAX_KEPT + 1)]
    assert granted == [300_000.0] * MAX_KEPT + [0.0]
    assert retention.granted_ms("b", 300_000.0, 0.0) == 300_000.0
    assert retention.granted_ms("a", 300_000.0, 300_000.0) == 300_000.0, "the first ran out"


def test_a_long_wish_holds_no_place_of_shorter_ones_that_are_over() -> None:
    retention = Retention()
    hour_ms, minutes_ms = TTLS_MS["1h"], TTLS_MS["5m"]
    for wished_ms in [hour_ms] + [minutes_ms] * (MAX_KEPT - 1):
        assert retention.granted_ms("t", wished_ms, 0.0)
    assert not retention.granted_ms("t", minutes_ms, minutes_ms - 1.0)
    assert retention.granted_ms("t", minutes_ms, minutes_ms)


def test_tenants_beyond_the_bound_push_out_who_asked_longest_ago() -> None:
    retention = Retention()
    for number in range(MAX_TENANTS + 50):
        retention.granted_ms(str(number), 1.0, 0.0)
    assert len(retention._until) == MAX_TENANTS  # pyright: ignore[reportPrivateUsage]
    assert "0" not in retention._until  # pyright: ignore[reportPrivateUsage]


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from([0, 1, 5]), st.integers(0, 3))))
def test_nobody_ever_has_more_than_the_bound(asks: list[tuple[str, int, int]]) -> None:
    retention, now = Retention(), 0.0
    for tenant, wished, pause in asks:
        now += pause
        assert retention.granted_ms(tenant, float(wished), now) in (0.0, float(wished))
    assert all(len(until) <= MAX_KEPT for until in retention._until.values())  # pyright: ignore[reportPrivateUsage]
