"""Sources: what the end of a pull changes about who is asked next."""

from __future__ import annotations

import math
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkline.core import sources as sources_module
from trunkline.core.identity import ModelIdentity, Scope, ScopeKind, derive_namespace
from trunkline.core.keys import KeyChain, chain
from trunkline.core.records import Instant, WorkerId
from trunkline.core.sources import MAX_STRIKES, MISS_MS, MOST_PAUSE_MS, Sources
from trunkline.core.transfer import Lesson, Reason

W0, W1 = WorkerId("w0"), WorkerId("w1")
T0 = Instant(1_000.0)
NAMESPACE = derive_namespace(
    b"r" * 32,
    Scope(kind=ScopeKind.TENANT, org="o", tenant="t"),
    ModelIdentity(model_id="m", block_tokens=16),
)


def prompt(blocks: int = 8, first: int = 0) -> KeyChain:
    return chain(NAMESPACE, array("I", range(first, first + 16 * blocks)))


def later(ms: float) -> Instant:
    return Instant(T0 + ms)


def test_of_a_worker_that_nothing_is_known_of_everything_is_asked() -> None:
    sources = Sources()
    assert sources.blocks(W0, prompt(), 8, T0) == 8
    sources.published(W0, W1)
    assert len(sources) == 0


def test_d03_a_block_that_was_not_there_ends_the_run_for_a_while() -> None:
    sources, keys = Sources(), prompt()
    for reason in (Reason.MISS, Reason.LENGTH):
        sources.failed(W0, W1, reason, keys[5], T0)
    assert sources.phantoms == 2
    assert sources.blocks(W0, keys, 8, T0) == 5
    assert sources.blocks(W0, keys, 3, T0) == 3, "what goes before it is not in doubt"
    assert sources.blocks(W0, prompt(first=99), 8, T0) == 8, "nor is any other prompt"
    assert sources.blocks(W1, keys, 8, T0) == 8, "nor any other worker"
    assert sources.blocks(W0, keys, 8, later(MISS_MS)) == 8


def test_wrong_bytes_are_never_asked_for_again_and_three_make_a_suspect() -> None:
    sources, keys = Sources(), prompt()
    sources.failed(W0, W1, Reason.DIGEST, keys[5], T0)
    assert sources.blocks(W0, keys, 8, later(1e12)) == 5
    sources.published(W0, W1)
    assert sources.blocks(W0, keys, 8, T0) == 5, "another pull that went well changes nothing"
    for index in range(1, MAX_STRIKES):
        assert not sources.is_suspect(W0)
        sources.failed(W0, W1, Reason.DIGEST, prompt(first=100 * index)[0], T0)
    assert sources.is_suspect(W0)
    assert sources.blocks(W0, keys, 8, later(1e12)) == 0
    assert sources.wrong_bytes == MAX_STRIKES
    sources.forget(W0)
    assert sources.blocks(W0, keys, 8, T0) == 8, "the next life is another worker"


def test_silence_is_no_absence_and_is_waited_out_twice_as_long_each_time() -> None:
    sources, keys, now = Sources(), prompt(), T0
    pauses_ms: list[float] = []
    for _ in range(9):
        sources.failed(W0, W1, Reason.TIMEOUT, keys[0], now)
        began = now
        while sources.rests(W0, now):
            now = Instant(now + 500.0)
        pauses_ms.append(now - began)
        assert sources.blocks(W0, keys, 8, now) == 8, "all of it is believed to be there"
    assert pauses_ms[:4] == [1_000.0, 2_000.0, 4_000.0, 8_000.0]
    assert pauses_ms[-1] == MOST_PAUSE_MS
    assert not sources.rests(W1, now)
    sources.published(W0, W1)
    sources.failed(W0, W1, Reason.CONNECT, keys[0], now)
    assert not sources.rests(W0, Instant(now + 1_000.0))
    assert sources.phantoms == 0


