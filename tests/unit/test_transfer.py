"""kv keys, grants and the order of arriving chunks: what a pull is allowed and judged by."""

from __future__ import annotations

import base64
from array import array
from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trunkline.core.records import Instant
from trunkline.core.transfer import (
    MAX_GRANT_BLOCKS,
    MAX_GRANT_BYTES,
    MAX_GRANT_LIFE_MS,
    Arrival,
    Grant,
    Lesson,
    Reason,
    UsedGrants,
    hash_scheme,
    keys_digest,
    kv_chain,
    read_grant,
    seal,
)

KEY = bytes(range(32))
TOKENS = array("I", range(100))
NOW_MS = 1_700_000_000_000


def grant(**changes: object) -> Grant:
    plain = Grant(
        source="w1",
        source_incarnation="a1",
        destination="w2",
        destination_incarnation="b2",
        ns=b"n" * 16,
        subjects=("fleet", "tenant/t1"),
        epochs=(0, 7),
        rev=12,
        layout=b"l" * 16,
        first_block=3,
        block_count=2,
        keys=keys_digest(b"k" * 64),
        max_bytes=1 << 20,
        deadline_ms=NOW_MS + 5_000,
        nonce=b"1" * 16,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]  # any field


# -- keys ------------------------------------------------------------------------------------------


def test_kv_keys_depend_on_salt_tokens_and_everything_before() -> None:
    keys = kv_chain("salt", TOKENS, 16)
    assert len(keys) == 6 * 32
    other_first = array("I", [999, *TOKENS[1:]])
    for other in (kv_chain("other", TOKENS, 16), kv_chain("salt", other_first, 16)):
        assert not {keys[i : i + 32] for i in range(0, 192, 32)} & {
            other[i : i + 32] for i in range(0, 192, 32)
        }


def test_a_chain_goes_on_after_its_parent_as_if_it_had_been_made_at_once() -> None:
    whole = kv_chain("salt", TOKENS, 16)
    head = kv_chain("salt", TOKENS[:32], 16)
    assert head + kv_chain("salt", TOKENS[32:], 16, head[-32:]) == whole


def test_a_private_zone_goes_on_after_a_public_one_and_depends_on_it() -> None:
    public = kv_chain("public", TOKENS[:32], 16)
    private = kv_chain("own", TOKENS[32:], 16, public[-32:])
    elsewhere = kv_chain("own", TOKENS[32:], 16)
    assert private != elsewhere


def test_a_chain_without_salt_would_be_everybodys_and_is_refused() -> None:
    with pytest.raises(ValueError, match="salt"):
        kv_chain("", TOKENS, 16)


def test_d26_block_sizes_have_schemes_of_their_own() -> None:
    assert hash_scheme(16) != hash_scheme(32)


# -- grants ----------------------------------------------------------------------------------------


def test_a_grant_reads_back_as_it_was_signed() -> None:
    assert read_grant(grant().signed(KEY), KEY) == grant()


@settings(max_examples=50)
@given(
    subjects=st.lists(st.text(max_size=20), max_size=8),
    numbers=st.lists(st.integers(0, 2**64 - 1), min_size=12, max_size=12),
)
def test_any_grant_reads_back(subjects: list[str], numbers: list[int]) -> None:
    given_one = grant(
        subjects=tuple(subjects),
        epochs=tuple(numbers[: len(subjects)]),
        rev=numbers[8],
        first_block=numbers[9],
        max_bytes=numbers[10],
        deadline_ms=numbers[11],
    )
    assert read_grant(given_one.signed(KEY), KEY) == given_one


def test_d09_no_two_grants_that_differ_in_one_field_are_signed_alike() -> None:
    changes: dict[str, object] = {
        **dict.fromkeys(("source", "source_incarnation"), "other"),
        **dict.fromkeys(("destination", "destination_incarnation"), "other"),
        **dict.fromkeys(("ns", "layout", "nonce"), b"x" * 16),
        **dict.fromkeys(("rev", "first_block", "block_count", "max_bytes", "deadline_ms"), 99),
        "keys": b"x" * 32,
        "subjects": ("fleet", "tenant/t2"),
        "epochs": (0, 8),
    }
    assert set(changes) == {one.name for one in fields(Grant)}
    texts = {grant(**{name: value}).signed(KEY) for name, value in changes.items()}
    assert len(texts | {grant().signed(KEY)}) == len(changes) + 1


