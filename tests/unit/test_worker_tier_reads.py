"""What the simulated worker takes from its store is looked at once more; quotas have a bound."""

from __future__ import annotations

from array import array
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from trunkline.kv.records import Kept, Owner, Pins
from trunkline.kv.shares import MAX_SHARES
from trunkline.worker import fence
from trunkline.worker.blocks import KvSequence, Terms
from trunkline.worker.tiers import Found, place_of
from worker_tenants import BLOCK, BLOCK_BYTES, EPOCHS, NS, SUBJECTS, Store, ticket, tokens

PROMPT = tokens(4 * BLOCK + 6)


@pytest.fixture(name="store")
def a_store() -> Store:
    store = Store(capacity=8, host=32)
    store.lease()
    return store


def test_bytes_of_another_block_are_not_loaded_when_a_lease_ran_out_in_between(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process stood still between what was found and its copy: other blocks lie there now."""
    store.run(PROMPT, ticket())
    store.crowd_out()
    found = store.behind.found

    @contextmanager
    def and_stood_still(sequence: KvSequence, first: int, limit: int) -> Generator[Found]:
        with found(sequence, first, limit) as run:
            assert len(run.blocks) == 4
            store.boot_ms += 60_000
            store.lease()
            store.behind.reset()  # as if all of it had given way
            for start in range(1_000, 1_000 + 8 * 200, 200):
                _fill(store, tokens(4 * BLOCK, first=start))
            yield run

    free = store.cache.places.free_count
    with monkeypatch.context() as patched:
        patched.setattr(store.behind, "found", and_stood_still)
        assert store.run(PROMPT, ticket()) == 0
    assert store.refused() == {fence.Reason.GEN: 1}
    assert store.cache.places.free_count == free
    assert store.run(PROMPT, ticket()) == 4 * BLOCK, "its own, which it computed"


def _fill(store: Store, prompt: array[int]) -> None:
    """Blocks of a pull, say: into host memory and not by way of the device."""
    sequence = store.cache.sketch(prompt, "salt", Terms(ticket=ticket()))
    owner = Owner(ns=NS, subjects=SUBJECTS, epochs=EPOCHS, domain="")
    for index in range(len(sequence.hashes)):
        kept = store.behind.store.put(
            place_of(sequence, index), owner, bytes([index]) * BLOCK_BYTES
        )
        assert isinstance(kept, Kept)


def test_a_block_of_another_chain_is_seen_also_where_the_run_ends_early(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.run(PROMPT[: 2 * BLOCK + 1], ticket())
    store.crowd_out()
    pin = store.behind.store.pin

    def mixed_up(*args: Any, **kwargs: Any) -> Pins:
        pins = pin(*args, **kwargs)
        return replace(pins, blocks=pins.blocks[::-1])

    monkeypatch.setattr(store.behind.store, "pin", mixed_up)
    with store.behind.found(
        store.cache.sketch(PROMPT, "salt", Terms(ticket=ticket())), 0, 4
    ) as run:
        assert (run.blocks, run.refused) == ((), fence.Reason.CHAIN)


def test_beyond_the_bound_of_quotas_the_newest_tenant_has_one_and_the_oldest_has_none() -> None:
    store = Store(capacity=8, host=32)
    names = [f"{number:032x}" for number in range(MAX_SHARES + 1)]
    for name in names:
        store.behind.set_quota(ticket(tenant=name, cap=2))
    quotas = store.behind.store._catalogue.host._quotas
    assert list(quotas) == names[1:]
    assert list(store.behind._shares.told) == names[1:]
    store.behind.set_quota(ticket(tenant=names[0], cap=2))
    assert list(quotas)[-1] == names[0], "it asked again"


def test_a_quota_that_the_store_refused_is_told_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(store.behind.store, "set_quota", lambda *_args, **_kwargs: False)
        store.behind.set_quota(ticket(cap=2))
    store.behind.set_quota(ticket(cap=2))
    assert list(store.behind.store._catalogue.host._quotas) == [ticket().tenant]
