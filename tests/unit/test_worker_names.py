"""Blocks of the simulated worker are called what the gateway calls them."""

from __future__ import annotations

import pytest

from trunkline.core.transfer import KV_KEY_BYTES, kv_chain
from trunkline.worker.blocks import Terms, zones_of
from trunkline.worker.names import name_blocks
from trunkline.worker.requests import Region
from worker_tenants import BLOCK, tokens

PROMPT = tokens(5 * BLOCK + 7)


def _named(salt: str | None, *regions: Region, length: int = len(PROMPT)) -> list[bytes]:
    names: list[bytes] = []
    zones = zones_of(salt, Terms(regions=regions), len(PROMPT) // BLOCK)
    name_blocks(names, PROMPT[:length], zones, BLOCK)
    return names


def _chain(salt: str, first: int, last: int, parent: bytes | None = None) -> list[bytes]:
    packed = kv_chain(salt, PROMPT[first * BLOCK : last * BLOCK], BLOCK, parent)
    return [packed[at : at + KV_KEY_BYTES] for at in range(0, len(packed), KV_KEY_BYTES)]


def test_a_prompt_has_the_keys_of_its_salt() -> None:
    assert _named("a") == _chain("a", 0, 5)


def test_a_zone_goes_on_from_the_one_before_under_its_own_salt() -> None:
    named = _named("a", Region(blocks=2, salt="p"), Region(blocks=1, salt="q"))
    shared = _chain("p", 0, 2)
    shared += _chain("q", 2, 3, shared[-1])
    assert named == shared + _chain("a", 3, 5, shared[-1])


def test_regions_that_are_longer_than_the_prompt_leave_nothing_to_its_own_salt() -> None:
    assert _named("a", Region(blocks=9, salt="p")) == _chain("p", 0, 5)


@pytest.mark.parametrize("salt", ["a", None])
def test_naming_goes_on_where_it_stopped(salt: str | None) -> None:
    regions = (Region(blocks=2, salt="p"),) if salt else ()
    zones = zones_of(salt, Terms(regions=regions), len(PROMPT) // BLOCK)
    names: list[bytes] = []
    for length in range(len(PROMPT) + 1):
        name_blocks(names, PROMPT[:length], zones, BLOCK)
        assert len(names) == length // BLOCK
    assert names == _named(salt, *regions)


def test_no_salt_leads_to_the_blocks_of_a_prompt_without_one() -> None:
    unsalted = _named(None)
    assert len(set(unsalted)) == 5
    assert not set(unsalted) & set(_named("-"))
