"""W5 has the seed article's shape: its rate, its lengths and, above all, its ceilings on hits."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

import pytest

from trunkline.replay.article import ArticleShape, article_requests
from trunkline.replay.traces import PartKind, TraceRequest

ENDLESS = 1 << 60


@pytest.fixture(scope="module")
def requests() -> list[TraceRequest]:
    return article_requests()


def hit_tokens_share(requests: Iterable[TraceRequest], capacity_blocks: int) -> float:
    """One shared cache, least recently used first, the tail of a prefix before its head."""
    resident: OrderedDict[int, None] = OrderedDict()
    hit = total = 0
    for request in requests:
        ids = (request.block_ids or ())[: request.full_blocks]
        blocks = next((i for i, block in enumerate(ids) if block not in resident), len(ids))
        hit += blocks * request.block_tokens
        total += request.input_tokens
        for block in reversed(ids):
            resident[block] = None
            resident.move_to_end(block)
        while len(resident) > capacity_blocks:
            resident.popitem(last=False)
    return hit / total


@pytest.mark.parametrize(
    ("capacity_blocks", "share", "tolerance"),
    [(ENDLESS, 0.927, 0.01), (40_000, 0.890, 0.015), (2_500, 0.345, 0.04)],
)
def test_ceilings_match_the_reference(
    requests: list[TraceRequest], capacity_blocks: int, share: float, tolerance: float
) -> None:
    assert hit_tokens_share(requests, capacity_blocks) == pytest.approx(share, abs=tolerance)


def test_rate_and_lengths_match_the_reference(requests: list[TraceRequest]) -> None:
    assert len(requests) == 10_000
    assert requests[-1].arrival_ms == pytest.approx(214_000.0)
    mean_tokens = sum(request.input_tokens for request in requests) / len(requests)
    assert mean_tokens == pytest.approx(3_570, rel=0.01)
    assert {request.output_tokens for request in requests} == {64}


def test_the_rate_is_steady_from_beginning_to_end(requests: list[TraceRequest]) -> None:
    tenths = Counter(min(int(r.arrival_ms // 21_400), 9) for r in requests)
    assert all(900 < tenths[tenth] < 1_100 for tenth in range(10)), tenths


def test_a_sessions_prompts_grow_by_answer_and_user_turn(requests: list[TraceRequest]) -> None:
    by_session: dict[str, list[TraceRequest]] = {}
    for request in requests:
        by_session.setdefault(request.session or "", []).append(request)
    assert max(len(turns) for turns in by_session.values()) <= 8
    for turns in list(by_session.values())[:300]:
        for before, after in pairwise(turns):
            assert before.parts is not None
            assert after.parts is not None
            assert after.parts[: len(before.parts)] == before.parts
            kinds = [part.kind for part in after.parts[len(before.parts) :]]
            assert kinds == [PartKind.ANSWER, PartKind.USER]
            shared = before.full_blocks
            assert (after.block_ids or ())[:shared] == (before.block_ids or ())[:shared]


def test_each_id_has_one_parent_and_tokens_add_up(requests: list[TraceRequest]) -> None:
    parents: dict[int, int] = {}
    for request in requests:
        ids = request.block_ids or ()
        assert len(ids) == -(-request.input_tokens // 16)
        assert sum(part.tokens for part in request.parts or ()) == request.input_tokens
        for parent, child in pairwise((-1, *ids)):
            assert parents.setdefault(child, parent) == parent


def test_the_same_seed_gives_the_same_workload_and_another_seed_another() -> None:
    small = ArticleShape(requests=500, span_ms=20_000.0)
    assert article_requests(small) == article_requests(small)
    assert article_requests(small) != article_requests(replace(small, seed=31))