def test_names_do_not_run_into_each_other() -> None:
    one, other = (
        grant(source="ab", source_incarnation="c"),
        grant(source="a", source_incarnation="bc"),
    )
    assert one.signed(KEY) != other.signed(KEY)


def test_every_flipped_bit_and_every_cut_makes_a_grant_worthless() -> None:
    text = grant().signed(KEY)
    raw = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    for at in range(len(raw)):
        damaged = raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]
        assert read_grant(base64.urlsafe_b64encode(damaged).decode().rstrip("="), KEY) is None
        cut = base64.urlsafe_b64encode(raw[:at]).decode().rstrip("=")
        assert read_grant(cut, KEY) is None


def test_a_grant_of_another_key_or_purpose_is_worthless() -> None:
    assert read_grant(grant().signed(KEY), b"x" * 32) is None
    assert seal(KEY, b"grant", b"data") != seal(KEY, b"manifest", b"data")


@pytest.mark.parametrize("text", ["", "=", "!!!!", "A" * 20_000, "é", "AAAA AAAA", "\0" * 40])
def test_what_is_no_grant_is_none_and_costs_nothing(text: str) -> None:
    assert read_grant(text, KEY) is None


def test_signed_rubbish_is_no_grant_either() -> None:
    for body in (b"", b"tl-kv-grant-1", b"tl-kv-grant-1\x01", b"tl-kv-grant-1" + b"\xff" * 40):
        token = body + seal(KEY, b"grant", body)
        assert read_grant(base64.urlsafe_b64encode(token).decode().rstrip("="), KEY) is None


def test_the_largest_grant_fits_and_a_larger_one_is_refused() -> None:
    most = tuple(f"tenant/{number}" + "x" * 500 for number in range(8))
    assert len(grant(subjects=most, epochs=(1,) * 8).signed(KEY)) < MAX_GRANT_BYTES
    with pytest.raises(ValueError, match="at most 8192"):
        grant(subjects=tuple("y" * 1_000 for _ in range(8)), epochs=(1,) * 8).signed(KEY)


@pytest.mark.parametrize(
    "change",
    [
        {"source": ""},
        {"destination": "x" * 257},
        {"ns": b"short"},
        {"keys": b""},
        {"epochs": (1,)},
        {"block_count": 0},
        {"block_count": MAX_GRANT_BLOCKS + 1},
        {"rev": -1},
        {"max_bytes": 2**64},
    ],
)
def test_what_no_grant_can_be_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        grant(**change)


def test_a_grant_is_for_exactly_its_keys() -> None:
    assert grant().covers(b"k" * 64)
    assert not grant().covers(b"k" * 32)
    assert not grant().covers(b"k" * 63 + b"j")


def test_a_grant_is_used_once_until_it_is_over() -> None:
    used = UsedGrants()
    assert used.use(grant(), NOW_MS) is None
    assert used.use(grant(), NOW_MS + 1) is Reason.GRANT
    assert used.use(grant(), NOW_MS + 5_000) is Reason.GRANT
    assert len(used) == 0


def test_a_grant_that_ends_too_far_ahead_is_refused() -> None:
    used = UsedGrants()
    far = grant(deadline_ms=NOW_MS + MAX_GRANT_LIFE_MS + 1)
    assert used.use(far, NOW_MS) is Reason.GRANT
    assert used.use(grant(deadline_ms=NOW_MS + MAX_GRANT_LIFE_MS), NOW_MS) is None


