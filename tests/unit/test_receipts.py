"""Decisions that are kept, with what came true of them."""

from __future__ import annotations

from dataclasses import replace

from trunkline.core.decision import Candidates, Decision, Gain, Outcome, Reason
from trunkline.core.records import WallTime, WorkerId
from trunkline.gateway.contracts import OPEN_GRANT
from trunkline.gateway.receipts import MAX_ATTEMPTS, Receipts

HALF_PAST = WallTime(1_800.0)
MINE, THEIRS = object(), object()
"""Two requests."""


def decision(request_id: str, worker: str = "w1") -> Decision:
    return Decision(
        request_id=request_id,
        policy="cache_aware",
        prompt_tokens=100,
        choice=0,
        reason=Reason.CACHE_HIT,
        gain=Gain(saved_prefill_ms=0.0, queue_ms=0.0, transfer_ms=0.0, imbalance_ms=0.0),
        candidates=Candidates(
            workers=[WorkerId(worker)],
            matched_tokens=[64],
            pulled_tokens=[0],
            queue_ms=[1.0],
            transfer_ms=[0.0],
            miss_ms=[2.0],
            imbalance_ms=[0.0],
            decode_pressure_ms=[0.0],
            cost_ms=[3.0],
        ),
    )


def outcome(end: str = "complete") -> Outcome:
    return Outcome(
        end=end,
        predicted_ms=3.0,
        first_byte_ms=4.0,
        took_ms=9.0,
        predicted_tokens=64,
        reused_tokens=64,
    )


def receipts(kept: int = 3) -> Receipts:
    return Receipts(kept=kept, is_told=True, key=bytes(32))


def test_a_decision_is_found_with_its_time_and_without_an_outcome_while_it_runs() -> None:
    kept = receipts()
    kept.add(decision("r1"), HALF_PAST, MINE)
    [found] = kept.find("r1")
    told = found.as_dict()
    assert (told["at"], told["outcome"]) == ("1970-01-01T00:30:00.000+00:00", None)


def test_what_came_true_is_joined_to_the_attempt_that_it_is_of() -> None:
    kept = receipts()
    first, second = decision("r1", "w1"), decision("r1", "w2")
    kept.add(first, HALF_PAST, MINE)
    kept.add(second, HALF_PAST, MINE)
    kept.ended(first, outcome("worker-failed"))
    kept.ended(second, outcome())
    ends = [(one.decision.worker, one.as_dict()["outcome"]["end"]) for one in kept.find("r1")]
    assert ends == [("w1", "worker-failed"), ("w2", "complete")]
    assert [one.decision.worker for one in kept.newest_first()] == ["w2"]


def test_the_outcome_of_an_equal_decision_is_not_that_of_this_one() -> None:
    kept = receipts()
    one = decision("r1")
    kept.add(one, HALF_PAST, MINE)
    kept.ended(replace(one), outcome())
    assert kept.find("r1")[0].outcome is None


def test_no_more_requests_are_kept_than_was_said_and_the_oldest_goes() -> None:
    kept = receipts(kept=3)
    for number in range(5):
        kept.add(decision(f"r{number}"), HALF_PAST, MINE)
    assert len(kept) == 3
    assert kept.find("r1") == ()
    assert [one.decision.request_id for one in kept.newest_first()] == ["r4", "r3", "r2"]
    kept.ended(decision("r1"), outcome())


def test_an_id_that_comes_again_and_again_keeps_its_latest_attempts() -> None:
    kept = receipts()
    for number in range(MAX_ATTEMPTS + 2):
        kept.add(decision("again", f"w{number}"), HALF_PAST, MINE)
    found = [one.decision.worker for one in kept.find("again")]
    assert found == [f"w{number}" for number in range(2, MAX_ATTEMPTS + 2)]


def test_nothing_is_kept_where_nothing_is_to_be() -> None:
    kept = receipts(kept=0)
    kept.add(decision("r1"), HALF_PAST, MINE)
    kept.ended(decision("r1"), outcome())
    assert (len(kept), kept.find("r1")) == (0, ())


def test_the_name_that_a_client_is_told_finds_the_decision() -> None:
    kept = receipts()
    made = decision("r1")
    kept.add(made, HALF_PAST, MINE)
    named = kept.told(replace(OPEN_GRANT, sees_decisions=False), made)
    assert [one.decision for one in kept.find(named)] == [made]
    assert kept.find("f" * 24) == ()
    for number in range(3):
        kept.add(decision(f"later-{number}"), HALF_PAST, MINE)
    assert kept.find(named) == ()
    assert not kept._ids, "the name goes with what it names"


def test_requests_that_were_given_one_id_are_told_apart_the_latest_first() -> None:
    kept = receipts()
    for of, worker in ((MINE, "w1"), (THEIRS, "w2"), (MINE, "w3")):
        kept.add(decision("r1", worker), HALF_PAST, of)
    found = [[one.decision.worker for one in attempts] for attempts in kept.requests("r1")]
    assert found == [["w1", "w3"], ["w2"]]
    assert [one.decision.worker for one in kept.find("r1")] == ["w1", "w2", "w3"]
    assert kept.requests("r2") == []