def test_of_pulls_that_failed_at_once_one_counts() -> None:
    sources, keys = Sources(), prompt()
    for _ in range(5):
        sources.failed(W0, W1, Reason.LOST, keys[0], T0)
    assert sources.rests(W0, later(999.0))
    assert not sources.rests(W0, later(1_000.0))


@pytest.mark.parametrize("reason", [Reason.GRANT, Reason.BUSY, Reason.STAGING_FULL, Reason.LAYOUT])
def test_what_the_destination_could_not_do_is_not_held_against_the_source(reason: Reason) -> None:
    sources, keys = Sources(), prompt()
    sources.failed(W0, W1, reason, keys[0], T0)
    assert not sources.rests(W0, T0)
    assert sources.rests(W1, T0), "it would happen again"
    assert not sources.rests(W1, later(1_000.0))


def test_a_caller_that_went_away_teaches_nothing() -> None:
    sources, keys = Sources(), prompt()
    for reason in (Reason.GIVEN_UP, Reason.CLIENT, Reason.EPOCH, Reason.CLOSING):
        sources.failed(W0, W1, reason, keys[0], T0)
    assert len(sources) == 0


def test_one_bad_block_is_one_strike_however_many_meet_it() -> None:
    sources, keys = Sources(), prompt()
    for _ in range(MAX_STRIKES):
        sources.failed(W0, W1, Reason.DIGEST, keys[2], T0)
    assert not sources.is_suspect(W0)
    assert sources.is_quarantined(W0, keys[2])
    assert sources.suspect_count == 0


def test_a_quarantine_outlives_any_number_of_doubts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources_module, "MAX_DOUBTS", 4)
    sources, keys = Sources(), prompt()
    sources.failed(W0, W1, Reason.DIGEST, keys[2], T0)
    for number in range(1, 30):
        other = prompt(1, first=1_000 * number)
        sources.failed(W0, W1, Reason.MISS, other[0], later(float(number)))
    assert sources.blocks(W0, keys, 8, later(40.0)) == 2


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_has_a_lesson_that_is_learnt(reason: Reason) -> None:
    sources, keys = Sources(), prompt()
    sources.failed(W0, W1, reason, keys[4], T0)
    is_unknown = reason.lesson is Lesson.UNKNOWN
    assert sources.blocks(W0, keys, 8, T0) == (8 if is_unknown else 4)
    assert not (sources.rests(W0, T0) and sources.rests(W1, T0))


def test_doubts_are_bounded_and_those_that_ended_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources_module, "MAX_DOUBTS", 3)
    sources = Sources()
    prompts = [prompt(1, first=16 * n) for n in range(6)]
    for keys in prompts[:3]:
        sources.failed(W0, W1, Reason.MISS, keys[0], T0)
    sources.failed(W0, W1, Reason.MISS, prompts[3][0], T0)
    asked = [sources.blocks(W0, keys, 1, T0) for keys in prompts]
    assert asked == [1, 0, 0, 0, 1, 1], "the oldest doubt is dropped"
    sources.failed(W0, W1, Reason.MISS, prompts[4][0], later(MISS_MS))
    assert sources.blocks(W0, prompts[4], 1, later(MISS_MS)) == 0


@given(
    st.lists(st.tuples(st.sampled_from(Reason), st.integers(0, 7), st.integers(0, 5_000))),
    st.integers(0, 8),
)
def test_nobody_is_ever_asked_for_more_than_it_holds(
    failures: list[tuple[Reason, int, int]], held: int
) -> None:
    sources, keys, now = Sources(), prompt(), T0
    poisoned = math.inf
    for reason, index, ms in failures:
        sources.failed(W0, W1, reason, keys[index], now)
        if reason is Reason.DIGEST:
            poisoned = min(poisoned, index)
        now = Instant(now + ms)
        assert sources.blocks(W0, keys, held, now) <= min(held, poisoned)
