"""What a block is: its layout and its key, which nothing else may be taken for. Cases by number, as
in `test_kv_cases.py`.
"""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_desk import LAYOUT, SOON, Desk, chain, content, fill, manifests_at, owner, places_of
from trunkline.core.transfer import Reason, kv_chain
from trunkline.kv import Component, Layout, Manifest, Place
from trunkline.kv.disk import associated

A = owner("a")


FIELDS: list[tuple[str, object]] = [
    ("model", "m2"),
    ("adapter", "m1"),
    ("tokenizer", "t2"),
    ("rope", "r2"),
    ("dtype", "fp8"),
    ("kv_format", "paged-2"),
    ("tp_rank", 1),
    ("tp_size", 4),
    ("block_tokens", 8),
    ("chunk_bytes", 128),
    ("components", (Component(name="kv", size_bytes=256),)),
    (
        "components",
        (Component(name="kv", size_bytes=64), Component(name="index", size_bytes=192)),
    ),
]
TWO_RANKS = replace(LAYOUT, tp_size=2)


@pytest.mark.parametrize(("field", "value"), FIELDS)
def test_d15_d17_d19_a_layout_that_differs_in_anything_is_another_one(
    field: str, value: object
) -> None:
    other = replace(TWO_RANKS, **{field: value})  # type: ignore[arg-type]
    assert other.digest != TWO_RANKS.digest


def test_d15_d19_inputs_that_agree_in_their_first_bits_are_told_apart() -> None:
    # What a digest cut to 16, 32 or 64 bits would take for the same.
    for kept in (4, 8, 16):
        twins = [replace(LAYOUT, model="f" * kept + end * 48) for end in "01"]
        assert twins[0].digest != twins[1].digest


texts = st.text(max_size=6)
layouts = st.builds(
    Layout,
    model=texts,
    adapter=texts,
    tokenizer=texts,
    rope=texts,
    dtype=texts,
    kv_format=texts,
    tp_rank=st.integers(0, 1),
    tp_size=st.integers(2, 3),
    block_tokens=st.integers(1, 3),
    components=st.lists(
        st.builds(Component, name=texts, size_bytes=st.integers(1, 3)), min_size=1, max_size=3
    ).map(tuple),
    chunk_bytes=st.integers(1, 3),
)


@given(one=layouts, other=layouts)
def test_d18_no_two_different_layouts_are_written_alike(one: Layout, other: Layout) -> None:
    assert (one.digest == other.digest) is (one == other)


def test_d18_a_field_does_not_run_over_into_the_next_one() -> None:
    assert (
        replace(LAYOUT, model="org_1", adapter="2345").digest
        != replace(LAYOUT, model="org_12345", adapter="").digest
    )
    # Nor does one that contains the name of the next one.
    assert (
        replace(LAYOUT, model="1adapter2", adapter="3").digest
        != replace(LAYOUT, model="1", adapter="2adapter3").digest
    )


def test_d17_blocks_of_another_layout_are_refused_before_a_byte_is_compared() -> None:
    source = Desk(layout=replace(LAYOUT, adapter="lora@2"))
    desk = Desk()
    places = chain(A, 0, 1)
    source.put(places, A)
    staging = desk.stage(places, A)
    fill(staging)
    published = desk.store.publish(staging.token, manifests_at(source.store, places, A))
    assert (published.count, published.reason) == (0, Reason.LAYOUT)


@pytest.mark.parametrize("byte", [0, 7, 8, 15, 16, 31])
def test_d35_keys_that_differ_in_one_bit_anywhere_are_different_blocks(byte: int) -> None:
    desk = Desk()
    (place,) = chain(A, 0, 1)
    desk.put([place], A)
    twin = bytearray(place.key)
    twin[byte] ^= 1
    assert desk.store.pin(A.ns, [bytes(twin)], until=SOON).reason is Reason.MISS


def test_d35_the_same_last_block_behind_another_prefix_is_another_block() -> None:
    desk = Desk()
    one, other = chain(A, 0, 3), chain(A, 50, 3)
    desk.put(one, A)
    mixed = [*other[:2], one[2]]
    assert desk.store.put(mixed[2], A, content(mixed[2])) != Reason.CHAIN
    assert desk.hits(mixed, A) == 0
    # Nor does a run whose keys are all here, but not one behind the other.
    desk.put(other, A)
    pins = desk.pin([*other[:2], one[2]], A)
    assert (len(pins.blocks), pins.reason) == (2, Reason.CHAIN)


@given(st.lists(st.integers(0, 3), min_size=4, max_size=12), st.integers(0, 11))
def test_d35_one_other_token_anywhere_changes_every_key_from_there_on(
    tokens: list[int], position: int
) -> None:

    position %= len(tokens)
    changed = list(tokens)
    changed[position] += 1
    one = places_of(kv_chain("s", array("I", tokens), 4))
    other = places_of(kv_chain("s", array("I", changed), 4))
    for index, (left, right) in enumerate(zip(one, other, strict=True)):
        assert (left.key == right.key) is (index < position // 4)


@pytest.mark.parametrize(
    "change",
    [
        {"owner": replace(A, ns=bytes(16))},
        {"owner": replace(A, subjects=("fleet", "tenant/b"))},
        {"owner": replace(A, epochs=(0, 1))},
        {"place": Place(key=bytes(32), parent=bytes(32), index=0)},
        {"place": Place(key=b"k" * 32, parent=b"p" * 32, index=0)},
        {"place": Place(key=b"k" * 32, parent=bytes(32), index=1)},
        {"layout_digest": bytes(16)},
    ],
)
def test_a_sealed_block_is_bound_to_everything_that_says_which_one_it_is(
    change: dict[str, object],
) -> None:
    manifest = Manifest(
        place=Place(key=b"k" * 32, parent=bytes(32), index=0),
        owner=A,
        generation=1,
        layout_digest=LAYOUT.digest,
        chunk_bytes=64,
        digests=(),
        size_bytes=256,
    )
    assert associated(replace(manifest, **change)) != associated(manifest)  # type: ignore[arg-type]
    assert associated(replace(manifest, generation=2)) == associated(manifest)
