"""A choice that cannot be entered in the books leaves no book open; batches weigh what they are."""

from __future__ import annotations

import logging
from array import array
from typing import Any, NoReturn

import pytest
from picker_bench import BLOCK, COMPLETE, GONE, W0, Bench, ids, request

from trunkline.gateway.contracts import OPEN_GRANT, Pick


def broken(*_: object, **__: object) -> NoReturn:
    raise OverflowError("a number of a worker's that does not fit")


@pytest.mark.parametrize("book", ["churn", "queue", "directory", "ticket", "salt"])
def test_an_error_while_an_attempt_is_entered_leaves_every_book_as_it_was(
    book: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(W0)
    state = bench.fleet.get(W0)
    assert state is not None
    target: Any = {
        "churn": (type(bench.fleet.churn), "add"),
        "queue": (type(state.queue), "start"),
        "directory": (type(bench.directory), "predict"),
        "ticket": (type(bench.picker._tickets), "next_number"),
        "salt": (type(bench.picker), "_body"),
    }[book]
    with monkeypatch.context() as patch:
        patch.setattr(target[0], target[1], broken)
        with pytest.raises(OverflowError):
            bench.pick(ids(100))
    bench.assert_clean()
    assert bench.told["w0", "sent"] == bench.told["w0", "client-gone"]  # pyright: ignore[reportArgumentType]

    bench.picker.ended(bench.pick(ids(100)), GONE, None)
    bench.assert_clean()


def picked(tokens: array[int], further_tokens: int) -> tuple[Bench, Pick]:
    bench = Bench(W0)
    asked = request(tokens)
    asked.further_tokens = further_tokens
    made = bench.picker.pick(asked, frozenset())
    assert isinstance(made, Pick)
    return bench, made


def test_a_batch_is_priced_and_booked_as_all_of_its_prompts() -> None:
    _, alone = picked(ids(BLOCK), 0)
    bench, batch = picked(ids(BLOCK), 4_000)
    _, long = picked(ids(BLOCK + 4_000), 0)
    assert batch.ticket.decision.prompt_tokens == BLOCK + 4_000
    assert batch.ticket.decision.miss_ms == long.ticket.decision.miss_ms
    assert batch.ticket.decision.miss_ms > 10 * alone.ticket.decision.miss_ms
    state = bench.fleet.get(W0)
    assert state is not None
    assert state.queue.queue_ms(bench.clock.now()) == batch.ticket.decision.miss_ms


def test_a_repeated_batch_owes_what_it_would_owe_alone() -> None:
    bench, first = picked(ids(4 * BLOCK), 4_000)
    bench.picker.first_byte(first)
    asked = request(ids(4 * BLOCK))
    asked.further_tokens = 4_000
    second = bench.picker.pick(asked, frozenset())
    assert isinstance(second, Pick)
    assert second.ticket.owed_from == 4
    bench.picker.ended(second, GONE, None)
    assert bench.expected(W0, ids(4 * BLOCK)) == 4


@pytest.mark.parametrize(
    ("is_shared", "further_tokens", "cached_tokens", "false_hits"),
    [(False, 0, 16, 1), (False, 0, 0, 0), (False, 64, 16, 0), (True, 0, 16, 0)],
)
def test_reuse_under_a_salt_that_nobody_else_has_is_a_false_hit(
    is_shared: bool,
    further_tokens: int,
    cached_tokens: int,
    false_hits: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A batch, or copies, may reuse what it computed itself."""
    bench = Bench(W0)
    asked = request(ids(100))
    asked.further_tokens = further_tokens
    if not is_shared:
        asked.grant = OPEN_GRANT.unshared()
    made = bench.picker.pick(asked, frozenset())
    assert isinstance(made, Pick)
    bench.picker.first_byte(made)
    with caplog.at_level(logging.ERROR, "trunkline"):
        bench.picker.ended(made, COMPLETE, cached_tokens)
    assert bench.picker.accounts.false_hits == false_hits
    assert [record.message for record in caplog.records] == ["reuse.false_hit"] * false_hits
