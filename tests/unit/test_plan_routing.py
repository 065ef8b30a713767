"""The light fleet model and the routers in it: against a naive twin, and against what was
published.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkline.core.links import LinkProfile
from trunkline.plan.calls import Call
from trunkline.plan.moves import break_even, workers_needed
from trunkline.plan.naming import Namer
from trunkline.plan.peers import LEAST_QUEUE, OURS, ROUND_ROBIN, ROUTERS
from trunkline.plan.queueing import FIXED_MS, Chooser, FleetShape, Moment, QueueModel, Routed
from trunkline.plan.reader import LogReader
from trunkline.plan.window import BusiestWindow, Stretch, stretch_of
from trunkline.sim.cache import PrefixCache

TRACES = Path(__file__).resolve().parents[2] / "traces"


def stretch(*prompts: tuple[float, int, list[int]], block_tokens: int = 10) -> Stretch:
    blocks = [ids for _, _, ids in prompts]
    return Stretch(
        at_ms=[at for at, _, _ in prompts],
        tokens=[tokens for _, tokens, _ in prompts],
        outputs=[1] * len(prompts),
        blocks=blocks,
        block_tokens=block_tokens,
        names=1 + max((max(ids, default=0) for ids in blocks), default=0),
    )


SHAPE = FleetShape(workers=3, cache_tokens=40, token_ms=1.0)
WALKS = st.lists(st.lists(st.integers(0, 1), max_size=4), min_size=1, max_size=40)


@given(WALKS, st.booleans())
def test_what_each_worker_holds_is_what_its_own_cache_holds(
    walks: list[list[int]], is_pooled: bool
) -> None:
    shape = FleetShape(workers=3, cache_tokens=40, token_ms=1.0, is_pooled=is_pooled)
    caches = [PrefixCache(12)] * 3 if is_pooled else [PrefixCache(4) for _ in range(3)]
    prompts: list[tuple[float, int, list[int]]] = []
    for number, steps in enumerate(walks):
        ids, name = list[int](), 1
        for step in steps:
            name = 2 * name + step
            ids.append(name)
        prompts.append((float(number), 10 * len(ids) + number % 2, ids))

    class Watched:
        def choose(self, moment: Moment) -> int:
            keys = [bytes([block]) for block in moment.blocks]
            most = max(0, moment.tokens - 1) // 10
            expected = [10 * min(most, one.run(keys)) for one in caches]
            assert moment.matched == expected
            return moment.ticket * 7 % 3

        def placed(self, moment: Moment, worker: int) -> None:
            from array import array

            keys = [bytes([block]) for block in moment.blocks]
            caches[worker].use(keys, array("I", moment.blocks))

        def first_token(self, ticket: int, worker: int, now_ms: float) -> None: ...

        def ended(self, ticket: int, worker: int, now_ms: float) -> None: ...

    routed = QueueModel(shape, stretch(*prompts)).run(Watched())
    assert len(routed.ttft_ms) == len(walks)


def test_a_worker_serves_one_prompt_after_another() -> None:
    made = ROUTERS[ROUND_ROBIN](FleetShape(workers=1, cache_tokens=0, token_ms=1.0), 0)
    shape = FleetShape(workers=1, cache_tokens=40, token_ms=1.0)
    calls = stretch((0.0, 21, [1, 2]), (1.0, 21, [1, 2]), (500.0, 5, []))
    routed = QueueModel(shape, calls).run(made)
    first = FIXED_MS + 21.0
    assert routed.ttft_ms == [first, first - 1.0 + FIXED_MS + 1.0, FIXED_MS + 5.0]
    assert (routed.tokens, routed.hit_tokens) == (47, 20)


@pytest.mark.parametrize("name", ROUTERS)
def test_every_router_serves_prompts_of_any_length_on_any_fleet(name: str) -> None:
    calls = stretch(*((float(n // 3), 1 + n % 50, [1, 2, 3, 4, 5][: (1 + n % 50) // 10])
                      for n in range(200)))  # fmt: skip
    for workers in (1, 2, 5):
        shape = FleetShape(workers=workers, cache_tokens=40, token_ms=1.0)
        routed = QueueModel(shape, calls).run(ROUTERS[name](shape, 0))
        assert len(routed.ttft_ms) == 200
        again = QueueModel(shape, calls).run(ROUTERS[name](shape, 0))
        assert again.ttft_ms == routed.ttft_ms


# -- against what was published -----------------------------------------------------------------

PUBLISHED = {
    # The reference's table of an hour of chat: hit tokens in %, TTFT p95 in s; and what may differ.
    OURS: (31.3, 9.07, 1.5, 0.5),
    LEAST_QUEUE: (6.9, 11.1, 0.5, 0.5),
    ROUND_ROBIN: (7.4, 31.7, 0.3, 0.6),
    "consistent hash": (33.4, 26.6, 1.5, 3.0),
    "SGLang": (33.1, 24.1, 1.5, 2.0),
    "Mooncake": (29.6, 9.04, 1.5, 0.4),  # `cost 1` there
    "LMetric": (28.0, 9.95, 1.5, 0.6),
    "the limit": (33.9, 8.89, 1.0, 0.3),
}


@cache
def chat() -> Stretch:
    window = BusiestWindow()
    for call in LogReader(TRACES / "mooncake_conversation.jsonl.gz", Namer(bytes(32))).calls():
        window.add(call)
    return stretch_of(window.calls(), per_second=1.0)


@cache
def routed_chat(name: str) -> Routed:
    shape = FleetShape(
        workers=16,
        cache_tokens=2_000 * 512,
        token_ms=1_000.0 / 3_500.0,
        is_pooled=name == "the limit",
    )
    return QueueModel(shape, chat()).run(ROUTERS.get(name, ROUTERS[LEAST_QUEUE])(shape, 0))


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_routers_reach_what_was_published_on_an_hour_of_chat(name: str) -> None:
    hits, p95_s, hits_slack, p95_slack = PUBLISHED[name]
    routed = routed_chat(name)
    assert abs(100.0 * routed.hit_tokens / routed.tokens - hits) <= hits_slack
    assert abs(routed.ttft(0.95) / 1e3 - p95_s) <= p95_slack


@pytest.mark.slow
def test_short_versions_that_differ_from_the_published_runs_differ_in_the_known_direction() -> None:
    """The blend counts calls without a first token here, and the bound counts answers, too: both
    do better than there (bounded hash 11.1 %, blend 16.6 s).
    """
    bounded, blend = routed_chat("bounded hash"), routed_chat("llm-d blend")
    assert 0.11 < bounded.hit_tokens / bounded.tokens < routed_chat("SGLang").hit_tokens / 1e8
    assert routed_chat(LEAST_QUEUE).ttft(0.95) * 0.9 < blend.ttft(0.95) < 16_600.0


def test_arrivals_in_ticks_are_found_and_spread() -> None:
    assert chat().tick_ms == 3_000.0
    assert len(set(chat().at_ms)) > 12_000


# -- the stretch --------------------------------------------------------------------------------


def calls_at(*times: float, tokens: int = 100, blocks: int = 6) -> list[Call]:
    from array import array

    return [
        Call(at_ms=at, tokens=tokens, output_tokens=1, blocks=array("Q", range(blocks)),
             block_tokens=16)
        for at in times
    ]  # fmt: skip


def test_the_busiest_stretch_is_kept_and_its_size_has_a_bound() -> None:
    window = BusiestWindow(max_calls=10, max_uses=10_000)
    for call in calls_at(
        *range(0, 1_000, 100), *range(1_000, 1_100, 10), *range(2_000, 9_000, 500)
    ):
        window.add(call)
    assert [call.at_ms for call in window.calls()] == list(range(1_000, 1_100, 10))
    window = BusiestWindow(max_calls=1_000, max_uses=60)
    for call in calls_at(*range(100)):
        window.add(call)
    assert len(window.calls()) == 10


def test_blocks_are_taken_together_where_there_are_too_many() -> None:
    made = stretch_of(calls_at(0.0, 1.0), per_second=1.0, max_uses=6)
    assert (made.block_tokens, made.blocks) == (32, [[0, 1, 2], [0, 1, 2]])


def test_a_log_without_times_is_paced() -> None:
    calls = calls_at(0.0, 0.0, 0.0)
    for call in calls:
        call.at_ms = None
    assert stretch_of(calls, per_second=4.0).at_ms == [0.0, 250.0, 500.0]


# -- pulls and goals ----------------------------------------------------------------------------


def test_a_pull_pays_from_where_its_set_up_is_saved() -> None:
    link = LinkProfile(setup_ms=2.0, bytes_per_ms=1_000.0)
    found = break_even([5, 100], token_ms=0.3, kv_bytes_per_token=100, link=link)
    assert found.tokens == pytest.approx(10.0)
    assert (found.calls, found.pulled_tokens) == (1, 100)
    assert found.saved_ms == pytest.approx(18.0)
    slow = break_even([5, 100], token_ms=0.1, kv_bytes_per_token=100, link=link)
    assert (slow.tokens, slow.calls) == (None, 0)


def test_the_fewest_workers_that_keep_a_goal_are_found() -> None:
    calls = stretch(*((float(n), 95, []) for n in range(400)))
    shape = FleetShape(workers=1, cache_tokens=100, token_ms=1.0)
    make = ROUTERS[LEAST_QUEUE]

    def p95(workers: int) -> float:
        shape = FleetShape(workers=workers, cache_tokens=100, token_ms=1.0)
        return QueueModel(shape, calls).run(make(shape, 0)).ttft(0.95)

    found = workers_needed(calls, shape, 500.0, make)
    assert found is not None
    assert p95(found) <= 500.0 < p95(found - 1)
    assert workers_needed(calls, shape, 500.0, make, at_least=found) == found
    assert workers_needed(calls, shape, 99.0, make) is None, "each takes 100 ms by itself"


def test_a_goal_that_needs_more_workers_than_are_tried_is_not_tried_with_them() -> None:
    """300 are busy all the time, one call after the other: a model of so many would take long."""
    spaced = stretch(*((10.0 * n / 3, 995, []) for n in range(3_000)))
    shape = FleetShape(workers=1, cache_tokens=100, token_ms=1.0)

    def none_is_made(_shape: FleetShape, _seed: int) -> Chooser:
        raise AssertionError("one was tried")

    assert workers_needed(spaced, shape, 1_001.0, none_is_made) is None
    with pytest.raises(AssertionError, match="one was tried"):
        workers_needed(spaced, shape, 1e9, none_is_made)
