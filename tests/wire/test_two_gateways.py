"""Several gateways of one fleet, with their registry in NATS, as processes."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from fleet import Processes, processes, text_of, until
from several import PROMPT, Fleet, cached
from tenants import Caller, Tenants, copy_secrets, reuses, tenants

from nats_desk import NatsServer, nats_server


@pytest.fixture
def started() -> Iterator[Processes]:
    with processes() as made:
        yield made


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    with nats_server(tmp_path / "nats") as made:
        yield made


def log_of(gateway: Tenants) -> str:
    return gateway.gateway.process.log()


def test_what_one_gateway_is_told_holds_at_the_other(
    started: Processes, server: NatsServer, tmp_path: Path
) -> None:
    fleet = Fleet(started, server, tmp_path)
    one = fleet.begin("one")
    other = fleet.begin("other")
    one.wait_leased(1)
    ann = one.caller("acme", "ann")
    until(lambda: fleet.at("other", ann).answer("x").status == 200, "the key is known there")
    bob = other.caller("beta", "bob")
    until(lambda: fleet.at("one", bob).answer("x").status == 200, "and the other way round")

    other.wait_leased(1)
    ann.answer(PROMPT)
    until(lambda: cached(fleet.at("other", ann)) > 0, "what one cached the other reuses")

    receipt = one.raised("revoke", "tenant/acme")
    assert fleet.at("other", ann).answer("x").status == 403, "in force there, too, when it is said"
    assert any(life.startswith("gateway/") for life in receipt["acked"]), receipt
    assert receipt["fenced"] == []
    assert fleet.at("one", bob).answer("x").status == 200

    other.enable("tenant/acme")
    until(lambda: ann.answer("x").status == 200, "enabled at the other")
    assert cached(ann) == 0, "its cache is another"


def test_while_nats_is_away_all_is_served_without_reuse_and_then_with_it_again(
    started: Processes, server: NatsServer, tmp_path: Path
) -> None:
    fleet = Fleet(started, server, tmp_path)
    one = fleet.begin("one")
    other = fleet.begin("other")
    ann = one.caller("acme", "ann")
    callers = [fleet.at("one", ann), fleet.at("other", ann)]
    until(lambda: callers[1].answer("x").status == 200, "the key is known there")
    until(lambda: all(cached(caller) for caller in callers), "both reuse")

    server.kill()
    for gateway in (one, other):
        until(
            lambda gateway=gateway: answers(callers) and not reuses(gateway.gateway), "reuse is off"
        )
    assert [cached(caller) for caller in callers] == [0, 0]
    refused = one.gateway.admin("/revoke", "POST", json={"subject": "tenant/acme", "reason": "x"})
    assert refused.status_code == 503
    assert answers(callers), "what was not revoked is served"
    assert "control.out" in log_of(other)

    server.start()
    for gateway in (one, other):
        until(lambda gateway=gateway: answers(callers) and reuses(gateway.gateway), "reuse is back")
    until(lambda: all(cached(caller) for caller in callers), "with what was cached before")
    assert "control.restored" not in log_of(one)


def answers(callers: list[Caller]) -> bool:
    """Each is answered; asserts it, so that no request fails while a test waits."""
    return all(cached(caller) >= 0 for caller in callers)


@pytest.mark.nightly
@pytest.mark.parametrize("stopped_s", [10.0, 60.0])
def test_while_nats_is_stopped_no_request_and_no_stream_of_many_fails(
    started: Processes, server: NatsServer, tmp_path: Path, stopped_s: float
) -> None:
    """Streams here are longer than a lease: those that have begun go on to their end."""
    fleet = Fleet(started, server, tmp_path, workers=2, time_scale=4)
    gateways = [fleet.begin("one"), fleet.begin("other")]
    ann = gateways[0].caller("acme", "ann")
    callers = [fleet.at(name, ann) for name in ("one", "other")]
    until(lambda: callers[1].answer("x").status == 200, "the key is known there")
    is_over, failed, answered = threading.Event(), list[str](), list[float]()

    def ask(caller: Caller, number: int) -> None:
        asked = {"prompt": text_of(40, f"s{number}"), "max_tokens": 1_500, "stream": True}
        with httpx.Client(base_url=caller.gateway.process.url, timeout=120) as client:
            while not is_over.is_set():
                began_s = time.monotonic()
                got = client.post("/v1/completions", json=asked, headers=caller.headers())
                answered.append(time.monotonic() - began_s)
                if got.status_code != 200 or not got.text.rstrip().endswith("data: [DONE]"):
                    failed.append(got.text[-300:])

    with ThreadPoolExecutor(6) as pool:
        asking = [pool.submit(ask, callers[number % 2], number) for number in range(6)]
        try:
            until(lambda: len(answered) >= 6, "all are answered")
            server.pause()
            time.sleep(stopped_s)
            assert not any(reuses(gateway.gateway) for gateway in gateways)
            server.resume()
            until(lambda: all(reuses(gateway.gateway) for gateway in gateways), "reuse is back")
        finally:
            server.resume()
            is_over.set()
        for each in asking:
            each.result()
    assert failed == []
    assert max(answered) > 3.2, "some stream was longer than a lease"


def test_a_gateway_that_hears_nothing_is_waited_for_until_its_lease_has_run_out(
    started: Processes, server: NatsServer, tmp_path: Path
) -> None:
    fleet = Fleet(started, server, tmp_path)
    one = fleet.begin("one")
    other = fleet.begin("other")
    ann = one.caller("acme", "ann")
    there = fleet.at("other", ann)
    until(lambda: there.answer("x").status == 200, "the key is known there")
    other.gateway.process.send(signal.SIGSTOP)
    try:
        receipt = one.raised("revoke", "tenant/acme")
    finally:
        other.gateway.process.child.send_signal(signal.SIGCONT)
    assert any(life.startswith("gateway/") for life in receipt["fenced"]), receipt
    until(lambda: there.answer("x").status == 403, "it catches up")


@pytest.mark.parametrize("is_whole", [True, False], ids=["all data", "an old backup"])
def test_when_nats_loses_its_data_nothing_goes_back_and_all_caches_are_left_behind(
    started: Processes, server: NatsServer, tmp_path: Path, is_whole: bool
) -> None:
    fleet = Fleet(started, server, tmp_path)
    one = fleet.begin("one")
    ann = one.caller("acme", "ann")
    server.stop()
    server.saved(tmp_path / "backup")
    server.start()
    other = fleet.begin("other")
    bob = one.caller("beta", "bob")
    until(lambda: reuses(one.gateway), "it has its lease again")
    one.raised("revoke", "tenant/acme")
    callers = [fleet.at("one", bob), fleet.at("other", bob)]
    until(lambda: callers[1].answer("x").status == 200, "the key is known there")
    until(lambda: all(cached(caller) for caller in callers), "both reuse")

    server.restored(None if is_whole else tmp_path / "backup")
    until(lambda: "control.restored" in log_of(one) + log_of(other), "it is said")
    for gateway in (one, other):
        until(lambda gateway=gateway: reuses(gateway.gateway), "reuse is back")
    assert "fleet" in {row["subject"] for row in receipts(one) + receipts(other)}
    assert fleet.at("one", ann).answer("x").status == 403, "what was revoked is"
    assert fleet.at("other", ann).answer("x").status == 403
    assert answers(callers)
    fleet.begin("third")
    assert fleet.at("third", bob).answer("x").status == 200, "who comes new knows all of it"
    assert fleet.at("third", ann).answer("x").status == 403


def receipts(gateway: Tenants) -> list[dict[str, Any]]:
    return gateway.gateway.admin("/revocations").json()["revocations"]


def test_a_gateway_starts_by_its_copy_while_nats_is_away(
    started: Processes, server: NatsServer, tmp_path: Path
) -> None:
    fleet = Fleet(started, server, tmp_path)
    one = fleet.begin("one")
    ann = one.caller("acme", "ann")
    one.gateway.process.stop()
    server.kill()
    one = fleet.begin("one", is_joined=False)
    here = fleet.at("one", ann)
    assert cached(here) == 0
    assert not reuses(one.gateway)
    server.start()
    until(lambda: answers([here]) and reuses(one.gateway), "reuse is back")
    fleet.begin("other")
    assert fleet.at("other", ann).answer("x").status == 200


def test_a_gateway_with_other_secrets_or_another_registry_does_not_start(
    started: Processes, server: NatsServer, tmp_path: Path
) -> None:
    fleet = Fleet(started, server, tmp_path)
    fleet.begin("one").caller("acme", "ann")
    flags = ("--control", server.url, "--control-replicas", "1", "--port", "0")
    odd = started.begin("serve", "--state-dir", str(tmp_path / "odd"), "--admin-port", "0", *flags)
    assert odd.child.wait(60) == 2
    assert "pepper.key" in odd.log()
    lone = tenants(started, fleet.urls, tmp_path / "two")
    lone.caller("other", "eve")
    lone.gateway.process.stop()
    copy_secrets(tmp_path / "one" / "state", tmp_path / "two" / "state")
    forked = started.begin(
        "serve", "--state-dir", str(tmp_path / "two" / "state"), "--admin-port", "0", *flags
    )
    assert forked.child.wait(60) == 2
    assert "another fleet" in forked.log()


def test_a_registry_of_one_gateway_moves_into_nats_as_it_is(
    started: Processes, server: NatsServer, tmp_path: Path
) -> None:
    fleet = Fleet(started, server, tmp_path)
    (tmp_path / "one").mkdir()
    lone = tenants(started, fleet.urls, tmp_path / "one", "--profile", "tiny")
    ann = lone.caller("acme", "ann")
    lone.gateway.process.stop()
    fleet.begin("one")
    fleet.begin("other")
    assert fleet.at("other", ann).answer("x").status == 200
