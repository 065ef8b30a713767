"""What a self-test's sightings say of a worker: findings, how much they leave, and what they do not
say.
"""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkline.core.alignment import (
    MAX_CANARY_TOKENS,
    AdapterTrial,
    Belief,
    Examination,
    Finding,
    Reading,
    Sighting,
    State,
    Topic,
    canary_tokens,
    joined,
    judge,
)
from trunkline.core.events import BlocksStored
from trunkline.core.records import Tier

BLOCK = 16
CANARY = array("I", range(1_000, 1_000 + 3 * BLOCK + 9))
SALT = "own"


def run(first: int = 0, count: int = 3, **changes: Any) -> BlocksStored:
    fields: dict[str, Any] = {
        "hashes": array("Q", range(first, first + count)),
        "parent": None if first == 0 else first - 1,
        "tokens": CANARY[first * BLOCK : (first + count) * BLOCK],
        "block_tokens": BLOCK,
        "tier": Tier.DEVICE,
        "salt": SALT,
    }
    return BlocksStored(**{**fields, **changes})


def seen(**changes: Any) -> Sighting:
    """A worker with which all is well."""
    fields: dict[str, Any] = {
        "canary": CANARY,
        "block_tokens": BLOCK,
        "salts": frozenset({SALT, "other"}),
        "cold": 0,
        "again": 3 * BLOCK,
        "other": 0,
        "has_events": True,
        "was_heard": True,
        "runs": [run()],
        "announced_blocks": 3,
        "known_blocks": 3,
        "readings": [
            Reading(topic=Topic.TEXT, ours=array("I", [1, 2]), theirs=array("I", [1, 2])),
            Reading(topic=Topic.CHAT, ours=array("I", [3]), theirs=None, their_count=1),
        ],
    }
    return Sighting(**{**fields, **changes})


def examined(**changes: Any) -> Examination:
    return Examination(findings=judge(seen(**changes)))


def found(topic: Topic, **changes: Any) -> Finding:
    [finding] = [f for f in examined(**changes).findings if f.topic is topic]
    return finding


def test_a_worker_with_which_all_is_well_is_exact() -> None:
    examination = examined()
    assert {f.state for f in examination.findings} == {State.OK}
    assert (examination.belief, examination.reason) == (Belief.EXACT, "")
    assert not examination.is_wrong
    assert not examination.leaks


def test_reuse_under_another_salt_is_a_leak_and_leaves_nothing_to_believe() -> None:
    examination = examined(other=3 * BLOCK, known_blocks=0)
    assert examination.leaks
    assert examination.belief is Belief.BLIND
    assert "found 48 of 57" in examination.reason
    assert "cache_salt" in examination.reason, "the leak is told before all else"


@pytest.mark.parametrize(
    "changes",
    [
        {"again": None, "cold": None, "other": None},
        {"again": 0, "other": 0},
        {"cold": 16, "other": 48},
    ],
)
def test_isolation_is_not_shown_where_reuse_was_not_seen_either(changes: dict[str, Any]) -> None:
    """The positive control: no hit under the other salt says nothing where there is none at all."""
    assert found(Topic.ISOLATION, **changes).state is State.OPEN
    assert not examined(**changes).leaks


def test_a_hit_under_another_salt_condemns_without_a_hit_under_the_same() -> None:
    assert examined(again=0, other=48).leaks


def test_no_usage_details_is_wrong_names_the_flag_and_takes_nothing_away() -> None:
    finding = found(Topic.REUSE, cold=None, again=None, other=None)
    assert finding.state is State.WRONG
    assert "--enable-prompt-tokens-details" in finding.remedy
    assert examined(cold=None, again=None, other=None).belief is Belief.EXACT


def test_an_engine_without_a_prefix_cache_is_blind() -> None:
    examination = examined(again=0)
    assert examination.belief is Belief.BLIND
    assert "--enable-prefix-caching" in examination.reason


def test_c46_other_tokens_leave_our_own_routing_and_name_where_they_differ() -> None:
    reading = Reading(topic=Topic.CHAT, ours=array("I", [1, 2, 3]), theirs=array("I", [1, 9, 3, 4]))
    finding = found(Topic.CHAT, readings=[reading])
    assert (finding.state, finding.leaves) == (State.WRONG, Belief.APPROXIMATE)
    assert finding.found == "4 tokens, others from number 1 on"


def test_where_ids_are_not_told_their_number_is_compared() -> None:
    ours = array("I", [1, 2])
    told = {
        count: found(
            Topic.TEXT,
            readings=[Reading(topic=Topic.TEXT, ours=ours, theirs=None, their_count=count)],
        ).state
        for count in (2, 3, None)
    }
    assert told == {2: State.OK, 3: State.WRONG, None: State.OPEN}


