"""The third way: taking KV from another worker, priced beside computing it."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkline.core.cost import CostModel, pull_delay_ms
from trunkline.core.debts import Owed
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

    def route(
        self,
        tokens: int,
        matched: list[int],
        sources: list[int] | None = None,
        owed: Owed | None = None,
    ) -> Decision:
        request = RouteRequest(
            request_id="r",
            prompt_tokens=tokens,
            matched_tokens=matched,
            source_tokens=matched if sources is None else sources,
            owed=owed,
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


def test_c85_a_worker_with_an_open_breaker_is_no_source_either_until_it_is_closed() -> None:
    """Of the two legs of a pull, neither goes where the breaker is open."""
    tokens = 8_192
    table = Fleet16(3, token_ms=0.5, gib_per_s=20.0)
    holder = WorkerId("w0")
    table.load(0, 60_000.0)
    assert table.route(tokens + 16, [tokens, 0, 0]).source == holder

    table.fleet.update(holder, is_breaker_open=True)
    decision = table.route(tokens + 16, [tokens, 0, 0])
    assert (decision.source, decision.plan) == (None, Plan.RECOMPUTE)
    assert decision.worker != holder

    table.fleet.update(holder, is_breaker_open=False)
    assert table.route(tokens + 16, [tokens, 0, 0]).source == holder


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


class _Owed:
    """What is not there yet, by worker: leading tokens that are, and when all will be."""

    def __init__(self, there: dict[int, int], ready_ms: dict[int, float]) -> None:
        self._there = {WorkerId(f"w{worker}"): tokens for worker, tokens in there.items()}
        self._ready_ms = {WorkerId(f"w{worker}"): ms for worker, ms in ready_ms.items()}

    def there_tokens(self, state: WorkerState, tokens: int) -> int:
        return min(tokens, self._there.get(state.worker, tokens))

    def ready_ms(self, state: WorkerState, tokens: int, now: Instant) -> float:
        return 0.0 if self.there_tokens(state, tokens) == tokens else self._ready_ms[state.worker]


def test_a_pull_costs_the_wait_for_its_source_and_the_queue_hides_both() -> None:
    assert pull_delay_ms(ready_ms=0.0, moving_ms=30.0, queue_ms=0.0) == 30.0
    assert pull_delay_ms(ready_ms=500.0, moving_ms=30.0, queue_ms=0.0) == 530.0
    assert pull_delay_ms(ready_ms=500.0, moving_ms=30.0, queue_ms=400.0) == 130.0
    assert pull_delay_ms(ready_ms=500.0, moving_ms=30.0, queue_ms=600.0) == 0.0


@pytest.mark.parametrize(
    ("ready_ms", "source", "transfer_ms"),
    [(100.0, "w0", 100.0 + 78.125), (900.0, None, 0.0), (math.inf, None, 0.0)],
)
def test_a_source_that_is_still_computing_is_worth_the_wait_or_it_is_not(
    ready_ms: float, source: str | None, transfer_ms: float
) -> None:
    table = Fleet16(2, token_ms=0.1, gib_per_s=12.8)  # 8,192 tokens: 819.2 ms, or 78.125
    table.load(0, 60_000.0)
    decision = table.route(8_208, [8_192, 0], owed=_Owed({0: 0}, {0: ready_ms}))
    assert decision.source == source
    assert decision.candidates.transfer_ms[1] == pytest.approx(transfer_ms)
    assert decision.source_ready_ms == (ready_ms if source else 0.0)


def test_of_sources_that_owe_alike_the_one_that_will_have_it_first_is_asked() -> None:
    table = Fleet16(4, token_ms=0.1)
    for worker in (0, 1, 2):
        table.load(worker, 60_000.0)
    owed = _Owed({0: 0, 1: 0, 2: 0}, {0: 90.0, 1: 80.0, 2: math.inf})
    for _ in range(8):
        assert table.route(8_208, [8_192, 8_192, 8_192, 0], owed=owed).source == "w1"
    owed = _Owed({0: 0, 1: 0}, {0: 90.0, 1: 80.0})
    assert table.route(8_208, [8_192, 8_192, 8_192, 0], owed=owed).source == "w2", "it has it"


def test_less_that_is_there_beats_more_that_is_waited_for_too_long() -> None:
    table = Fleet16(4, token_ms=0.1)
    for worker in (0, 1, 2):
        table.load(worker, 60_000.0)
    matched = [8_192, 4_096, 2_048, 0]
    late = table.route(8_208, matched, owed=_Owed({0: 2_048}, {0: 2_000.0}))
    assert (late.source, late.pulled_tokens) == ("w1", 4_096)
    soon = table.route(8_208, matched, owed=_Owed({0: 2_048}, {0: 100.0}))
    assert (soon.source, soon.pulled_tokens) == ("w0", 8_192)
    own = table.route(8_208, [8_192, 0, 0, 0], owed=_Owed({0: 4_096}, {0: 2_000.0}))
    assert (own.source, own.pulled_tokens) == ("w0", 4_096), "the part of it that is there"
