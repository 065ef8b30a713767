"""A pull between two stores over real sockets and shared memory: what arrives, and what changes
underneath while it runs.
"""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from pull_desk import OWNER, PATIENT, SERVER, Ends, Host, running, wait_until

from kv_desk import LAYOUT, chain, owner
from trunkline.core.transfer import Lesson, PullEnd, Reason
from trunkline.kv.pulls import Cancel, PullResult
from trunkline.kv.ring import SLOTS

TRANSPORTS = pytest.mark.parametrize("is_local", [False, True], ids=["tcp", "shared-memory"])
BLOCKS = 3
CHUNKS = BLOCKS * len(LAYOUT.spans)
ONE_BY_ONE = replace(SERVER, batch_bytes=1)
"""The source asks its host before each chunk."""


def outcome(result: PullResult) -> tuple[PullEnd, Reason | None, int]:
    return result.end, result.reason, result.blocks


# -- what arrives ----------------------------------------------------------------------------------


@TRANSPORTS
def test_all_blocks_of_a_grant_arrive_and_are_found(is_local: bool) -> None:
    with running(Ends(is_local=is_local, block_count=5)) as ends:
        result = ends.pull()
        assert outcome(result) == (PullEnd.PUBLISHED, None, 5)
        assert result.bytes == 5 * ends.layout.block_bytes
        ends.settled()
        assert ends.server.figures.bytes_out == result.bytes
        assert ends.server.figures.ended == {}


@TRANSPORTS
def test_blocks_of_many_chunks_arrive_whole(is_local: bool) -> None:
    """More than a socket holds, in chunks that do not divide a block."""
    part = replace(LAYOUT.components[0], size_bytes=3_000_000)
    layout = replace(LAYOUT, components=(part,), chunk_bytes=1 << 20)
    with running(Ends(is_local=is_local, block_count=3, layout=layout)) as ends:
        assert outcome(ends.pull()) == (PullEnd.PUBLISHED, None, 3)
        ends.settled()


@TRANSPORTS
def test_a_connection_serves_one_pull_after_the_other(is_local: bool) -> None:
    with running(Ends(is_local=is_local)) as ends:
        for count in (1, 2, 3):
            ends.places = chain(OWNER, 0, count)
            assert outcome(ends.pull()) == (PullEnd.PUBLISHED, None, count)
        assert ends.server.figures.connections == 1
        assert ends.puller.peers.idle_count == 1


def test_progress_is_told_block_by_block() -> None:
    seen: list[int] = []
    with running(Ends()) as ends:
        ends.pull(ends.request(on_progress=seen.append))
    assert seen == [1, 2, 3]


def test_a_run_that_begins_in_the_middle_goes_on_after_what_is_here() -> None:
    with running(Ends()) as ends:
        ends.destination.put(ends.places[:1], OWNER)
        tail = ends.places[1:]
        request = ends.request(grant=ends.grant(tail), places=tuple(tail))
        result = ends.puller.pull(request)
        assert outcome(result) == (PullEnd.PUBLISHED, None, 2)
        assert ends.destination.hits(ends.places, OWNER) == 3


def test_a_peer_that_has_no_shared_memory_here_is_asked_over_tcp() -> None:
    with running(Ends()) as ends:
        elsewhere = replace(ends.at(), local="trunkline-kv-of-another-host")
        assert outcome(ends.pull(ends.request(elsewhere))) == (PullEnd.PUBLISHED, None, 3)