def test_used_grants_are_bounded_and_the_bound_refuses_instead_of_forgetting() -> None:
    used = UsedGrants(2)
    for number in range(2):
        assert used.use(grant(nonce=bytes([number]) * 16), NOW_MS) is None
    assert used.use(grant(nonce=b"z" * 16), NOW_MS) is Reason.BUSY
    assert used.use(grant(nonce=bytes([0]) * 16), NOW_MS) is Reason.GRANT
    later = grant(nonce=b"z" * 16, deadline_ms=NOW_MS + 9_000)
    assert used.use(later, NOW_MS + 5_000) is None
    assert len(used) == 1


@settings(max_examples=100)
@given(
    uses=st.lists(st.tuples(st.integers(0, 5), st.integers(-2, 8), st.integers(0, 3)), max_size=40)
)
def test_used_grants_are_as_a_list_of_all_uses_says(uses: list[tuple[int, int, int]]) -> None:
    """(nonce, seconds until it ends, seconds that went by before)."""
    used = UsedGrants(3)
    naive: list[tuple[int, int]] = []
    now_ms = NOW_MS
    for nonce, life_s, pause_s in uses:
        now_ms += 1_000 * pause_s
        ends_ms = now_ms + 1_000 * life_s
        naive = [one for one in naive if one[1] > now_ms]
        if life_s <= 0 or nonce in [one[0] for one in naive]:
            wanted: Reason | None = Reason.GRANT
        elif len(naive) == 3:
            wanted = Reason.BUSY
        else:
            wanted = None
            naive.append((nonce, ends_ms))
        found = used.use(grant(nonce=bytes([nonce]) * 16, deadline_ms=ends_ms), now_ms)
        assert found is wanted
        assert len(used) == len(naive)


# -- arrival ---------------------------------------------------------------------------------------


def arrival(**changes: float) -> Arrival:
    plain = {"block_count": 2, "block_bytes": 10, "chunk_bytes": 4, "stall_ms": 100.0}
    return Arrival(**{**plain, "deadline": Instant(250), "now": Instant(0), **changes})  # type: ignore[arg-type]  # by name


CHUNKS = [(0, 0, 4), (0, 4, 4), (0, 8, 2), (1, 0, 4), (1, 4, 4), (1, 8, 2)]


def test_only_whole_blocks_count() -> None:
    coming = arrival()
    seen: list[int] = []
    for chunk in CHUNKS:
        assert coming.fault(*chunk) is None
        coming.verified(Instant(0))
        seen.append(coming.whole_blocks)
    assert seen == [0, 0, 1, 1, 1, 2]
    assert coming.is_complete
    assert coming.verified_bytes == 20


@pytest.mark.parametrize("at", range(len(CHUNKS) + 1))
def test_any_other_chunk_than_the_next_is_a_fault(at: int) -> None:
    coming = arrival()
    for _ in range(at):
        coming.verified(Instant(0))
    for number, chunk in enumerate(CHUNKS):
        assert coming.fault(*chunk) is (None if number == at else Reason.PROTOCOL)
    if at < len(CHUNKS):
        block, offset, length = CHUNKS[at]
        assert coming.fault(block, offset, length + 1) is Reason.LENGTH
        assert coming.fault(block, offset, 0) is Reason.LENGTH


def test_a_chunk_has_its_time_and_the_whole_has_a_deadline() -> None:
    coming = arrival()
    assert not coming.is_late(Instant(99))
    assert coming.is_late(Instant(100))
    coming.verified(Instant(90))
    assert not coming.is_late(Instant(189))
    coming.verified(Instant(180))
    assert coming.due_at == 250
    assert coming.is_late(Instant(250))


def test_only_a_miss_removes_and_only_wrong_bytes_quarantine() -> None:
    lessons = {reason: reason.lesson for reason in Reason}
    removing = {reason for reason, lesson in lessons.items() if lesson is Lesson.REMOVE}
    assert removing == {Reason.MISS, Reason.LENGTH}
    assert {r for r, lesson in lessons.items() if lesson is Lesson.QUARANTINE} == {Reason.DIGEST}
    assert Reason.TIMEOUT.lesson is Lesson.UNKNOWN
