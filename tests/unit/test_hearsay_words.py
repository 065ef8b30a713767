"""How much gateways tell one another of what they expect, and what is refused of it."""

from __future__ import annotations

import msgspec
import pytest
from hearsay_desk import W1, Desk
from test_load_sync import Air

from hand_clock import HandClock
from trunkline.control.load_sync import MAX_WORD_BYTES, LoadSync
from trunkline.core.hearsay import MAX_SAID_BLOCKS, MAX_SAID_RUNS


@pytest.fixture(name="desks")
def two_gateways() -> list[Desk]:
    air, clock = Air(), HandClock(ms=1_000.0)
    return [Desk(f"g{number}", air, clock) for number in range(2)]


# -- bounds -------------------------------------------------------------------------------------


def test_a_beat_tells_so_many_blocks_and_cuts_nobody_before_who_has_more(
    desks: list[Desk],
) -> None:
    one, other = desks
    other.expected(1)
    one.choose(3_000, seed=1)
    one.choose(10, seed=2)
    one.choose(1_500, seed=3)
    one.beat()
    assert one.hearsay.stats.said <= MAX_SAID_BLOCKS
    assert other.expected(10, seed=2) == 10
    assert other.expected(3_000, seed=1) == other.expected(1_500, seed=3) == 1_019
    assert one.hearsay.stats.left_out == 4_510 - one.hearsay.stats.said


def test_a_beat_tells_of_so_many_choices(desks: list[Desk]) -> None:
    one, _ = desks
    for seed in range(MAX_SAID_RUNS + 3):
        one.choose(2, seed=seed)
    assert len(one.hearsay.drained()) == MAX_SAID_RUNS
    assert one.hearsay.stats.left_out == 6


def test_a_word_is_never_too_long_for_what_carries_it(desks: list[Desk]) -> None:
    one, other = desks
    other.expected(1)
    for seed in range(MAX_SAID_RUNS):
        one.choose(8, seed=seed)
    assert len(one.sync.word(one.clock.now()) or b"") < MAX_WORD_BYTES
    narrow = LoadSync("narrow", Air(), one.clock, max_word_bytes=100)
    narrow.attach([], [one.hearsay])
    one.choose(8, seed=MAX_SAID_RUNS)
    body = narrow.word(one.clock.now())
    assert body is not None
    assert len(body) < 100
    assert narrow.left_out_blocks == 8


def word(*told: object) -> bytes:
    return msgspec.msgpack.encode(["evil", {}, list(told)])


@pytest.mark.parametrize(
    "body",
    [
        word([W1, b"t" * 15, 0, b"k" * 32]),
        word([W1, b"t" * 16, -1, b"k" * 32]),
        word([W1, b"t" * 16, 2**40, b"k" * 64]),
        word([W1, b"t" * 16, 0, b""]),
        word([W1, b"t" * 16, 0, b"k" * 33]),
        word([W1, b"t" * 16, 1, b"k" * 32]),
        word([W1, b"t" * 16, 0, b"k" * 32 * (MAX_SAID_BLOCKS + 2)]),
        word(["", b"t" * 16, 0, b"k" * 32]),
        word([W1, b"t" * 16, 0]),
        word(*[[W1, b"t" * 16, 0, b"k" * 32]] * (2 * MAX_SAID_RUNS + 1)),
        word("nonsense"),
        b"\x93" + bytes(3 << 20),
    ],
    ids=lambda body: f"{len(body)} bytes",
)
def test_words_that_make_no_sense_are_refused_and_counted(desks: list[Desk], body: bytes) -> None:
    one, _ = desks
    one.sync.take(body)
    assert one.sync.refused == 1
    assert (one.hearsay.waiting_count, one.directory.block_count()) == (0, 0)


def test_a_gateway_before_this_one_is_understood(desks: list[Desk]) -> None:
    one, _ = desks
    one.sync.take(msgspec.msgpack.encode(["older", {W1: 1.0}]))
    assert one.sync.refused == 0


def test_what_became_of_blocks_is_counted(desks: list[Desk]) -> None:
    one, other = desks
    other.expected(1)
    one.choose(8)
    one.beat()
    assert dict(one.sync.ends())["told"] == dict(other.sync.ends())["taken"] == 8
