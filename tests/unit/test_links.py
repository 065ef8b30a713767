"""Links: what a pull is predicted to take, and what measured pulls change about that."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkline.core import links as links_module
from trunkline.core.links import LinkProfile, Links, gbit_per_s
from trunkline.core.records import WorkerId

A, B, C = WorkerId("a"), WorkerId("b"), WorkerId("c")
MIB = 1 << 20


def links_of(setup_ms: float = 2.0, bytes_per_ms: float = 1_000_000.0) -> Links:
    profile = LinkProfile(setup_ms=setup_ms, bytes_per_ms=bytes_per_ms)
    return Links(profile, bytes_per_token=100_000)


def test_a_pair_without_history_is_as_good_as_its_description() -> None:
    assert links_of().transfer_ms(A, B, 100) == pytest.approx(2.0 + 10.0)
    assert gbit_per_s(25.0) == pytest.approx(3_125_000.0)


def test_both_set_up_and_bandwidth_of_a_pair_are_learnt() -> None:
    links, draw = links_of(), random.Random(4)
    for _ in range(60):
        moved_bytes = draw.randrange(1, 80) * MIB
        ms = (30.0 + moved_bytes / 250_000.0) * draw.uniform(0.9, 1.1)
        links.observe(A, B, moved_bytes=moved_bytes, ms=ms)
    assert links.transfer_ms(A, B, 10) == pytest.approx(30.0 + 4.0, rel=0.35)
    assert links.transfer_ms(A, B, 600) == pytest.approx(30.0 + 240.0, rel=0.1)


def test_pairs_and_directions_are_learnt_apart() -> None:
    links = links_of()
    for _ in range(20):
        links.observe(A, B, moved_bytes=10 * MIB, ms=500.0)
    assert links.transfer_ms(A, B, 105) > 300.0
    assert links.transfer_ms(B, A, 105) == links.transfer_ms(A, C, 105) == pytest.approx(12.5)


def test_an_old_measurement_yields_to_new_ones() -> None:
    links = links_of()
    for _ in range(20):
        links.observe(A, B, moved_bytes=10 * MIB, ms=500.0)
    for _ in range(60):
        links.observe(A, B, moved_bytes=10 * MIB, ms=12.5)
    assert links.transfer_ms(A, B, 105) == pytest.approx(12.5, rel=0.1)


def test_one_accident_is_bounded() -> None:
    links = links_of()
    links.observe(A, B, moved_bytes=10 * MIB, ms=1e12)
    assert links.transfer_ms(A, B, 105) <= 100 * 12.5


def test_what_moved_nothing_teaches_nothing() -> None:
    links = links_of()
    links.observe(A, B, moved_bytes=0, ms=5.0)
    links.observe(A, B, moved_bytes=5, ms=0.0)
    assert len(links) == 0


def test_a_worker_that_left_is_forgotten_with_all_its_pairs() -> None:
    links = links_of()
    for pair in ((A, B), (B, C), (C, A)):
        links.observe(*pair, moved_bytes=MIB, ms=400.0)
    links.forget(A)
    assert len(links) == 1
    assert links.transfer_ms(A, B, 10) == pytest.approx(3.0)


def test_pairs_are_bounded_and_the_longest_silent_one_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links_module, "MAX_PAIRS", 2)
    links = links_of()
    links.observe(A, B, moved_bytes=MIB, ms=400.0)
    links.observe(A, C, moved_bytes=MIB, ms=400.0)
    links.observe(A, B, moved_bytes=MIB, ms=400.0)
    links.observe(B, C, moved_bytes=MIB, ms=400.0)
    assert len(links) == 2
    assert links.transfer_ms(A, C, 10) == pytest.approx(3.0), "forgotten"
    assert links.transfer_ms(A, B, 10) > 3.0


@given(
    st.lists(st.tuples(st.integers(1, 10**12), st.floats(1e-6, 1e9)), max_size=40),
    st.integers(1, 10**6),
)
def test_whatever_was_measured_more_tokens_take_longer_and_none_take_less_than_nothing(
    measured: list[tuple[int, float]], tokens: int
) -> None:
    links = links_of()
    for moved_bytes, ms in measured:
        links.observe(A, B, moved_bytes=moved_bytes, ms=ms)
    assert links.transfer_ms(A, B, tokens + 1) > links.transfer_ms(A, B, tokens) >= 0.0


@pytest.mark.parametrize(("setup_ms", "rate"), [(-1.0, 1.0), (0.0, 0.0), (float("inf"), 1.0)])
def test_a_description_that_is_none_is_refused(setup_ms: float, rate: float) -> None:
    with pytest.raises(ValueError, match="a link of"):
        LinkProfile(setup_ms=setup_ms, bytes_per_ms=rate)
    with pytest.raises(ValueError, match="bytes_per_token is 0"):
        Links(LinkProfile(), bytes_per_token=0)
