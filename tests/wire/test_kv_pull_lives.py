"""Pulls and the lives of workers: connections that stay, peers that restart, bounds, deadlines."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from pull_desk import KEY, PULLER, SERVER, Ends, Host, identity, running, wait_until

from kv_desk import LAYOUT, owner
from trunkline.core.records import Instant
from trunkline.core.transfer import PullEnd, Reason, hash_scheme, keys_digest
from trunkline.kv.pulls import Cancel, PullResult
from trunkline.kv.records import Pins, always
from trunkline.kv.server import PullServer
from trunkline.kv.store import BlockStore

TRANSPORTS = pytest.mark.parametrize("is_local", [False, True], ids=["tcp", "shared-memory"])
BLOCKS = 3
CHUNKS = BLOCKS * len(LAYOUT.spans)
ONE_BY_ONE = replace(SERVER, batch_bytes=1)
"""The source asks its host before each chunk."""


def outcome(result: PullResult) -> tuple[PullEnd, Reason | None, int]:
    return result.end, result.reason, result.blocks


# -- lives and idle times --------------------------------------------------------------------------


def test_d11_an_idle_connection_that_the_source_closed_costs_nothing() -> None:
    with running(Ends()) as ends:
        assert outcome(ends.pull()) == (PullEnd.PUBLISHED, None, 3)

        def is_closed() -> bool:
            ends.clock.ms += SERVER.idle_ms
            return ends.server.figures.connections == 0

        wait_until(is_closed)
        assert ends.puller.peers.idle_count == 1
        assert outcome(ends.pull()) == (PullEnd.PUBLISHED, None, 3)


def test_d11_an_idle_connection_is_kept_warm_by_a_ping() -> None:
    with running(Ends()) as ends:
        ends.pull()
        for _ in range(4):
            ends.clock.ms += PULLER.peers.ping_ms + 1
            ends.puller.peers.tend()
        assert ends.puller.peers.idle_count == 1
        assert ends.server.figures.connections == 1


def test_d11_who_ends_does_not_wait_for_an_answer_to_a_ping() -> None:
    """By the test's clock no ping is ever late."""
    ends = Ends()
    gate = threading.Event()
    with running(ends):
        ends.pull()
        ends.server._answer = lambda *_: gate.wait() and None  # type: ignore[method-assign]
        ends.clock.ms += PULLER.peers.ping_ms + 1
        tending = threading.Thread(target=ends.puller.peers.tend)
        tending.start()
        wait_until(lambda: ends.puller.peers.idle_count == 0)
        ends.puller.close()
        tending.join()
        gate.set()


def test_d11_a_ping_that_nobody_answers_ends_the_connection() -> None:
    with running(Ends()) as ends:
        ends.pull()
        ends.server.close()
        ends.clock.ms += PULLER.peers.ping_ms + 1
        ends.puller.peers.tend()
        assert ends.puller.peers.idle_count == 0


@pytest.mark.parametrize("count", [1, 4])
def test_no_more_connections_stay_warm_than_may(count: int) -> None:
    peers = replace(PULLER.peers, warm_per_peer=count)
    with running(Ends(pull_options=replace(PULLER, peers=peers))) as ends:
        due = Instant(ends.clock.ms + 1_000)
        taken = [ends.puller.peers.connect(ends.at(), due, lambda: None) for _ in range(6)]
        for connection in taken:
            ends.puller.peers.give_back(connection)
        assert ends.puller.peers.idle_count == count


def test_no_more_connections_stay_warm_in_all_than_may() -> None:
    peers = replace(PULLER.peers, warm_total=2)
    with running(Ends(pull_options=replace(PULLER, peers=peers))) as ends:
        due = Instant(ends.clock.ms + 1_000)
        taken = [ends.puller.peers.connect(ends.at(), due, lambda: None) for _ in range(3)]
        for number, connection in enumerate(taken):
            connection.source = replace(connection.source, worker=f"w{number}")
            ends.puller.peers.give_back(connection)
        assert ends.puller.peers.idle_count == 2


