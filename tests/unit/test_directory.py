"""The directory: contiguous matches, tiers, digests, trust, bounds, and what a lookup costs."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from trunkline.core.directory import (
    MAX_CHECKPOINTS_PER_HEARTBEAT,
    MAX_EVENT_AGE_MS,
    Directory,
    StoreOutcome,
)
from trunkline.core.events import BlocksRemoved, BlocksStored
from trunkline.core.identity import ModelIdentity, Namespace, Scope, ScopeKind, derive_namespace
from trunkline.core.keys import KeyChain, as_tokens, chain
from trunkline.core.records import BlockKey, EngineHash, Instant, Tier, WorkerId

W0, W1 = WorkerId("w0"), WorkerId("w1")
T0 = Instant(0.0)


def namespace(tenant: str = "t", *, block_tokens: int = 2, model: str = "m") -> Namespace:
    scope = Scope(kind=ScopeKind.TENANT, org="o", tenant=tenant)
    identity = ModelIdentity(model_id=model, block_tokens=block_tokens)
    return derive_namespace(bytes(32), scope, identity)


NAMESPACE = namespace()


def prompt(*names: int, of: Namespace = NAMESPACE) -> KeyChain:
    """Block `n` has the tokens (n, n, ...)."""
    return chain(of, as_tokens(n for n in names for _ in range(of.model.block_tokens)))


def run(
    *names: int,
    parent: int | None = None,
    of: Namespace = NAMESPACE,
    tier: Tier = Tier.DEVICE,
    hashes: list[int] | None = None,
) -> BlocksStored:
    size = of.model.block_tokens
    return BlocksStored(
        hashes=array("Q", hashes or names),
        parent=None if parent is None else EngineHash(parent),
        tokens=as_tokens(n for n in names for _ in range(size)),
        block_tokens=size,
        tier=tier,
        salt=of.salt,
    )


def gone(*names: int, tier: Tier = Tier.DEVICE) -> BlocksRemoved:
    return BlocksRemoved(hashes=array("Q", names), tier=tier)


def directory_of(*workers: WorkerId, max_blocks: int = 100_000, **options: Any) -> Directory:
    made = Directory(max_blocks=max_blocks)
    made.admit_namespace(NAMESPACE)
    for worker in workers:
        made.join(worker, block_tokens=2, **options)
    return made


def test_c32_only_unbroken_leading_blocks_count() -> None:
    directory = directory_of(W0)
    directory.stored(W0, run(0, 1, 2, 3, 4))
    directory.removed(W0, gone(2))
    assert directory.match(prompt(0, 1, 2, 3, 4)).resident == [2]


def test_c33_a_block_counts_only_behind_the_blocks_it_was_computed_after() -> None:
    directory = directory_of(W0, W1)
    directory.stored(W0, run(20))
    directory.stored(W1, run(10))
    match = directory.match(prompt(10, 20))
    assert match.resident == [0, 1]


def test_c21_an_orphan_is_never_attached_to_the_root() -> None:
    directory = directory_of(W0)
    assert directory.stored(W0, run(7, parent=6)) is StoreOutcome.UNKNOWN_PARENT
    assert directory.match(prompt(7)).resident == [0]
    assert directory.block_count() == 0


def test_tiers_are_counted_apart_and_the_device_is_the_smallest() -> None:
    directory = directory_of(W0)
    directory.stored(W0, run(1, 2))
    directory.stored(W0, run(1, 2, 3, tier=Tier.HOST))
    directory.removed(W0, gone(2))
    match = directory.match(prompt(1, 2, 3, 4))
    assert (match.device, match.resident, match.expected) == ([1], [3], [3])


def test_every_copy_has_to_go_before_a_block_is_gone() -> None:
    directory = directory_of(W0)
    for _ in range(3):
        directory.stored(W0, run(1))
    for left in (2, 1, 0):
        directory.removed(W0, gone(1))
        assert directory.match(prompt(1)).resident == [int(left > 0)]


def test_c41_namespaces_and_models_never_meet_whatever_the_tokens() -> None:
    other, elsewhere = namespace("other"), namespace(model="another")
    directory = directory_of(W0)
    directory.admit_namespace(other)
    directory.admit_namespace(elsewhere)
    directory.stored(W0, run(1, 2))
    for stranger in (other, elsewhere):
        assert directory.match(prompt(1, 2, of=stranger)).expected == [0]


def test_an_unknown_salt_stores_nothing() -> None:
    directory = directory_of(W0)
    assert directory.stored(W0, run(1, of=namespace("new"))) is StoreOutcome.UNKNOWN_SALT
    assert directory.block_count() == 0
    directory.admit_namespace(namespace("new"))
    assert directory.knows_salt(namespace("new").salt)
    assert directory.stored(W0, run(1, of=namespace("new"))) is StoreOutcome.STORED


def test_a_worker_with_another_block_size_takes_no_part() -> None:
    wide = namespace(block_tokens=4)
    directory = directory_of(W0)
    directory.admit_namespace(wide)
    directory.join(W1, block_tokens=4)
    assert directory.stored(W0, run(1, of=wide)) is StoreOutcome.WRONG_BLOCK_SIZE
    directory.predict(W1, prompt(1, 2), now=T0, ttl_ms=1_000.0)
    assert directory.match(prompt(1, 2)).expected == [0, 0]
    assert directory.block_count() == 0


@pytest.mark.parametrize("size", [0, -1, 10**9, "16", 16.0, True, None], ids=repr)
def test_c35_a_senseless_block_size_is_refused_with_a_reason(size: Any) -> None:
    directory = directory_of()
    with pytest.raises(ValueError, match="w0: block size"):
        directory.join(W0, block_tokens=size)
    assert not directory.knows(W0)


def test_c42_a_lookup_never_names_a_worker_that_is_not_registered() -> None:
    directory = directory_of(W0, W1)
    directory.stored(W0, run(1))
    directory.leave(W0)
    assert directory.match(prompt(1)).expected == [0, 0]
    directory.join(WorkerId("w2"), block_tokens=2)  # takes the freed slot, not what was there
    assert directory.match(prompt(1)).expected == [0, 0]
    with pytest.raises(KeyError):
        directory.stored(W0, run(1))


def test_every_life_of_every_worker_has_a_number_of_its_own() -> None:
    directory = directory_of(W0, W1)
    seen = [directory.incarnation(W0), directory.incarnation(W1), directory.restart(W0)]
    directory.leave(W0)
    directory.join(W0, block_tokens=2)
    seen.append(directory.incarnation(W0))
    assert seen == sorted(set(seen))


def test_c27_churn_with_a_constant_live_set_keeps_the_index_constant() -> None:
    directory = directory_of(W0)
    live_count = 50
    for number in range(5_000):
        directory.stored(W0, run(3 * number, 3 * number + 1, 3 * number + 2))
        if number >= live_count:
            first = 3 * (number - live_count)
            directory.removed(W0, gone(first, first + 1, first + 2))
            assert directory.block_count() == 3 * live_count
    memory = directory.memory_bytes()
    for number in range(5_000 - live_count, 5_000):
        directory.removed(W0, gone(3 * number, 3 * number + 1, 3 * number + 2))
    assert directory.block_count() == 0
    assert directory.memory_bytes() <= memory


def test_the_index_is_bounded_in_blocks_and_one_worker_in_its_share() -> None:
    directory = directory_of(W0, W1, max_blocks=4, max_held=3)
    assert directory.stored(W0, run(1, 2, 3, 4)) is StoreOutcome.FULL
    assert directory.held_count(W0) == 0
    assert directory.stored(W0, run(1, 2, 3)) is StoreOutcome.STORED
    assert directory.stored(W1, run(8, 9)) is StoreOutcome.FULL
    assert directory.block_count() == 4


def test_by_default_a_worker_may_fill_four_times_its_capacity_or_a_quarter_of_the_index() -> None:
    for max_blocks, capacity, most in (
        (1_000_000, 20_000, 80_000),
        (400_000, 1 << 20, 100_000),
        (400_000, 0, 65_536),
        (70_000, 1 << 20, 65_536),
    ):
        directory = directory_of(W0, max_blocks=max_blocks, max_predicted=capacity)
        assert directory.stored(W0, run(*range(most + 1))) is StoreOutcome.FULL
        assert directory.stored(W0, run(*range(most))) is StoreOutcome.STORED
        assert directory.stored(W0, run(1, parent=0)) is StoreOutcome.FULL


def test_what_lies_in_a_slow_tier_is_resident_and_not_counted_on() -> None:
    directory = directory_of(W0, W1)
    for worker, tier in ((W0, Tier.DISK), (W1, Tier.HOST)):
        directory.stored(worker, run(1, 2, tier=tier))
    match = directory.match(prompt(1, 2))
    assert (match.device, match.resident, match.expected) == ([0, 0], [2, 2], [0, 2])
    directory.stored(W0, run(1))
    assert directory.match(prompt(1, 2)).expected == [1, 2]
    directory.predict(W0, prompt(1, 2), now=T0, ttl_ms=10.0)
    assert directory.match(prompt(1, 2)).expected == [2, 2]


def test_the_seed_changes_no_answer() -> None:
    answers: list[object] = []
    for seed in (0, 7, 2**64 - 1):
        directory = Directory(max_blocks=100, seed=seed)
        directory.admit_namespace(NAMESPACE)
        directory.join(W0, block_tokens=2)
        directory.stored(W0, run(*range(50)))
        directory.removed(W0, gone(40))
        answers.append((directory.match(prompt(*range(50))), directory.held_keys(W0)))
    assert answers[0] == answers[1] == answers[2]


# -- the age of events -----------------------------------------------------------------------------


def lasts_ms(directory: Directory, now: float = 0.0) -> float:
    """How long a prediction with a TTL of 100 ms counts."""
    directory.clear(W0)
    directory.predict(W0, prompt(1), now=Instant(now), ttl_ms=100.0)
    low, high = 0.0, 1e6
    while high - low > 0.01:
        middle = (low + high) / 2
        directory.clear(W0)
        directory.predict(W0, prompt(1), now=Instant(now), ttl_ms=100.0)
        directory.expire(Instant(now + middle))
        low, high = (middle, high) if directory.predicted_count(W0) else (low, middle)
    directory.clear(W0)
    return round(high, 1)


def test_predictions_outlast_events_that_come_late() -> None:
    directory = directory_of(W0)
    assert lasts_ms(directory) == 100.0
    directory.note_event_age(W0, 3_000.0)
    assert lasts_ms(directory) == 3_100.0


def test_an_event_age_rises_at_once_and_falls_by_a_tenth_a_batch() -> None:
    directory = directory_of(W0)
    directory.note_event_age(W0, 50.0)
    directory.note_event_age(W0, 1_000.0)
    assert lasts_ms(directory) == 1_100.0
    directory.note_event_age(W0, 0.0)
    assert lasts_ms(directory) == 1_000.0
    directory.note_event_age(W0, 0.0)
    assert lasts_ms(directory) == 910.0


def test_an_event_age_stays_within_zero_and_two_minutes() -> None:
    directory = directory_of(W0)
    directory.note_event_age(W0, 1e12)
    assert lasts_ms(directory) == MAX_EVENT_AGE_MS + 100.0
    directory.note_event_age(W0, 20.0)
    assert lasts_ms(directory) == 120.0, "the assumed age gives way to the first that is measured"
    directory.note_event_age(W0, -1e12)
    assert lasts_ms(directory) == 118.0, "a wall clock that jumped back counts as no age"
    directory.note_event_age(W0, float("nan"))
    assert lasts_ms(directory) == 116.2


def test_predictions_of_one_worker_end_in_order_also_when_its_events_get_faster() -> None:
    directory = directory_of(W0)
    directory.note_event_age(W0, 1_000.0)
    directory.predict(W0, prompt(1), now=T0, ttl_ms=100.0)
    for _ in range(100):
        directory.note_event_age(W0, 0.0)
    directory.predict(W0, prompt(2), now=Instant(1.0), ttl_ms=100.0)
    directory.expire(Instant(1_099.0))
    assert directory.predicted_count(W0) == 2
    directory.expire(Instant(1_100.0))
    assert directory.predicted_count(W0) == 0


def test_predictions_are_bounded_expire_and_can_be_taken_back() -> None:
    directory = directory_of(W0, max_predicted=4)
    directory.predict(W0, prompt(1, 2), now=T0, ttl_ms=100.0)
    assert directory.match(prompt(1, 2, 3)).expected == [2]
    assert directory.match(prompt(1, 2, 3)).resident == [0]
    directory.predict(W0, prompt(5, 6, 7), now=T0, ttl_ms=100.0)
    assert directory.predicted_count(W0) == 3
    directory.unpredict(W0, prompt(5, 6, 7))
    assert directory.block_count() == 0
    directory.predict(W0, prompt(1), now=T0, ttl_ms=100.0)
    directory.expire(Instant(100.0))
    assert directory.match(prompt(1)).expected == [0]


def test_what_came_and_went_is_no_longer_expected() -> None:
    """A prediction has done its work when the blocks come; it must not outlive their eviction."""
    directory = directory_of(W0)
    directory.predict(W0, prompt(1, 2), now=T0, ttl_ms=100.0)
    directory.stored(W0, run(1, 2))
    directory.stored(W0, run(1, 2, tier=Tier.HOST))
    directory.removed(W0, gone(1, 2))
    assert directory.match(prompt(1, 2)).expected == [2], "the host still has both"
    directory.removed(W0, gone(2, tier=Tier.HOST))
    assert directory.match(prompt(1, 2)).expected == [1]
    assert directory.predicted_count(W0) == 1


def test_c22_an_untrusted_worker_matches_nothing_until_it_is_trusted_again() -> None:
    directory = directory_of(W0, W1)
    for worker in (W0, W1):
        directory.stored(worker, run(1))
        directory.predict(worker, prompt(1, 2), now=T0, ttl_ms=100.0)
    directory.trust(W0, False)
    match = directory.match(prompt(1, 2))
    assert (match.device, match.resident, match.expected) == ([0, 1], [0, 1], [0, 2])
    directory.trust(W0, True)
    assert directory.match(prompt(1, 2)).expected == [2, 2]


def test_what_we_sent_is_expected_of_a_worker_that_has_told_nothing_yet() -> None:
    directory = directory_of(W0)
    directory.trust(W0, False)
    directory.predict(W0, prompt(1, 2), now=T0, ttl_ms=100.0)
    assert directory.match(prompt(1, 2)).expected == [2]
    directory.stored(W0, run(1))
    assert directory.match(prompt(1, 2)).expected == [0]


# -- digests ---------------------------------------------------------------------------------------

SIXTEEN = namespace(block_tokens=16)


def long_prompt(tokens: int = 4_096) -> KeyChain:
    return chain(SIXTEEN, as_tokens(range(tokens)))


def digest_directory() -> Directory:
    directory = Directory(max_blocks=100_000)
    directory.admit_namespace(SIXTEEN)
    directory.join(W0, block_tokens=16)
    return directory


def keys_at(*depths: int) -> list[BlockKey]:
    return [key for tokens, key in long_prompt().checkpoints() if tokens in depths]


def expected(directory: Directory, tokens: int = 4_096) -> int:
    return 16 * directory.match(long_prompt(tokens)).expected[0]


def test_a_reported_checkpoint_extends_what_is_expected() -> None:
    directory = digest_directory()
    directory.report(W0, keys_at(256, 1024), is_complete=False, taken_at=Instant(10.0))
    assert expected(directory) == 1_024
    assert expected(directory, 300) == 256
    assert directory.match(long_prompt()).resident == [0], "a digest is no proof"


def test_a_checkpoint_that_a_complete_report_lacks_ends_the_prefix() -> None:
    directory = digest_directory()
    directory.predict(W0, long_prompt(), now=T0, ttl_ms=1e9)
    directory.report(W0, keys_at(256), is_complete=True, taken_at=Instant(10.0))
    assert expected(directory) == 256
    directory.report(W0, [], is_complete=True, taken_at=Instant(11.0))
    assert expected(directory) == 0


def test_a_report_that_is_not_complete_takes_nothing_away() -> None:
    directory = digest_directory()
    directory.predict(W0, long_prompt(), now=T0, ttl_ms=1e9)
    directory.report(W0, [], is_complete=False, taken_at=Instant(10.0))
    assert expected(directory) == 4_096


def test_what_was_routed_after_the_report_was_made_is_still_expected() -> None:
    directory = digest_directory()
    directory.report(W0, [], is_complete=True, taken_at=Instant(10.0))
    directory.predict(W0, long_prompt(1_100), now=Instant(11.0), ttl_ms=1e9)
    assert expected(directory) == 1_088
    directory.report(W0, [], is_complete=True, taken_at=Instant(12.0))
    assert expected(directory) == 0


def test_a_report_never_takes_away_what_events_have_shown() -> None:
    directory = digest_directory()
    tokens = as_tokens(range(512))
    directory.stored(
        W0,
        BlocksStored(hashes=array("Q", range(32)), parent=None, tokens=tokens, block_tokens=16,
                     tier=Tier.DEVICE, salt=SIXTEEN.salt),
    )  # fmt: skip
    directory.report(W0, [], is_complete=True, taken_at=Instant(10.0))
    match = directory.match(long_prompt())
    assert match.device == match.resident == match.expected == [32]


@pytest.mark.parametrize("how", ["clear", "restart"])
def test_clearing_forgets_the_digest_too(how: str) -> None:
    directory = digest_directory()
    directory.report(W0, keys_at(256), is_complete=True, taken_at=Instant(10.0))
    getattr(directory, how)(W0)
    assert expected(directory) == 0


def test_heartbeats_are_bounded_in_keys() -> None:
    directory = digest_directory()
    keys = [BlockKey(number.to_bytes(32, "big")) for number in range(4_097)]
    directory.report(W0, keys[:MAX_CHECKPOINTS_PER_HEARTBEAT], is_complete=True, taken_at=T0)
    with pytest.raises(ValueError, match="at most 4096"):
        directory.report(W0, keys, is_complete=True, taken_at=T0)
