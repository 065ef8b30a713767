"""What the data plane is told of the registry, and what an authority keeps to itself."""

from __future__ import annotations

import random

from registry_bench import WALL_MS, an_id

from trunkline.authority import Authority, publics_in_use
from trunkline.control.book import Book, PublicPrefix
from trunkline.core.identity import ModelIdentity
from trunkline.core.publics import MAX_PREFIXES
from trunkline.observe import EventLog

LOG = EventLog("test-authority")


def registered(number: int, not_after_ms: int) -> PublicPrefix:
    return PublicPrefix(
        public_id=an_id(number),
        name=f"p{number}",
        owner=an_id(1),
        proposer="a",
        approvers=("b", "c"),
        tokens=random.Random(number).randbytes(64),
        token_digest=bytes(32),
        block_tokens=16,
        model_id="m",
        not_after_ms=not_after_ms,
        reason="r",
    )


def test_public_prefixes_that_ran_out_leave_the_bound_of_the_data_plane_to_others() -> None:
    over = {an_id(n): registered(n, WALL_MS) for n in range(MAX_PREFIXES)}
    good = {an_id(n): registered(n, WALL_MS + 1) for n in range(1_000, 1_000 + MAX_PREFIXES)}
    book = Book(publics=over | good)
    found = publics_in_use(book, ModelIdentity(model_id="m", block_tokens=1), WALL_MS, LOG)
    assert {prefix.public_id for prefix in found} == set(good)


def test_the_root_key_is_in_no_text_of_an_authority() -> None:
    held = Authority(
        tenancy=None,  # type: ignore[arg-type]  # only how it is shown matters here
        authenticator=None,  # type: ignore[arg-type]  # so too
        root_key=b"marked-root-key",
        tenants=None,
    )
    assert "marked" not in repr(held)