def test_many_threads_pull_at_once_and_each_gets_its_own() -> None:
    tenants = [owner(f"t{number}") for number in range(6)]
    with running(Ends(block_count=18)) as ends:
        runs = {whose.ns: chain(whose, 0, 3) for whose in tenants}
        ends.source.store.condemn(lambda owner: owner.ns == OWNER.ns)
        for whose in tenants:
            ends.source.put(runs[whose.ns], whose)
        results: dict[bytes, PullResult] = {}

        def run(number: int) -> None:
            whose = tenants[number]
            places = runs[whose.ns]
            grant = ends.grant(places, ns=whose.ns, subjects=whose.subjects, epochs=whose.epochs)
            request = ends.request(grant=grant, places=tuple(places), owner=whose)
            results[whose.ns] = ends.puller.pull(request)

        threads = [threading.Thread(target=run, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for whose in tenants:
            assert outcome(results[whose.ns]) == (PullEnd.PUBLISHED, None, 3)
            assert ends.destination.hits(runs[whose.ns], whose) == 3
        ends.settled()


# -- what is not there -----------------------------------------------------------------------------


@TRANSPORTS
def test_d03_d22_what_the_source_does_not_have_shortens_the_hit(is_local: bool) -> None:
    with running(Ends(is_local=is_local)) as ends:
        ends.places = chain(OWNER, 0, 5)
        result = ends.pull()
        assert outcome(result) == (PullEnd.PUBLISHED, Reason.MISS, 3)
        ends.settled()


def test_d03_a_source_that_has_nothing_says_so_and_the_directory_learns_it() -> None:
    with running(Ends()) as ends:
        ends.places = chain(OWNER, 1_000, 2)
        result = ends.pull()
        assert outcome(result) == (PullEnd.REJECTED, Reason.MISS, 0)
        assert result.reason is not None
        assert result.reason.lesson is Lesson.REMOVE
        assert ends.puller.peers.idle_count == 1, "the connection is as good as before"


def test_d24_a_full_staging_says_so_at_once() -> None:
    with running(Ends()) as ends:
        other = chain(owner("b"), 0, 8)
        staging = ends.destination.stage(other, owner("b"))
        result = ends.puller.pull(ends.request())
        assert outcome(result) == (PullEnd.REJECTED, Reason.STAGING_FULL, 0)
        assert ends.destination.store.abandon(staging.token)
        assert outcome(ends.pull()) == (PullEnd.PUBLISHED, None, 3)
        ends.settled()


def test_other_bytes_under_the_same_key_raise_the_alarm_and_the_first_stay() -> None:
    with running(Ends()) as ends:
        wrong = bytes(LAYOUT.block_bytes)
        ends.destination.store.put(ends.places[0], OWNER, wrong)
        result = ends.puller.pull(ends.request())
        assert outcome(result) == (PullEnd.REJECTED, Reason.CONFLICT, 0)
        assert len(ends.destination.alarms) == 1
        pins = ends.destination.pin(ends.places, OWNER)
        assert [bytes(block.data) for block in pins.blocks] == [wrong]
        assert ends.destination.staged_bytes() == 0


def test_d20_a_block_without_its_last_component_is_no_block() -> None:
    """The side-car is the last chunk: a source that stops before it has given nothing."""
    first_side_car = len(LAYOUT.spans) - 1
    ends = Ends(server_options=ONE_BY_ONE)
    host = ends.source_host
    host.at_ask = lambda asked: setattr(
        host, "reason", Reason.LEASE if asked > 1 + first_side_car else None
    )
    with running(ends):
        result = ends.pull()
        assert outcome(result) == (PullEnd.REJECTED, Reason.LEASE, 0)
        ends.settled()


# -- what changes underneath -----------------------------------------------------------------------


@TRANSPORTS
@pytest.mark.parametrize("at", range(CHUNKS))
def test_a_revocation_at_the_destination_ends_a_pull_at_any_chunk_with_nothing_visible(
    at: int, is_local: bool
) -> None:
    ends = Ends(is_local=is_local)

    def revoke(asked: int) -> None:
        if asked == 1 + at:  # asked once before the pull, and then after each chunk but the last
            ends.destination.judge.epochs["tenant/a"] = 1
            ends.destination.store.condemn(ends.destination.judge.is_stale)
            ends.host.reason = Reason.EPOCH

    ends.host.at_ask = revoke
    with running(ends):
        result = ends.pull()
        assert outcome(result) == (PullEnd.REJECTED, Reason.EPOCH, 0)
        assert ends.destination.store.erase(100) >= 0
        ends.destination.check_sums()
        ends.settled()


@TRANSPORTS
@pytest.mark.parametrize("at", range(CHUNKS))
def test_a_revocation_at_the_source_stops_it_before_any_chunk(at: int, is_local: bool) -> None:
    ends = Ends(is_local=is_local, server_options=ONE_BY_ONE)

    def revoke(asked: int) -> None:
        if asked == 2 + at:  # asked once for the pull, and then before each chunk
            ends.source_host.reason = Reason.EPOCH

    ends.source_host.at_ask = revoke
    with running(ends):
        assert outcome(ends.pull()) == (PullEnd.REJECTED, Reason.EPOCH, 0)
        assert ends.server.figures.bytes_out == at * 64
        ends.settled()


def test_a_revocation_that_only_the_store_knows_of_is_met_at_the_publish() -> None:
    ends = Ends()
    ends.host.at_ask = lambda asked: ends.destination.judge.epochs.update({"tenant/a": 1})
    with running(ends):
        result = ends.pull()
        assert outcome(result) == (PullEnd.REJECTED, Reason.EPOCH, 0)


@TRANSPORTS
@pytest.mark.parametrize("at", range(CHUNKS))
def test_d01_a_lease_that_runs_out_ends_the_pull_and_a_reused_slot_is_never_a_hit(
    at: int, is_local: bool
) -> None:
    """The source's pin ends at this chunk; its memory is given to other blocks."""
    ends = Ends(is_local=is_local, server_options=ONE_BY_ONE)
    other = owner("b")

    def reuse(asked: int) -> None:
        if asked == 2 + at:
            assert ends.source.store.unpin_holder("pull:w2") == 1
            ends.source.put(chain(other, 0, 8), other)
            assert ends.source.hits(chain(other, 0, 8), other) == 8
            assert ends.source.hits(ends.places, OWNER) == 0

    ends.source_host.at_ask = reuse
    with running(ends):
        result = ends.pull()
        assert result.reason is Reason.TOKEN
        assert result.blocks == at // len(LAYOUT.spans)
        ends.settled()


def test_d01_the_lease_is_renewed_while_bytes_move() -> None:
    """Longer in all than any lease, and never long without a chunk."""
    options = replace(ONE_BY_ONE, lease_ms=100.0, stall_ms=90.0)
    ends = Ends(server_options=options, pull_options=PATIENT)
    moved: list[int] = []

    def move(asked: int) -> None:
        moved.append(asked)
        ends.clock.ms += 60.0

    ends.source_host.at_ask = move
    with running(ends):
        assert outcome(ends.pull()) == (PullEnd.PUBLISHED, None, 3)
    assert len(moved) * 60 > 5 * 100
    assert ends.source.store.figures().expired_pins == 0


def test_d01_a_lease_ends_no_later_than_its_grant() -> None:
    ends = Ends(server_options=ONE_BY_ONE, pull_options=PATIENT)
    ends.source_host.at_ask = lambda asked: setattr(ends.clock, "ms", ends.clock.ms + 100.0)
    with running(ends):
        grant = ends.grant(deadline_ms=int(ends.clock.ms + 550))
        result = ends.pull(ends.request(grant=grant))
        assert (result.reason, result.blocks) == (Reason.TIMEOUT, 1)
        ends.settled()


@TRANSPORTS
@pytest.mark.parametrize("at", range(CHUNKS - SLOTS - 1))
def test_a_source_that_ends_in_the_middle_leaves_whole_blocks_or_none(
    at: int, is_local: bool
) -> None:
    ends = Ends(is_local=is_local, server_options=ONE_BY_ONE)
    ends.host.at_ask = lambda asked: ends.server.close() if asked == 2 + at else None
    with running(ends):
        result = ends.pull()
        if is_local:  # it cannot be further ahead than the ring has slots
            assert result.blocks < BLOCKS
            assert result.reason in (Reason.LOST, Reason.CLOSING)
        ends.settled()


@TRANSPORTS
@pytest.mark.parametrize("at", range(CHUNKS - 1))
def test_a_cancel_at_any_chunk_leaves_nothing(at: int, is_local: bool) -> None:
    cancel = Cancel()
    ends = Ends(is_local=is_local)
    ends.host.at_ask = lambda asked: cancel.cancel() if asked == 2 + at else None
    with running(ends):
        assert outcome(ends.pull(cancel=cancel)) == (PullEnd.CANCELLED, Reason.CLIENT, 0)
        ends.settled()


def test_a_cancel_before_the_pull_asks_nobody() -> None:
    cancel = Cancel()
    cancel.cancel()
    with running(Ends()) as ends:
        assert outcome(ends.pull(cancel=cancel)) == (PullEnd.CANCELLED, Reason.CLIENT, 0)
        assert ends.server.figures.pulls_served == 0


def test_a_cancel_wakes_a_pull_that_waits_for_a_silent_source() -> None:
    """From another thread, and at once: the test's clock stands still."""
    cancel = Cancel()
    ends = Ends(source_host=Host())
    gate = threading.Event()
    ends.source_host.at_ask = lambda asked: gate.wait() and None
    with running(ends):
        canceller = threading.Thread(
            target=lambda: (wait_until(lambda: ends.source_host.asked > 0), cancel.cancel())
        )
        canceller.start()
        result = ends.pull(cancel=cancel)
        canceller.join()
        gate.set()
        assert outcome(result) == (PullEnd.CANCELLED, Reason.CLIENT, 0)
        ends.settled()


def test_a_pull_is_given_up_where_the_rest_takes_too_long_and_what_is_here_stays() -> None:
    asked: list[tuple[int, float | None]] = []

    def give_up(blocks: int, paced_ms: float | None) -> bool:
        asked.append((blocks, paced_ms))
        return paced_ms is not None and paced_ms < 65.0

    ends = Ends()
    ends.host.at_ask = lambda asked: setattr(ends.clock, "ms", ends.clock.ms + 10.0)
    with running(ends):
        result = ends.pull(ends.request(should_give_up=give_up))
        assert outcome(result) == (PullEnd.PUBLISHED, Reason.GIVEN_UP, 1)
        assert asked[-1] == (1, pytest.approx(60.0)), "six chunks took 60 ms, six are left"
        assert asked[0] == (0, None)
        ends.settled()


def test_a_pull_that_is_given_up_before_a_block_is_whole_is_cancelled() -> None:
    with running(Ends()) as ends:
        result = ends.pull(
            ends.request(should_give_up=lambda blocks, paced_ms: paced_ms is not None)
        )
        assert outcome(result) == (PullEnd.CANCELLED, Reason.GIVEN_UP, 0)
        ends.settled()


@TRANSPORTS
def test_a_source_that_says_nothing_is_given_up_while_it_is_waited_for(is_local: bool) -> None:
    gate = threading.Event()
    asked: list[float | None] = []

    def give_up(blocks: int, paced_ms: float | None) -> bool:
        asked.append(paced_ms)
        return len(asked) == 9

    ends = Ends(is_local=is_local)
    ends.source_host.at_ask = lambda asked: gate.wait() and None
    with running(ends):
        result = ends.pull(ends.request(should_give_up=give_up))
        assert outcome(result) == (PullEnd.CANCELLED, Reason.GIVEN_UP, 0)
        assert asked == [None] * 9
        gate.set()
        ends.settled()


@TRANSPORTS
def test_nothing_is_given_up_once_all_is_here(is_local: bool) -> None:
    """The ring's last slot is given back all the same: the connection is used again."""
    with running(Ends(is_local=is_local)) as ends:
        ends.host.at_ask = lambda asked: setattr(ends.clock, "ms", ends.clock.ms + 1.0)

        def give_up(blocks: int, paced_ms: float | None) -> bool:
            return paced_ms == 0.0

        for _ in range(3):
            request = ends.request(should_give_up=give_up)
            assert outcome(ends.puller.pull(request)) == (PullEnd.PUBLISHED, None, 3)
        assert ends.server.figures.connections == 1
        ends.settled()


def test_d07_an_error_of_who_asked_leaves_nothing_staged() -> None:
    def fail(blocks: int) -> None:
        raise ValueError(blocks)

    with running(Ends()) as ends:
        with pytest.raises(ValueError, match="1"):
            ends.puller.pull(ends.request(on_progress=fail))
        assert ends.destination.staged_bytes() == 0
        assert ends.destination.hits(ends.places, OWNER) == 0
        assert ends.puller.figures.open_pulls == 0
        ends.settled()
