"""The third way: taking KV from another worker, priced beside computing it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkline.core.cost import CostModel
from trunkline.core.decision import Decision, Plan, Reason
from trunkline.core.fleet import Fleet, WorkerState
from trunkline.core.links import LinkProfile, Links
from trunkline.core.profiles import fifo_profile, profile_named
from trunkline.core.records import BootInstant, Instant, Slot, WorkerId
from trunkline.core.routing import Router, RouteRequest

NOW, BOOT = Instant(1_000.0), BootInstant(1_000.0)
GIB = 1 << 30
KV_BYTES = 128 << 10


class Fleet16:
    """Workers w0, w1, ... with links, and verbs to load them."""

    def __init__(
        self,
        count: int,
        *,
        token_ms: float,
        fixed_ms: float = 0.0,
        gib_per_s: float = 20.0,
        setup_ms: float = 0.0,
        policy: str = "cache_aware",
        max_copies: int = 64,
        seed: int = 0,
    ) -> None:
        self.fleet = Fleet(virtual_nodes=128, now=Instant(0.0))
        rate = gib_per_s * GIB / 1_000
        self.links = Links(
            LinkProfile(setup_ms=setup_ms, bytes_per_ms=rate), bytes_per_token=KV_BYTES
        )
        profile = profile_named(fifo_profile(fixed_ms, token_ms, 0.0))
        for index in range(count):
            name = WorkerId(f"w{index}")
            self.fleet.add(WorkerState(worker=name, slot=Slot(index), block_tokens=16))
        self.router = Router(
            fleet=self.fleet,
            cost=CostModel(profile, churn_weight=1.0, links=self.links),
            policy=policy,
            rng=random.Random(seed),
            max_copies=max_copies,
        )
        self._ticket = 0

    def load(self, worker: int, queue_ms: float) -> None:
        self._ticket += 1
        self.state(worker).queue.start(self._ticket, queue_ms, NOW)

    def state(self, worker: int) -> WorkerState:
        state = self.fleet.get(WorkerId(f"w{worker}"))
        assert state is not None
        return state

    def route(self, tokens: int, matched: list[int], sources: list[int] | None = None) -> Decision:
        request = RouteRequest(
            request_id="r",
            prompt_tokens=tokens,
            matched_tokens=matched,
            source_tokens=matched if sources is None else sources,
        )
        decision = self.router.route(request, now=NOW, boot=BOOT)
        assert decision is not None
        return decision


def test_two_gib_at_twenty_gib_a_second_are_computed_again_where_that_takes_60_ms() -> None:
    tokens = 2 * GIB // KV_BYTES
    table = Fleet16(2, token_ms=60.0 / tokens, gib_per_s=20.0)
    assert table.links.transfer_ms(WorkerId("w0"), WorkerId("w1"), tokens) == pytest.approx(100.0)
    table.load(0, 1_000.0)
    decision = table.route(tokens + 1, [tokens, 0])
    assert (decision.worker, decision.plan) == ("w1", Plan.RECOMPUTE)
    assert decision.source is None
    slower = Fleet16(2, token_ms=240.0 / tokens, gib_per_s=20.0)
    slower.load(0, 1_000.0)
    decision = slower.route(tokens + 1, [tokens, 0])
    assert (decision.worker, decision.plan, decision.source) == ("w1", Plan.PULL, "w0")


def test_four_thousand_tokens_behind_120_ms_of_queue_are_computed_on_the_idle_worker_in_45_ms() -> (
    None
):
    table = Fleet16(2, token_ms=45.0 / 4_096, gib_per_s=1.0)
    table.load(0, 120.0)
    decision = table.route(4_096, [4_080, 0])
    assert (decision.worker, decision.plan) == ("w1", Plan.RECOMPUTE)
    assert decision.reason is Reason.CACHE_PASSED
    row = decision.as_dict()["candidates"]
    assert row[0]["queue_ms"] == 120.0
    assert row[1]["cost_ms"] == pytest.approx(45.0)


def test_a_pull_is_explained_term_by_term() -> None:
    table = Fleet16(2, token_ms=0.1, fixed_ms=5.0, gib_per_s=10.0, setup_ms=2.0)
    table.load(0, 5_000.0)
    decision = table.route(8_208, [8_192, 1_024])
    transfer_ms = 2.0 + 7_168 * KV_BYTES / (10 * GIB / 1_000)
    told = decision.as_dict()
    assert told["plan"] == "pull"
    assert told["source"] == "w0"
    assert told["reason"] == "cache-pull"
    assert (told["matched_tokens"], told["pulled_tokens"]) == (1_024, 7_168)
    assert decision.expected_tokens == 8_192
    assert told["gain"]["transfer_ms"] == pytest.approx(transfer_ms, abs=0.001)
    assert told["candidates"][1]["transfer_ms"] == pytest.approx(transfer_ms, abs=0.001)
    assert told["candidates"][1]["miss_ms"] == pytest.approx(5.0 + 16 * 0.1)
    assert told["candidates"][0]["pulled_tokens"] == 0
    blind_ms = 5.0 + 8_208 * 0.1
    saved_ms = blind_ms - (5.0 + 16 * 0.1)
    assert decision.gain.net_ms == pytest.approx(
        saved_ms - transfer_ms - decision.gain.imbalance_ms, abs=0.01
    )
    assert "pulled=7168; source=w0; transfer_ms=" in decision.compact()


def test_what_the_queue_hides_of_a_pull_costs_nothing() -> None:
    table = Fleet16(2, token_ms=0.1, gib_per_s=10.0)
    table.load(0, 5_000.0)
    table.load(1, 40.0)
    decision = table.route(8_208, [8_192, 0])
    whole_ms = 8_192 * KV_BYTES / (10 * GIB / 1_000)
    assert decision.plan is Plan.PULL
    assert decision.candidates.transfer_ms[1] == pytest.approx(whole_ms - 40.0)


def test_nothing_is_pulled_below_the_measured_crossover() -> None:
    table = Fleet16(2, token_ms=0.01, gib_per_s=100.0, setup_ms=20.0)
    table.load(0, 10_000.0)
    assert table.route(1_040, [1_024, 0]).plan is Plan.RECOMPUTE  # 10 ms against 21
    assert table.route(8_208, [8_192, 0]).plan is Plan.PULL  # 82 ms against 30
    for _ in range(30):
        moved_bytes = 8_192 * KV_BYTES
        table.links.observe(WorkerId("w0"), WorkerId("w1"), moved_bytes=moved_bytes, ms=400.0)
    assert table.route(8_208, [8_192, 0]).plan is Plan.RECOMPUTE, "the link is slower than it said"


def test_a_worker_that_has_as_much_pulls_nothing_and_nobody_pulls_from_itself() -> None:
    table = Fleet16(3, token_ms=0.1)
    decision = table.route(8_208, [8_192, 8_192, 0])
    assert decision.plan is Plan.LOCAL
    assert decision.candidates.pulled_tokens[:2] == [0, 0]


def test_where_no_source_is_known_nothing_is_pulled() -> None:
    table = Fleet16(2, token_ms=0.1)
    table.load(0, 60_000.0)
    assert table.route(8_208, [8_192, 0], [0, 0]).plan is Plan.RECOMPUTE


def test_d34_a_worker_without_a_live_lease_is_neither_chosen_nor_a_source() -> None:
    table = Fleet16(2, token_ms=0.1)
    assert table.route(8_208, [8_192, 0]).worker == "w0"
    table.fleet.renew_lease(WorkerId("w0"), BootInstant(BOOT))
    decision = table.route(8_208, [8_192, 0])
    assert (decision.worker, decision.plan) == ("w1", Plan.RECOMPUTE)
    table.fleet.renew_lease(WorkerId("w0"), BootInstant(BOOT + 1.0))
    assert table.route(8_208, [8_192, 0]).worker == "w0"


def test_the_baselines_pull_nothing() -> None:
    for policy in ("round_robin", "least_queue", "random", "power_of_two", "consistent_hash"):
        table = Fleet16(2, token_ms=0.1, policy=policy)
        table.load(0, 5_000.0)
        for _ in range(4):
            assert not any(table.route(8_208, [8_192, 0]).candidates.pulled_tokens), policy


def test_as_many_copies_as_there_may_be_are_not_added_to() -> None:
    table = Fleet16(3, token_ms=0.1, max_copies=2)
    for worker in (0, 1):
        table.load(worker, 9_000.0)
    assert table.route(8_208, [8_192, 0, 0]).plan is Plan.PULL
    assert table.route(8_208, [8_192, 8_192, 0]).plan is Plan.RECOMPUTE


def test_more_than_one_pull_may_take_is_computed() -> None:
    table = Fleet16(2, token_ms=0.1)
    table.load(0, 60_000.0)
    request = RouteRequest(
        request_id="r",
        prompt_tokens=8_208,
        matched_tokens=[8_192, 0],
        source_tokens=[8_192, 0],
        most_pulled_tokens=8_191,
    )
    decision = table.router.route(request, now=NOW, boot=BOOT)
    assert decision is not None
    assert decision.plan is Plan.RECOMPUTE


def test_of_equal_sources_the_less_queued_is_asked_more_often() -> None:
    table = Fleet16(3, token_ms=0.1)
    table.load(0, 900.0)
    table.load(1, 9_000.0)
    asked = [table.route(8_208, [8_192, 8_192, 0]).source for _ in range(400)]
    assert asked.count(WorkerId("w0")) > 6 * asked.count(WorkerId("w1")) > 0


def test_what_most_workers_hold_is_not_charged_when_it_is_pulled_either() -> None:
    table = Fleet16(3, token_ms=0.1)
    for worker in (0, 1):
        table.load(worker, 50.0)
    decision = table.route(8_208, [8_192, 8_192, 0])
    assert (decision.worker, decision.plan) == ("w2", Plan.PULL)
    assert decision.candidates.cost_ms[2] < 50.0
    assert decision.candidates.transfer_ms[2] > 0.0, "and is told all the same"


@given(
    st.lists(
        st.tuples(st.integers(0, 8), st.integers(0, 8), st.integers(0, 2_000)),
        min_size=2,
        max_size=6,
    ),
    st.integers(0, 3),
)
def test_terms_add_up_and_a_pull_is_never_dearer_than_what_it_replaces(
    workers: list[tuple[int, int, int]], seed: int
) -> None:
    tokens = 8 * 1_024 + 16
    matched = [1_024 * own for own, _, _ in workers]
    sources = [1_024 * max(own, more) for own, more, _ in workers]
    table, plain = (Fleet16(len(workers), token_ms=0.1, seed=seed) for _ in range(2))
    for index, (_, _, queue_ms) in enumerate(workers):
        for one in (table, plain):
            one.load(index, float(queue_ms))
    decision = table.route(tokens, matched, sources)
    without = plain.route(tokens, matched, [0] * len(workers))
    candidates = decision.candidates
    for i, cost_ms in enumerate(candidates.cost_ms):
        terms = (candidates.queue_ms, candidates.transfer_ms, candidates.miss_ms)
        rest = candidates.imbalance_ms[i] + candidates.decode_pressure_ms[i]
        assert cost_ms == pytest.approx(sum(term[i] for term in terms) + rest)
        assert candidates.pulled_tokens[i] in (0, max(sources) - matched[i])
    assert (decision.source is None) == (decision.pulled_tokens == 0)
    assert decision.expected_tokens <= tokens
    if len({matched[0], *matched}) == 1:  # nothing in common but what all have
        assert min(candidates.cost_ms) <= min(without.candidates.cost_ms) + 1e-6