def test_without_a_tokenizer_that_is_what_is_wrong_and_not_the_events() -> None:
    reading = Reading(topic=Topic.TEXT, ours=None, theirs=None, has_tokenizer=False)
    silent: dict[str, Any] = {"runs": [], "has_events": False, "unfollowed": "no tokenizer"}
    examination = examined(readings=[reading], **silent)
    assert [f.topic for f in examination.findings if f.state is State.WRONG] == [Topic.TEXT]
    assert "--model-path" in examination.reason
    assert examination.belief is Belief.APPROXIMATE


def test_c54_events_of_another_block_size_name_that_size() -> None:
    runs = [run(block_tokens=8)]
    assert found(Topic.BLOCK_SIZE, runs=runs).state is State.WRONG
    assert seen(runs=runs).other_block_tokens == 8
    assert seen().other_block_tokens is None
    assert seen(runs=[run(block_tokens=8, tier=Tier.HOST)]).other_block_tokens is None


@pytest.mark.parametrize(("again", "state"), [(48, "ok"), (56, "ok"), (32, "wrong"), (0, "open")])
def test_without_events_what_is_reused_tells_the_block_size(again: int, state: str) -> None:
    finding = found(Topic.BLOCK_SIZE, runs=[], has_events=False, again=again)
    assert finding.state.value == state


def test_c57_events_that_are_off_and_events_that_never_come_are_told_apart() -> None:
    silent: dict[str, Any] = {"runs": [], "known_blocks": 0}
    assert "announces none" in found(Topic.EVENTS, has_events=False, **silent).found
    assert "no events since start" in found(Topic.EVENTS, was_heard=False, **silent).found
    assert "though others came" in found(Topic.EVENTS, **silent).found
    assert found(Topic.EVENTS, stream="it is replaying", **silent).state is State.OPEN
    assert found(Topic.EVENTS, has_digest=True, has_events=False, **silent).state is State.OK


@pytest.mark.parametrize(
    ("runs", "text"),
    [
        ([run(tokens=array("I", [7] * 48))], "other tokens"),
        ([run(salt=None)], "no salt"),
        ([run(salt="someone's")], "another salt"),
    ],
)
def test_events_of_other_tokens_or_salts_cannot_be_used(runs: list[Any], text: str) -> None:
    finding = found(Topic.KEYS, runs=runs)
    assert (finding.state, finding.leaves) == (State.WRONG, Belief.APPROXIMATE)
    assert finding.found == text


def test_blocks_that_came_one_by_one_are_as_good() -> None:
    runs = [run(0, 1), run(1, 1, salt=None), run(2, 1, salt=None)]
    assert found(Topic.KEYS, runs=runs).state is State.OK


def test_blocks_that_the_directory_lacks_are_wrong_unless_the_stream_is_being_repaired() -> None:
    assert found(Topic.KEYS, known_blocks=2).state is State.WRONG
    assert found(Topic.KEYS, known_blocks=2, stream="it is relearning").state is State.OPEN


def test_c52_an_adapter_that_reuses_the_models_own_cache_is_wrong() -> None:
    def state(cached: int | None) -> State:
        return found(Topic.ADAPTER, adapters=[AdapterTrial(name="fr", cached=cached)]).state

    assert [state(0), state(48), state(None)] == [State.OK, State.WRONG, State.OPEN]


def test_c55_other_names_of_one_block_are_told_and_no_fault() -> None:
    examination = examined(hash_note="another than w1 has")
    assert [f.topic for f in examination.findings if f.state is State.NOTE] == [Topic.HASHES]
    assert not examination.is_wrong


def test_the_findings_of_other_ranks_are_told_where_they_are_wrong() -> None:
    whole = joined([("w@0", examined()), ("w@1", examined(other=48))])
    assert whole.leaks
    assert "(w@1)" in whole.reason
    assert joined([("w@0", examined()), ("w@1", examined())]) == examined()


def test_one_unfinished_rank_leaves_the_whole_unfinished() -> None:
    whole = joined([("w@0", examined(other=48)), ("w@1", Examination(unfinished="busy"))])
    assert (whole.unfinished, whole.findings) == ("w@1: busy", ())


@given(block=st.integers(1, 65_536), most=st.none() | st.integers(1, 200_000))
def test_a_canary_has_whole_blocks_and_fits(block: int, most: int | None) -> None:
    length = canary_tokens(block, most)
    if length:
        assert length > block, "something can be reused"
        assert most is None or length + 1 <= most, "and there is room for the answer"
        assert length <= max(MAX_CANARY_TOKENS, block + 1)
    else:
        assert most is not None
        assert block + 1 > most - 2