def test_d04_d30_connections_of_an_earlier_life_are_closed_and_its_grants_refused() -> None:
    with running(Ends()) as ends:
        ends.pull()
        old = ends.request()
        port = ends.server.address[1]
        ends.server.close()
        ends.server = PullServer(
            ends.source.store, LAYOUT, identity("w1", "i2"), KEY, ends.clock,
            replace(SERVER, port=port), host=Host(), draw=ends.draw.randbytes,
        )  # fmt: skip
        ends.server.start()
        result = ends.puller.pull(old)
        assert outcome(result) == (PullEnd.REJECTED, Reason.INCARNATION, 0)
        renewed = replace(ends.at(), incarnation="i2")
        grant = ends.grant(source_incarnation="i2")
        assert outcome(ends.pull(ends.request(renewed, grant))) == (PullEnd.PUBLISHED, None, 3)
        assert ends.puller.peers.idle_count == 1


def test_d27_a_source_that_restarts_fifty_times_under_load_costs_single_pulls() -> None:
    with running(Ends()) as ends:
        port, is_over = ends.server.address[1], threading.Event()
        results: list[PullResult] = []

        def keep_pulling() -> None:
            while not is_over.is_set():
                results.append(ends.puller.pull(ends.request()))

        threads = [threading.Thread(target=keep_pulling) for _ in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(50):
            ended = len(results)
            wait_until(lambda ended=ended: len(results) > ended)
            ends.server.close()
            ends.server = PullServer(
                ends.source.store, LAYOUT, identity("w1", "i1"), KEY, ends.clock,
                replace(SERVER, port=port), host=Host(), draw=ends.draw.randbytes,
            )  # fmt: skip
            ends.server.start()
        is_over.set()
        for thread in threads:
            thread.join()
        assert len(results) >= 50
        assert {result.end for result in results} <= {PullEnd.PUBLISHED, PullEnd.REJECTED}
        assert outcome(ends.pull())[0] is PullEnd.PUBLISHED
        ends.settled()


def test_d10_another_worker_at_the_port_is_refused() -> None:
    with running(Ends()) as ends:
        meant = replace(ends.at(), worker="w9")
        result = ends.pull(ends.request(meant, ends.grant(source="w9")))
        assert outcome(result) == (PullEnd.REJECTED, Reason.INCARNATION, 0)


def test_d26_workers_with_other_schemes_of_keys_do_not_pair() -> None:
    with running(Ends()) as ends:
        other = replace(identity("w2"), scheme=hash_scheme(32))
        ends.puller.peers._identity = other
        assert outcome(ends.pull()) == (PullEnd.REJECTED, Reason.LAYOUT, 0)
        wait_until(lambda: ends.server.figures.ended == {Reason.LAYOUT: 1})


def test_workers_of_another_revision_do_not_pair() -> None:
    with running(Ends()) as ends:
        strange = Ends(layout=replace(LAYOUT, model="m2"))
        result = strange.pull(strange.request(ends.at()))
        assert outcome(result) == (PullEnd.REJECTED, Reason.LAYOUT, 0)


def test_d25_a_closed_puller_ends_what_runs_and_takes_nothing_more() -> None:
    ends = Ends()
    gate = threading.Event()
    ends.source_host.at_ask = lambda asked: gate.wait() and None
    results: list[PullResult] = []
    with running(ends):
        thread = threading.Thread(target=lambda: results.append(ends.puller.pull(ends.request())))
        thread.start()
        wait_until(lambda: ends.source_host.asked > 0)
        ends.puller.close()
        thread.join()
        gate.set()
        assert outcome(results[0]) == (PullEnd.CANCELLED, Reason.CLIENT, 0)
        assert outcome(ends.pull()) == (PullEnd.CANCELLED, Reason.CLOSING, 0)


def test_no_more_pulls_run_than_may() -> None:
    ends = Ends(pull_options=replace(PULLER, max_pulls=1))
    inner: list[PullResult] = []
    ends.host.at_ask = lambda asked: (
        inner.append(ends.puller.pull(ends.request())) if asked == 2 else None
    )
    with running(ends):
        assert outcome(ends.pull()) == (PullEnd.PUBLISHED, None, 3)
    assert outcome(inner[0]) == (PullEnd.REJECTED, Reason.BUSY, 0)


def test_what_a_pull_is_for_is_compared_before_anybody_is_asked() -> None:
    ends = Ends()
    wrong = {
        "other keys": ends.request(grant=ends.grant(keys=keys_digest(b"x" * 96))),
        "other owner": ends.request(owner=owner("b")),
        "other source": ends.request(grant=ends.grant(source="w3")),
        "other destination": ends.request(grant=ends.grant(destination="w3")),
        "earlier life": ends.request(grant=ends.grant(destination_incarnation="i0")),
        "no grant": replace(ends.request(), grant="rubbish"),
    }
    for name, request in wrong.items():
        assert outcome(ends.pull(request)) == (PullEnd.REJECTED, Reason.GRANT, 0), name
    elsewhere = ends.request(grant=ends.grant(first_block=7))
    assert outcome(ends.pull(elsewhere)) == (PullEnd.REJECTED, Reason.CHAIN, 0)
    ends.host.reason = Reason.LEASE
    assert outcome(ends.pull()) == (PullEnd.REJECTED, Reason.LEASE, 0)
    assert ends.puller.figures.pulls == 8


class Queue:
    """A source's store, behind a wait that only ends when its peer leaves."""

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self.is_long = True
        self.waiting = 0

    def pin(
        self,
        ns: bytes,
        keys: Sequence[bytes],
        *,
        until: Instant,
        holder: str = "",
        is_verified: bool = True,
        is_wanted: Callable[[], bool] = always,
    ) -> Pins:
        self.waiting += 1
        wait_until(lambda: not (self.is_long and is_wanted()))
        self.waiting -= 1
        if self.is_long:
            return Pins(token=b"", blocks=(), reason=Reason.LOST)
        return self._store.pin(ns, keys, until=until, holder=holder, is_verified=is_verified)

    def unpin(self, token: bytes) -> bool:
        return self._store.unpin(token)

    def renew(self, token: bytes, until: Instant) -> bool:
        return self._store.renew(token, until)


@TRANSPORTS
def test_who_leaves_a_sources_queue_gives_its_place_back_at_once(is_local: bool) -> None:
    ends = Ends(is_local=is_local, server_options=replace(SERVER, max_pulls=1))
    queue = ends.server._store = Queue(ends.source.store)
    cancel = Cancel()
    results: list[PullResult] = []
    with running(ends):
        thread = threading.Thread(
            target=lambda: results.append(ends.puller.pull(ends.request(), cancel))
        )
        thread.start()
        wait_until(lambda: queue.waiting == 1)
        further = ends.puller.pull(ends.request())
        assert outcome(further) == (PullEnd.REJECTED, Reason.BUSY, 0), "one place, taken"
        assert queue.waiting == 1, "who stays is waited for"
        cancel.cancel()
        thread.join()
        assert outcome(results[0]) == (PullEnd.CANCELLED, Reason.CLIENT, 0)
        wait_until(lambda: ends.server.figures.open_pulls == 0)
        wait_until(lambda: ends.server.figures.ended.get(Reason.LOST) == 1)
        queue.is_long = False
        assert outcome(ends.pull()) == (PullEnd.PUBLISHED, None, 3)
        ends.settled()


def test_a_pull_over_its_deadline_would_show() -> None:
    ends = Ends()
    seen: list[int] = []

    def look(asked: int) -> None:
        if asked == 2:
            ends.clock.ms += 10_000
            seen.append(ends.puller.figures.overdue_pulls)
            ends.clock.ms -= 10_000

    ends.host.at_ask = look
    with running(ends):
        ends.pull()
    assert seen == [1]
    assert ends.puller.figures.overdue_pulls == 0


@pytest.mark.parametrize("is_first_cancelled", [False, True])
def test_d08_two_pulls_of_the_same_blocks_do_not_complete_each_other(
    is_first_cancelled: bool,
) -> None:
    """The second runs whole while the first has one block. Each publishes its own bytes."""
    ends = Ends()
    cancel = Cancel()
    inner: list[PullResult] = []

    def pull_again(blocks: int) -> None:
        if blocks == 1:
            inner.append(ends.puller.pull(ends.request()))
            if is_first_cancelled:
                cancel.cancel()

    with running(ends):
        result = ends.puller.pull(ends.request(on_progress=pull_again), cancel)
        assert outcome(inner[0]) == (PullEnd.PUBLISHED, None, 3)
        if is_first_cancelled:
            assert outcome(result) == (PullEnd.CANCELLED, Reason.CLIENT, 0)
        else:
            assert outcome(result) == (PullEnd.PUBLISHED, None, 3)
        assert ends.destination.hits(ends.places, ends.whose) == 3
        assert ends.destination.alarms == []
        assert ends.destination.staged_bytes() == 0
        ends.settled()
