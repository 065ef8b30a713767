"""What a worker is told of a pull, and where; what it tells of the end: at once, later or never."""

from __future__ import annotations

import json
from dataclasses import replace

import msgspec
from test_pulls_desk import BLOCK, W0, W1, W2, Bench

from trunkline.core.heed import MAX_UNHEEDED
from trunkline.core.records import Instant, WorkerId
from trunkline.gateway.pulls import NO_PART, pull_address
from trunkline.gateway.telling import salted, told_headers, transfer_params
from trunkline.gateway.unheard import AWAIT_MS, MAX_AWAITED, Unheard
from trunkline.ports.worker import Endpoint, Target


def _target(name: WorkerId, **said: object) -> Target:
    here = Endpoint(host="h", port=1, host_header="h:1")
    return Target(worker=name, endpoint=here, headers=(("x-rank", "0"),), **said)  # type: ignore[arg-type]


def test_an_agent_in_front_of_an_engine_is_told_in_headers_and_a_connector_in_the_body() -> None:
    bench, ticket = Bench(), '{"ns":""}'
    _inside(bench)
    order = bench.order()
    in_front, inside = _target(W1), _target(W1, is_told_in_body=True)
    assert told_headers(in_front, ticket, order) == (
        *in_front.headers,
        ("x-trunkline-ticket", ticket),
        order.header,
    )
    assert transfer_params(in_front, ticket, order) == b""
    assert told_headers(inside, ticket, order) == inside.headers
    said = json.loads(transfer_params(inside, ticket, order))["trunkline"]
    assert said["ticket"] == {"ns": ""}
    assert said["name"] == order.name
    assert said["pull"] == json.loads(order.header[1])
    body = json.loads(salted(b'{"a":1}', "s", None, inside, transfer_params(inside, ticket, None)))
    assert body == {"a": 1, "cache_salt": "s", "kv_transfer_params": {"trunkline": {
        "ticket": {"ns": ""}}}}  # fmt: skip


def test_an_engine_without_an_agent_is_told_its_salt_alone() -> None:
    assert told_headers(_target(W1), "", None) == (("x-rank", "0"),)
    assert transfer_params(_target(W1, is_told_in_body=True), "", None) == b""
    assert salted(b"{}", "s", None, _target(W1)) == b'{"cache_salt":"s"}'


def _inside(bench: Bench) -> None:
    """The destination is an engine with a connector."""
    bench.addresses[W1] = replace(bench.addresses[W1], tells_later=True)


def test_what_a_lease_says_of_a_pull_teaches_once_and_only_of_the_worker_that_says_it() -> None:
    bench, told = Bench(), msgspec.json.encode({"end": "published", "blocks": 6, "ms": 9.0})
    _inside(bench)
    order = bench.order()
    bench.desk.told("w0", order.name, told)
    assert bench.desk.accounts.ended == {}
    bench.desk.told("w1", order.name, told)  # the answer is not over yet
    bench.desk.told("w1", order.name, told)
    assert bench.desk.accounts.ended == {("published", ""): 1}
    bench.clock.ms += AWAIT_MS
    bench.desk.answered(order, bench.keys, 0, is_good=True)
    assert bench.desk.heed.unheeded == 0


def test_c109_ends_that_are_not_told_in_time_count_as_ignored() -> None:
    bench = Bench()
    _inside(bench)
    for _ in range(MAX_UNHEEDED):
        bench.desk.answered(bench.order(), bench.keys, 0, is_good=True)
    assert bench.ignored == []
    bench.clock.ms += AWAIT_MS
    bench.desk.answered(bench.order(), bench.keys, 0, is_good=True)
    assert bench.ignored == [W1]
    assert bench.desk.heed.unheeded == MAX_UNHEEDED
    assert bench.sources([8, 0, 0]) == [8, NO_PART, 0]


def test_an_answer_that_failed_says_nothing_of_who_takes_notice() -> None:
    bench = Bench()
    _inside(bench)
    bench.desk.answered(bench.order(), bench.keys, None, is_good=False)
    bench.clock.ms += AWAIT_MS
    bench.desk.answered(bench.order(), bench.keys, None, is_good=False)
    assert bench.desk.heed.unheeded == 0
    assert bench.desk.accounts.ended == {("untold", ""): 2}


def test_so_many_ends_are_waited_for_and_beyond_that_the_oldest_is_forgotten() -> None:
    unheard = Unheard[int]()
    for number in range(MAX_AWAITED + 2):
        unheard.begin(f"n{number}", W1, number)
        unheard.end(f"n{number}", Instant(0.0))
    assert len(unheard) == MAX_AWAITED
    assert unheard.take("n1", W1) is None
    assert unheard.take("n2", W1) == 2
    assert len(unheard.overdue(Instant(AWAIT_MS))) == MAX_AWAITED - 1
    assert len(unheard) == 0


def test_c109_engines_with_a_tier_of_their_own_are_judged_by_what_they_reused() -> None:
    bench = Bench()
    for name in (W0, W1, W2):
        own = pull_address(_target(name, p2p=("10.0.0.9", 5710)))
        assert own is not None
        bench.addresses[name] = own
    order = bench.order()
    source = json.loads(transfer_params(_target(W1), "", order))["remote_kv_source"]
    assert (source["remote_host"], source["remote_port"]) == ("10.0.0.9", 5710)
    assert len(source["kv_request_id"]) == 32
    for _ in range(MAX_UNHEEDED - 1):
        bench.desk.reused(order, bench.keys, 2 * BLOCK)  # what it had without a pull
    bench.desk.reused(order, bench.keys, 8 * BLOCK)
    assert bench.desk.accounts.tokens == 6 * BLOCK
    for _ in range(MAX_UNHEEDED):
        bench.desk.reused(order, bench.keys, 0)
    assert bench.ignored == [W1]


def test_without_a_transfer_key_only_engines_with_a_tier_of_their_own_take_part() -> None:
    bench = Bench(transfer_key=b"")
    assert bench.sources([8, 0, 0]) == [NO_PART] * 3
