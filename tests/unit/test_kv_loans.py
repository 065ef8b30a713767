"""What a source lends of what it has pinned."""

from __future__ import annotations

from kv_desk import LAYOUT, chain, owner
from trunkline.core.records import Instant
from trunkline.core.transfer import Grant, Reason, keys_digest
from trunkline.kv.loans import MAX_ANNOUNCED_BYTES, Loan
from trunkline.kv.records import Block, Manifest, Pins

A = owner("a")
PLACES = chain(A, 0, 3)
KEYS = b"".join(place.key for place in PLACES)


def loan(first_block: int = 0) -> Loan:
    grant = Grant(
        source="w1", source_incarnation="i1", destination="w2", destination_incarnation="i1",
        ns=A.ns, subjects=A.subjects, epochs=A.epochs, rev=0, layout=LAYOUT.digest,
        first_block=first_block, block_count=3, keys=keys_digest(KEYS), max_bytes=1_000,
        deadline_ms=1, nonce=bytes(16),
    )  # fmt: skip
    return Loan(grant, KEYS, Instant(1), "w2")


def pins(digests_a_block: int, reason: Reason | None = None) -> Pins:
    blocks = [
        Block(
            manifest=Manifest(
                place=place, owner=A, generation=1, layout_digest=LAYOUT.digest,
                chunk_bytes=LAYOUT.chunk_bytes, digests=(bytes(16),) * digests_a_block,
                size_bytes=LAYOUT.block_bytes,
            ),
            data=memoryview(b""),
        )
        for place in PLACES
    ]  # fmt: skip
    return Pins(token=b"t", blocks=tuple(blocks), reason=reason)


def test_all_that_is_pinned_is_lent_and_the_rest_keeps_its_reason() -> None:
    lent = loan()
    lent.take(pins(4, Reason.MISS))
    assert (len(lent.blocks), lent.rest, lent.token) == (3, Reason.MISS, b"t")


def test_no_more_digests_are_lent_than_go_into_one_answer() -> None:
    half = MAX_ANNOUNCED_BYTES // 2 // 16
    for digests, count, rest in ((half, 2, Reason.BUSY), (half + 1, 1, Reason.BUSY), (9, 3, None)):
        lent = loan()
        lent.take(pins(digests))
        assert (len(lent.blocks), lent.rest) == (count, rest)


def test_a_block_that_is_not_where_the_grant_numbers_it_is_not_lent() -> None:
    lent = loan(first_block=1)
    lent.take(pins(4))
    assert (lent.blocks, lent.rest) == ([], Reason.CHAIN)
