"""What of a prompt a worker could lend now, and when it could lend the rest."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkline.core.debts import MAX_DEBTS, Lending, owed_from
from trunkline.core.fleet import WorkerState
from trunkline.core.identity import ModelIdentity, Scope, ScopeKind, derive_namespace
from trunkline.core.keys import KeyChain, chain
from trunkline.core.records import Instant, Slot, WorkerId

BLOCK = 4
W0 = WorkerId("w0")
NAMESPACE = derive_namespace(
    b"k" * 32,
    Scope(kind=ScopeKind.TENANT, org="o", tenant="t"),
    ModelIdentity(model_id="m", block_tokens=BLOCK),
)
NOW = Instant(1_000.0)


@dataclass(kw_only=True)
class Owing:
    keys: KeyChain | None
    owed_from: int = 0
    is_pulling: bool = False


def keys_of(*blocks: int) -> KeyChain:
    """A prompt of whole blocks, each of one repeated token."""
    return chain(NAMESPACE, array("I", [token for token in blocks for _ in range(BLOCK)]))


class Desk:
    """One worker and what it owes, each attempt of so many ms of prefill."""

    def __init__(self, *attempts: tuple[Owing, float], lends_owed: bool = True) -> None:
        self.state = WorkerState(worker=W0, slot=Slot(0), block_tokens=BLOCK)
        self.debts: dict[int, Owing] = {}
        self.lends_owed = lends_owed
        for ticket, (debt, prefill_ms) in enumerate(attempts, 1):
            self.debts[ticket] = debt
            self.state.queue.start(ticket, prefill_ms, NOW)

    def lending(self, keys: KeyChain) -> Lending:
        return Lending(
            keys=keys,
            block_tokens=BLOCK,
            debts_of=lambda _worker: self.debts,
            lends_owed=lambda _worker: self.lends_owed,
        )

    def there(self, keys: KeyChain, blocks: int) -> int:
        return self.lending(keys).there_tokens(self.state, blocks * BLOCK) // BLOCK

    def ready_ms(self, keys: KeyChain, blocks: int, after_ms: float = 0.0) -> float:
        now = Instant(NOW + after_ms)
        return self.lending(keys).ready_ms(self.state, blocks * BLOCK, now)


def test_what_an_attempt_computes_is_there_with_its_first_token_and_not_before() -> None:
    desk = Desk((Owing(keys=keys_of(9, 9)), 300.0), (Owing(keys=keys_of(1, 2, 3, 4)), 200.0))
    wanted = keys_of(1, 2, 3, 7)
    assert desk.there(wanted, 3) == 0
    assert desk.ready_ms(wanted, 3) == 500.0, "and all that is in front of it is served before"
    assert desk.ready_ms(wanted, 3, after_ms=120.0) == 380.0
    assert desk.ready_ms(wanted, 3, after_ms=900.0) == 200.0, "the first one is overdue"
    desk.state.queue.first_token(1, Instant(NOW + 310.0))
    del desk.debts[1]
    assert desk.ready_ms(wanted, 3, after_ms=400.0) == 110.0
    desk.state.queue.first_token(2, Instant(NOW + 510.0))
    del desk.debts[2]
    assert desk.there(wanted, 3) == 3
    assert desk.ready_ms(wanted, 3, after_ms=520.0) == 0.0


def test_blocks_before_what_is_owed_are_there_now() -> None:
    desk = Desk((Owing(keys=keys_of(1, 2, 3, 4), owed_from=2), 80.0))
    wanted = keys_of(1, 2, 3, 4, 5)
    assert desk.there(wanted, 4) == 2
    assert desk.ready_ms(wanted, 2) == 0.0
    assert desk.ready_ms(wanted, 3) == 80.0


def test_another_prompt_owes_nothing_of_this_one() -> None:
    desk = Desk((Owing(keys=keys_of(1, 2, 8, 8), owed_from=2), 80.0), (Owing(keys=None), 50.0))
    wanted = keys_of(1, 2, 3, 4)
    assert (desk.there(wanted, 4), desk.ready_ms(wanted, 4)) == (4, 0.0)


def test_one_that_goes_on_where_another_stops_is_waited_for_behind_it() -> None:
    desk = Desk(
        (Owing(keys=keys_of(1, 2)), 100.0),
        (Owing(keys=keys_of(1, 2, 3, 4), owed_from=2), 70.0),
        (Owing(keys=keys_of(1, 2, 3, 4), owed_from=4), 5.0),
    )
    wanted = keys_of(1, 2, 3, 4)
    assert [desk.ready_ms(wanted, blocks) for blocks in (1, 2, 3, 4)] == [
        100.0,
        100.0,
        170.0,
        170.0,
    ]


def test_what_a_source_is_to_pull_itself_is_not_waited_for() -> None:
    desk = Desk((Owing(keys=keys_of(1, 2, 3), is_pulling=True), 100.0))
    assert desk.ready_ms(keys_of(1, 2, 3), 3) == math.inf
    assert desk.there(keys_of(1, 2, 3), 3) == 0


def test_a_worker_that_lets_nobody_wait_lends_what_is_there() -> None:
    desk = Desk((Owing(keys=keys_of(1, 2, 3), owed_from=1), 100.0), lends_owed=False)
    wanted = keys_of(1, 2, 3)
    assert desk.ready_ms(wanted, 3) == math.inf
    assert (desk.there(wanted, 3), desk.ready_ms(wanted, 1)) == (1, 0.0)


def test_attempts_beyond_the_bound_are_not_looked_at() -> None:
    others = [(Owing(keys=keys_of(9)), 1.0)] * MAX_DEBTS
    beyond = Desk(*others, (Owing(keys=keys_of(1, 2)), 1.0))
    assert (beyond.there(keys_of(1, 2), 2), beyond.ready_ms(keys_of(1, 2), 2)) == (2, 0.0)
    within = Desk(*others[1:], (Owing(keys=keys_of(1, 2)), 1.0))
    assert (within.there(keys_of(1, 2), 2), within.ready_ms(keys_of(1, 2), 2)) == (0, MAX_DEBTS)


@pytest.mark.parametrize(
    ("known", "blocks", "reusable", "owed"),
    [(0, 5, 4, 0), (3, 5, 4, 3), (4, 5, 4, 5), (0, 1, 0, 0)],
)
def test_an_attempt_owes_from_what_nobody_expected(
    known: int, blocks: int, reusable: int, owed: int
) -> None:
    assert owed_from(known, blocks, reusable) == owed


@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=5), max_size=6),
    wanted=st.lists(st.integers(0, 1), min_size=1, max_size=5),
    costs=st.lists(st.integers(1, 9), min_size=6, max_size=6),
)
def test_it_is_as_if_each_block_were_looked_for_in_the_queue(
    prompts: list[list[int]], wanted: list[int], costs: list[int]
) -> None:
    """Each attempt owes what no earlier one does; a block is there when its attempt is through."""
    through: dict[tuple[int, ...], int] = {}
    attempts: list[tuple[Owing, float]] = []
    clock = 0
    for prompt, cost in zip(prompts, costs, strict=False):
        clock += cost
        leads = [tuple(prompt[: n + 1]) for n in range(len(prompt))]
        known = sum(lead in through for lead in leads)
        through.update({lead: clock for lead in leads if lead not in through})
        attempts.append((Owing(keys=keys_of(*prompt), owed_from=known), float(cost)))
    desk, keys = Desk(*attempts), keys_of(*wanted)
    due = [through.get(tuple(wanted[: n + 1]), 0) for n in range(len(wanted))]
    expected = next((n for n in range(len(wanted)) if not due[n]), len(wanted))
    for blocks in range(1, expected + 1):
        assert desk.ready_ms(keys, blocks) == max(due[:blocks])
        assert desk.there(keys, blocks) == 0
