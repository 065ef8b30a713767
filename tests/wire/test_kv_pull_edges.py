"""Pulls where something at the edge is odd: an address, a lease, a ring, an unforeseen error."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from pull_desk import SERVER, STALL_MS, Ends, running, wait_until

from kv_desk import Desk
from trunkline.core.records import Instant
from trunkline.core.transfer import PullEnd, Reason
from trunkline.kv.peers import Peers
from trunkline.kv.server import ServerOptions
from trunkline.kv.wire import Fault

TRANSPORTS = pytest.mark.parametrize("is_local", [False, True], ids=["tcp", "shared-memory"])
ONE_BY_ONE = replace(SERVER, batch_bytes=1)
ODD_HOSTS = ["a..b", "localhost", "", "x" * 300, "127.0.0.1 ", "256.1.1.1", "\ud800", "a\0b"]


@pytest.mark.parametrize("host", ODD_HOSTS)
def test_a_host_that_is_no_address_is_refused_and_nothing_is_left_of_a_hundred_pulls(
    host: str,
) -> None:
    ends = Ends()
    for _ in range(100):
        result = ends.pull(ends.request(replace(ends.at(), host=host, port=1)))
        assert (result.end, result.reason) == (PullEnd.REJECTED, Reason.CONNECT)
    assert ends.puller.figures.open_pulls == 0


@pytest.mark.parametrize("port", [-1, 0, 65_536])
def test_a_port_that_is_none_is_refused(port: int) -> None:
    ends = Ends()
    result = ends.pull(ends.request(replace(ends.at(), host="127.0.0.1", port=port)))
    assert (result.end, result.reason) == (PullEnd.REJECTED, Reason.CONNECT)


@pytest.mark.parametrize("local", ["x" * 300, "\ud800"])
def test_a_local_name_that_is_none_falls_back_to_tcp(local: str) -> None:
    with running(Ends()) as ends:
        result = ends.pull(ends.request(replace(ends.at(), local=local)))
        assert result.end is PullEnd.PUBLISHED


def test_an_error_nobody_foresaw_is_raised_and_takes_no_place_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Peers, "take", fails)
    ends = Ends()
    for _ in range(100):
        with pytest.raises(ZeroDivisionError):
            ends.puller.pull(ends.request())
    assert ends.puller.figures.open_pulls == 0
    assert ends.puller.figures.ended == {(PullEnd.CANCELLED, Reason.CLIENT): 100}


@pytest.mark.parametrize("stall_ms", [5_000.0, 4_950.0])
def test_a_source_may_not_stall_for_longer_than_its_pin_holds(stall_ms: float) -> None:
    with pytest.raises(AssertionError):
        ServerOptions(stall_ms=stall_ms, lease_ms=5_000.0, tick_ms=50.0)


@TRANSPORTS
@pytest.mark.parametrize("sent", [0, 2])
def test_nothing_is_sent_by_a_source_that_slept_through_its_lease(
    sent: int, is_local: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process stood still between the renewal of the pin and the chunk."""
    ends = Ends(is_local=is_local, server_options=ONE_BY_ONE)
    store, renewals = ends.source.store, 0
    renew = store.renew

    def renew_and_sleep(token: bytes, until: Instant) -> bool:
        nonlocal renewals
        renewals += 1
        is_renewed = renew(token, until)
        if renewals > sent:
            ends.clock.ms += SERVER.lease_ms - STALL_MS
        return is_renewed

    monkeypatch.setattr(store, "renew", renew_and_sleep)
    with running(ends):
        ends.puller.pull(ends.request(deadline=Instant(1e9)))
        ends.settled()
        assert renewals == sent + 1
        assert ends.server.figures.bytes_out == sent * ends.layout.chunk_bytes


def test_a_ring_holds_nothing_when_a_pull_is_over() -> None:
    with running(Ends(is_local=True)) as ends:
        assert ends.pull().end is PullEnd.PUBLISHED
        wait_until(lambda: ends.server.figures.pulls_served == 1)
        (connection,) = ends.puller.peers._idle
        assert connection.ring is not None
        assert not any(connection.ring._view)
        for desk in (ends.source, ends.destination):
            _forget(desk)
        ends.source.put(ends.places, ends.whose)
        assert ends.pull().end is PullEnd.PUBLISHED


def _forget(desk: Desk) -> None:
    desk.store.condemn(lambda _: True)
    while desk.store.erase(100):
        pass


@pytest.mark.parametrize("is_made", [False, True])
def test_where_there_is_no_ring_tcp_does_the_work(
    is_made: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(name: str, flags: int) -> int:
        raise OSError("no memory for it")

    def not_as_it_should_be(*_: object) -> None:
        raise Fault(Reason.PROTOCOL)

    with running(Ends(is_local=True)) as ends:
        if is_made:
            monkeypatch.setattr("trunkline.kv.peers.RingReader", not_as_it_should_be)
        else:
            monkeypatch.setattr(os, "memfd_create", no_memory)
        result = ends.pull()
        assert (result.end, result.reason, result.blocks) == (PullEnd.PUBLISHED, None, 3)
        (connection,) = ends.puller.peers._idle
        assert connection.ring is None
