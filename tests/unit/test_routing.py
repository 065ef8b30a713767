"""The choice of a worker: named cases, hard filters, and terms that add up."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import pytest

from trunkline.core.cost import CostModel, calibrate
from trunkline.core.decision import Decision, Exclusion, Reason
from trunkline.core.fleet import Changes, Fleet, WorkerState
from trunkline.core.load import PrefillQueue
from trunkline.core.pace import Standing
from trunkline.core.policies import POLICIES
from trunkline.core.profiles import PROFILES
from trunkline.core.records import BootInstant, Instant, Slot, WorkerId
from trunkline.core.routing import Router, RouteRequest

NOW, BOOT = Instant(1_000.0), BootInstant(1_000.0)
PROFILE = PROFILES["peers-w5"]  # 5 ms + 0.1 ms a token: easy to check by hand


class Table:
    """A fleet of `count` workers with a router, and verbs to load them."""

    def __init__(self, count: int, policy: str = "cache_aware", seed: int = 0) -> None:
        self.fleet = Fleet(virtual_nodes=128, now=Instant(0.0))
        self.cost = CostModel(PROFILE, churn_weight=1.0)
        for index in range(count):
            self.fleet.add(
                WorkerState(worker=WorkerId(f"w{index}"), slot=Slot(index), block_tokens=16)
            )
        self.router = Router(
            fleet=self.fleet, cost=self.cost, policy=policy, rng=random.Random(seed)
        )
        self._ticket = 0

    def load(self, worker: int, queue_ms: float) -> None:
        self._ticket += 1
        state = self.fleet.get(WorkerId(f"w{worker}"))
        assert state is not None
        state.queue.start(self._ticket, queue_ms, NOW)

    def route(
        self,
        tokens: int,
        matched: list[int] | None,
        *,
        tried: frozenset[WorkerId] = frozenset(),
        home_key: bytes | None = None,
    ) -> Decision:
        decision = self.maybe_route(tokens, matched, tried=tried, home_key=home_key)
        assert decision is not None
        return decision

    def maybe_route(
        self,
        tokens: int,
        matched: list[int] | None,
        *,
        tried: frozenset[WorkerId] = frozenset(),
        home_key: bytes | None = None,
    ) -> Decision | None:
        request = RouteRequest(
            request_id="r", prompt_tokens=tokens, matched_tokens=matched, home_key=home_key
        )
        return self.router.route(request, now=NOW, boot=BOOT, tried=tried)


def test_c03_a_new_prefix_goes_to_the_idle_worker_whatever_the_caches_hold() -> None:
    table = Table(2)
    for _ in range(50):
        table.load(0, 100.0)
    assert table.route(4_000, [0, 0]).worker == "w1"


def test_c04_pressure_does_not_throw_locality_away() -> None:
    table = Table(3)
    for worker, count in ((0, 10), (1, 11), (2, 60)):
        for _ in range(count):
            table.load(worker, 10.0)
    decision = table.route(4_000, [0, 3_984, 0])
    assert decision.worker == "w1"
    assert decision.reason is Reason.CACHE_HIT
    row = decision.as_dict()["candidates"][1]
    assert row["queue_ms"] == pytest.approx(110.0)
    assert row["miss_ms"] == pytest.approx(5.0 + 16 * 0.1)


def test_c05_one_hot_worker_elsewhere_changes_nothing() -> None:
    table = Table(10)
    for _ in range(500):
        table.load(9, 100.0)
    matched = [0] * 10
    matched[1] = 2_000
    assert table.route(4_000, matched).worker == "w1"


def test_c12_a_short_match_is_not_worth_a_queue_and_a_long_one_is() -> None:
    table = Table(2)
    table.load(0, 500.0)
    assert table.route(32, [16, 0]).worker == "w1"
    assert table.route(30_000, [29_984, 0]).worker == "w0"


def test_c13_at_cold_start_the_cache_term_is_nothing_and_the_least_loaded_wins() -> None:
    table = Table(4)
    for worker in (0, 1, 3):
        table.load(worker, 30.0)
    decision = table.route(1_000, [0, 0, 0, 0])
    assert decision.worker == "w2"
    assert decision.reason is Reason.COLD_CHEAPEST
    assert decision.gain.net_ms == pytest.approx(0.0)


def test_c16_a_saturated_home_sheds_to_others_and_takes_its_sessions_back() -> None:
    table = Table(2)
    matched = [3_984, 0]
    table.load(0, 200.0)
    assert table.route(4_000, matched).worker == "w0", "200 ms of queue, 400 ms saved"
    table.load(0, 400.0)
    shed = table.route(4_000, matched)
    assert shed.worker == "w1"
    assert shed.reason is Reason.CACHE_PASSED
    home = table.fleet.get(WorkerId("w0"))
    assert home is not None
    home.queue.end(2, NOW)
    assert table.route(4_000, matched).worker == "w0"


def test_c18_new_groups_spread_over_idle_workers() -> None:
    table = Table(8)
    placed = [0] * 8
    for _ in range(40):
        decision = table.route(2_000, [0] * 8)
        state = table.fleet.get(decision.worker)
        assert state is not None
        table.fleet.churn.add(state.queue, 2_000, NOW)
        placed[int(decision.worker[1:])] += 1
    assert all(4 <= count <= 6 for count in placed), placed


def test_a_cold_prefix_goes_home_on_every_gateway_while_nobody_queues() -> None:
    draw = random.Random(9)
    keys = [draw.randbytes(32) for _ in range(50)]
    first, second = Table(8, seed=1), Table(8, seed=2)
    for key in keys:
        homes = first.fleet.ring.homes(key)
        assert first.route(1_000, [0] * 8, home_key=key).worker in homes
        assert second.route(1_000, [0] * 8, home_key=key).worker in homes


def test_a_home_that_queues_is_left_for_the_cheapest() -> None:
    table = Table(4)
    key = bytes(32)
    for home in table.fleet.ring.homes(key):
        table.load(int(home[1:]), 100.0)
    decision = table.route(500, [0] * 4, home_key=key)
    assert decision.worker not in table.fleet.ring.homes(key)
    assert decision.reason is Reason.COLD_CHEAPEST


def test_what_most_workers_hold_is_not_charged_to_the_one_that_lacks_it() -> None:
    """A hot prefix ends up everywhere: the idle worker takes the request and with it the prefix."""
    table = Table(4)
    for worker in (0, 1, 2):
        table.load(worker, 50.0)
    assert table.route(1_100, [1_000, 0, 0, 0]).worker == "w0", "one holder: 100 ms saved"
    decision = table.route(1_100, [1_000, 1_000, 1_000, 0])
    assert decision.worker == "w3"
    assert decision.candidates.imbalance_ms[3] == pytest.approx(-100.0)
    assert decision.candidates.miss_ms[3] == pytest.approx(115.0)


def test_a_short_prompt_comes_back_to_the_one_worker_that_was_used_so_far() -> None:
    table = Table(2)
    first = table.fleet.get(WorkerId("w0"))
    assert first is not None
    table.fleet.churn.add(first.queue, 48, NOW)
    assert table.route(48, [32, 0]).worker == "w0"


def test_the_terms_add_up_to_the_cost_and_to_the_gain() -> None:
    table = Table(3)
    table.load(0, 40.0)
    table.load(1, 10.0)
    for state, tokens in zip(table.fleet.states(), (6_000, 5_000, 4_000), strict=True):
        table.fleet.churn.add(state.queue, tokens, NOW)
    decision = table.route(2_000, [1_600, 0, 0])
    columns = decision.candidates
    for i in range(3):
        total = (
            columns.queue_ms[i]
            + columns.miss_ms[i]
            + columns.imbalance_ms[i]
            + columns.decode_pressure_ms[i]
        )
        assert columns.cost_ms[i] == pytest.approx(total)
    assert decision.worker == "w0"
    # Blind to caches, all of it would be computed on w2, whose queue is empty.
    assert columns.matched_tokens[2] == 0
    assert decision.gain.net_ms == pytest.approx(columns.cost_ms[2] - columns.cost_ms[0])
    assert decision.gain.saved_prefill_ms == pytest.approx(160.0)


@pytest.mark.parametrize(
    ("change", "exclusion"),
    [
        ({"is_healthy": False}, Exclusion.UNHEALTHY),
        ({"is_draining": True}, Exclusion.DRAINING),
        ({"is_breaker_open": True}, Exclusion.BREAKER),
        ({"is_silent": True}, Exclusion.SILENT),
        ({"standing": Standing.SUSPECT}, Exclusion.SUSPECT),
        ({"standing": Standing.EJECTED}, Exclusion.EJECTED),
    ],
)
def test_a_filtered_worker_is_never_chosen_and_the_record_says_why(
    change: Changes, exclusion: Exclusion
) -> None:
    for policy in POLICIES:
        table = Table(2, policy=policy)
        table.fleet.update(WorkerId("w0"), **change)
        for _ in range(8):
            decision = table.route(1_000, [992, 0])
            assert decision.worker == "w1"
            assert decision.candidates.excluded == {"w0": exclusion}


_DOUBTS: tuple[Changes, ...] = (
    {"is_breaker_open": True},
    {"is_silent": True},
    {"standing": Standing.SUSPECT},
    {"standing": Standing.EJECTED},
)


@pytest.mark.parametrize("doubted", range(5))
def test_doubts_leave_out_half_of_the_fleet_at_most_and_beyond_it_nobody(doubted: int) -> None:
    table = Table(4)
    for index in range(doubted):
        table.fleet.update(WorkerId(f"w{index}"), **_DOUBTS[index])
    usable, excluded = table.fleet.usable(BOOT)
    if doubted <= 2:
        assert [state.worker for state in usable] == [f"w{i}" for i in range(doubted, 4)]
        assert len(excluded) == doubted
        assert not table.fleet.is_panicking
    else:
        assert [state.worker for state in usable] == ["w0", "w1", "w2", "w3"]
        assert not excluded
        assert table.fleet.is_panicking
    assert table.fleet.panics_count == (doubted > 2)


def test_a_panic_lets_nobody_in_who_is_out_for_certain_and_counts_each_time_once() -> None:
    table = Table(4)
    table.fleet.update(WorkerId("w0"), is_healthy=False)
    table.fleet.update(WorkerId("w1"), is_draining=True)
    for index in (2, 3):
        table.fleet.update(WorkerId(f"w{index}"), is_breaker_open=True)
    for _ in range(3):
        table.fleet.update(WorkerId("w2"), is_full=False)  # it looks again
        usable, excluded = table.fleet.usable(BOOT)
        assert [state.worker for state in usable] == ["w2", "w3"]
        assert excluded == {"w0": Exclusion.UNHEALTHY, "w1": Exclusion.DRAINING}
    assert table.fleet.panics_count == 1
    table.fleet.update(WorkerId("w2"), is_breaker_open=False)
    assert [state.worker for state in table.fleet.usable(BOOT)[0]] == ["w2"]
    assert not table.fleet.is_panicking


def test_a_worker_that_comes_while_others_are_warm_starts_slowly_and_no_other_does() -> None:
    table = Table(2)
    first = table.fleet.get(WorkerId("w0"))
    assert first is not None

    def comes(name: str) -> WorkerState:
        state = WorkerState(worker=WorkerId(name), slot=Slot(len(name)), block_tokens=16)
        table.fleet.start_slowly(state, 1_000.0)
        return state

    assert comes("cold").queue.slow_factor == 0.0, "nobody has a cache to speak of"
    table.load(0, 1_000.0)
    table.fleet.churn.add(first.queue, 4_000, NOW)
    late = comes("late").queue
    assert late.slow_factor == pytest.approx(9.0)
    assert late.churn == first.queue.churn / 2, "the mean: its empty cache is no bait"
    table.fleet.start_slowly(first, 0.0)
    assert first.queue.slow_factor == 0.0, "switched off"


def test_the_queue_of_a_worker_at_its_slow_start_counts_more_than_it_is() -> None:
    table = Table(2)
    table.load(0, 100.0)
    table.load(1, 300.0)
    assert table.route(1_000, None).worker == "w0"
    state = table.fleet.get(WorkerId("w0"))
    assert state is not None
    state.queue.start_slowly(10_000.0)
    decision = table.route(1_000, None)
    assert decision.worker == "w1"
    assert decision.candidates.imbalance_ms[0] == pytest.approx(900.0)


def test_all_breakers_open_is_a_panic_and_not_an_empty_fleet() -> None:
    table = Table(1)
    table.fleet.update(WorkerId("w0"), is_breaker_open=True)
    assert table.route(1_000, [0]).worker == "w0"


def test_an_expired_lease_excludes_at_its_end_and_a_heartbeat_brings_back() -> None:
    table = Table(2)
    table.fleet.renew_lease(WorkerId("w0"), BootInstant(BOOT + 1.0))
    assert table.route(1_000, [992, 0]).worker == "w0"
    table.fleet.renew_lease(WorkerId("w0"), BOOT)
    decision = table.route(1_000, [992, 0])
    assert decision.worker == "w1"
    assert decision.candidates.excluded == {"w0": Exclusion.LEASE}
    table.fleet.renew_lease(WorkerId("w0"), BootInstant(math.inf))
    assert table.route(1_000, [992, 0]).worker == "w0"


def test_a_worker_above_its_watermark_keeps_its_prefixes_and_gets_no_new_ones() -> None:
    table = Table(2)
    table.fleet.update(WorkerId("w0"), is_full=True)
    table.load(1, 10.0)
    assert table.route(1_000, [992, 0]).worker == "w0"
    cold = table.route(1_000, [0, 0])
    assert cold.worker == "w1"
    assert cold.candidates.excluded == {"w0": Exclusion.WATERMARK}
    table.fleet.update(WorkerId("w1"), is_full=True)
    assert table.route(1_000, [0, 0]).worker == "w0", "all are full: the least loaded serves"


def test_a_root_that_all_workers_share_does_not_make_a_prefix_theirs() -> None:
    table = Table(3)
    table.fleet.update(WorkerId("w0"), is_full=True)
    for worker in (1, 2):
        table.load(worker, 50.0)
    shared_root = table.route(1_000, [64, 64, 64])
    assert shared_root.worker != "w0"
    assert shared_root.candidates.excluded == {"w0": Exclusion.WATERMARK}
    assert table.route(1_000, [960, 64, 64]).worker == "w0", "that prefix is its own"


def test_tried_workers_are_not_tried_again_and_none_left_is_no_decision() -> None:
    table = Table(2)
    tried = frozenset({WorkerId("w0")})
    assert table.route(100, [96, 0], tried=tried).worker == "w1"
    assert (
        table.maybe_route(100, [96, 0], tried=frozenset({WorkerId("w0"), WorkerId("w1")})) is None
    )


def test_a_prompt_that_nobody_could_read_goes_by_load_alone() -> None:
    table = Table(2)
    table.load(0, 5.0)
    decision = table.route(0, None)
    assert decision.worker == "w1"
    assert decision.reason is Reason.LOAD_ONLY


def test_an_unread_prompt_of_a_session_keeps_to_its_homes_while_nobody_queues_there() -> None:
    table = Table(8)
    homes = table.fleet.ring.homes(bytes(32))
    assert {table.route(0, None, home_key=bytes(32)).worker for _ in range(8)} <= set(homes)
    for home in homes:
        table.load(int(home[1:]), 100.0)
    assert table.route(0, None, home_key=bytes(32)).worker not in homes


def test_an_unknown_policy_is_refused_with_the_known_names() -> None:
    with pytest.raises(ValueError, match=r"unknown policy 'best'.*cache_aware"):
        Table(1, policy="best")


def test_round_robin_takes_turns_and_consistent_hash_keeps_to_its_home() -> None:
    turns = Table(3, policy="round_robin")
    assert [turns.route(10, [0] * 3).worker for _ in range(4)] == ["w0", "w1", "w2", "w0"]
    hashed = Table(5, policy="consistent_hash")
    home = hashed.fleet.ring.homes(bytes(32))[0]
    assert {hashed.route(10, [0] * 5, home_key=bytes(32)).worker for _ in range(5)} == {home}
    hashed.fleet.update(home, is_healthy=False)
    assert hashed.route(10, [0] * 5, home_key=bytes(32)).worker != home


def test_consistent_hash_asks_the_ring_for_no_more_than_it_needs() -> None:
    table = Table(300, policy="consistent_hash")
    walked: list[str] = []
    walk = table.fleet.ring.walk

    def counted(key: bytes) -> Iterator[WorkerId]:
        for worker in walk(key):
            walked.append(worker)
            yield worker

    table.fleet.ring.walk = counted  # type: ignore[method-assign]  # counts, changes nothing
    table.route(10, [0] * 300, home_key=bytes(32))
    assert len(walked) == 1


def test_equal_costs_are_drawn_from_the_seed() -> None:
    def names(seed: int) -> list[str]:
        table = Table(6, seed=seed)
        return [table.route(100, [0] * 6).worker for _ in range(20)]

    assert names(1) == names(1)
    assert names(1) != names(2)
    assert len(set(names(1))) > 2


def test_calibration_finds_a_slow_worker_and_forgives_one_stall() -> None:
    slow, stalled = PrefillQueue(), PrefillQueue()
    for _ in range(100):
        calibrate(slow, predicted_ms=100.0 * slow.scale, observed_ms=300.0)
    assert slow.scale == pytest.approx(3.0, rel=0.05)
    calibrate(stalled, predicted_ms=100.0, observed_ms=10_000.0)
    assert stalled.scale < 1.2


def test_calibration_stays_within_bounds_and_ignores_noise() -> None:
    queue = PrefillQueue()
    for _ in range(1_000):
        calibrate(queue, predicted_ms=10.0, observed_ms=1e9)
    assert queue.scale == 10.0
    calm = PrefillQueue()
    calibrate(calm, predicted_ms=1.0, observed_ms=50.0)
    assert calm.scale == 1.0
