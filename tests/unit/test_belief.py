"""What a worker told is believed less and less while nothing can be heard of it."""

from __future__ import annotations

import pytest
from feed_desk import NAMESPACE, WORKER, Desk, batch, run
from hypothesis import given
from hypothesis import strategies as st
from member_bench import W0, Bench, bench_test, until
from picker_bench import Bench as PickerBench
from picker_bench import ids
from test_membership_feeds import with_events

from trunkline.control.views import Mode
from trunkline.core.actions import FeedCutOff, FeedHeard
from trunkline.core.belief import GIVEN_UP_MS, GRACE_MS, HALF_LIFE_MS, share_at
from trunkline.core.feed import FeedState
from trunkline.core.keys import as_tokens, chain
from trunkline.core.records import Instant, WorkerId
from trunkline.gateway.contracts import OPEN_GRANT


def expected(desk: Desk, blocks: int) -> int:
    """Leading blocks that routing counts on."""
    prompt = chain(NAMESPACE, as_tokens(n for n in range(1, blocks + 1) for _ in range(2)))
    return desk.directory.match(prompt).expected[desk.directory.slot(WORKER)]


def told(desk: Desk, blocks: int) -> None:
    """The worker says that it holds a prompt of so many blocks."""
    desk.feed.joined(Instant(0.0))
    desk.replay()
    desk.live(batch(0, run(*range(1, blocks + 1))))


@given(first_ms=st.floats(0.0, 1e9), later_ms=st.floats(0.0, 1e9))
def test_belief_falls_with_time_and_stays_a_share(first_ms: float, later_ms: float) -> None:
    early, late = share_at(first_ms), share_at(first_ms + later_ms)
    assert 0.0 <= late <= early <= 1.0


def test_belief_is_whole_for_a_moment_and_then_halves_each_minute() -> None:
    assert share_at(GRACE_MS) == 1.0
    for halvings in range(4):
        assert share_at(GRACE_MS + halvings * HALF_LIFE_MS) == 0.5**halvings


def test_what_was_told_counts_less_the_longer_the_connection_is_down() -> None:
    desk = Desk()
    told(desk, 64)
    assert expected(desk, 64) == 64

    desk.actions += desk.feed.disconnected(Instant(10_000.0))
    assert desk.feed.state is FeedState.SILENT
    seen: list[int] = []
    at_ms = 10_000.0
    while not desk.has(FeedCutOff):
        due = desk.feed.next_tick
        assert due is not None
        assert at_ms < due <= at_ms + 3_000.0
        at_ms = due
        desk.tick(at_ms)
        seen.append(expected(desk, 64))

    assert at_ms == pytest.approx(10_000.0 + GIVEN_UP_MS, abs=1_000.0)
    assert seen[0] == 64
    assert seen == sorted(seen, reverse=True)
    assert {32, 16, 8} <= set(seen)
    assert seen[-1] == desk.held() == 0, "then all of it is given up"


def test_a_connection_made_anew_brings_all_back_that_is_still_there() -> None:
    desk = Desk()
    told(desk, 64)
    desk.feed.disconnected(Instant(0.0))
    desk.tick(GRACE_MS + HALF_LIFE_MS)
    assert expected(desk, 64) == 32

    desk.actions += desk.feed.reconnected(Instant(70_000.0))
    desk.replay(batch(0, run(*range(1, 65))), now=70_000.0)

    assert expected(desk, 64) == 64
    desk.tick(1e6)
    assert expected(desk, 64) == 64
    assert not desk.has(FeedHeard)


def test_a_worker_that_was_given_up_is_learnt_anew_when_it_is_heard_again() -> None:
    desk = Desk()
    told(desk, 64)
    desk.feed.disconnected(Instant(0.0))
    desk.tick(GIVEN_UP_MS)
    desk.tick(GIVEN_UP_MS + 2_000.0)
    assert desk.feed.next_tick is None, "nothing more changes by itself"

    at_ms = GIVEN_UP_MS + 60_000.0
    desk.actions += desk.feed.reconnected(Instant(at_ms))
    assert desk.has(FeedHeard)
    desk.replay(batch(0, run(*range(1, 65))), batch(1, run(70)), now=at_ms)

    assert expected(desk, 64) == 64


def test_what_we_sent_there_counts_whole_once_what_it_told_is_given_up() -> None:
    desk = Desk()
    told(desk, 64)
    desk.feed.disconnected(Instant(0.0))
    desk.tick(GIVEN_UP_MS)
    desk.tick(GIVEN_UP_MS + 2_000.0)
    prompt = chain(NAMESPACE, as_tokens(n for n in range(1, 65) for _ in range(2)))

    desk.directory.predict(WORKER, prompt, now=Instant(GIVEN_UP_MS + 3_000.0), ttl_ms=1e6)

    assert expected(desk, 64) == 64


def test_of_two_holders_the_one_that_can_be_heard_is_chosen_and_a_stale_one_before_none() -> None:
    silent, heard, empty = WorkerId("w0"), WorkerId("w1"), WorkerId("w2")
    bench = PickerBench(silent, heard, empty)
    prompt = ids(4_000)
    for holder in (silent, heard):
        keys = bench.picker._namespaces.keys(OPEN_GRANT, prompt, 16)
        assert keys is not None
        bench.directory.predict(holder, keys.private, now=bench.clock.now(), ttl_ms=1e9)
    bench.directory.doubt(silent, share_at(GRACE_MS + 60_000.0))

    assert bench.pick(prompt).worker == heard
    bench.fleet.update(heard, is_healthy=False)
    pick = bench.pick(prompt)
    assert pick.worker == silent
    decision = pick.ticket.decision
    assert 1_900 <= decision.expected_tokens <= 2_000, "its price is that of a half"
    bench.directory.doubt(silent, 0.0)
    assert bench.pick(prompt).worker in (silent, empty)
    # Nobody is believed to hold it: no request fails for that.
    bench.fleet.update(silent, is_healthy=False)
    assert bench.pick(prompt).worker == empty


@bench_test
async def test_a_worker_that_is_cut_off_is_approximate_and_exact_again_when_heard(
    bench: Bench,
) -> None:
    await bench.joined(answers=with_events(0))
    until_ttl = bench.table.targets[W0].predicted_ttl_ms
    act = bench.feed_actions[W0]

    act(FeedCutOff(worker=W0, reason="its event connection has been down for 183 s"))
    view = bench.view()
    assert (view.mode, view.reason) == (
        Mode.APPROXIMATE, "its event connection has been down for 183 s",
    )  # fmt: skip
    assert bench.table.targets[W0].predicted_ttl_ms > until_ttl

    act(FeedHeard(worker=W0))
    assert bench.mode() is Mode.EXACT
    assert bench.table.targets[W0].predicted_ttl_ms == until_ttl
    await until(lambda: bench.log.count("feed.heard_again") == 1)
