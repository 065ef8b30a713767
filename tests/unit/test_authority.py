"""What the data plane is told of the registry, and what an authority keeps to itself."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from pathlib import Path

import pytest
from registry_bench import ORG, TENANT, an_id, intent, raised, run

from hand_clock import WALL_MS
from trunkline.adapters.clock import SystemClock
from trunkline.authority import Authority, open_authority, publics_in_use
from trunkline.config import AuthConfig, Config
from trunkline.control import ledger as ledger_module
from trunkline.control.book import Book, PublicPrefix
from trunkline.control.changes import TenantRemoved
from trunkline.control.ledger import Ledger
from trunkline.core.identity import ModelIdentity
from trunkline.core.publics import MAX_PREFIXES
from trunkline.errors import RegistryBroken
from trunkline.gateway.tenant_counts import TenantCount
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


def test_what_the_data_plane_does_not_take_is_left_out_and_the_rest_is_shared(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wrong = dataclasses.replace(registered(5, WALL_MS + 1), approvers=("b", "b"))
    good = {an_id(n): registered(n, WALL_MS + 1) for n in range(10, 11 + MAX_PREFIXES)}
    book = Book(publics={an_id(5): wrong, **good})
    found = publics_in_use(book, ModelIdentity(model_id="m", block_tokens=1), WALL_MS, LOG)
    assert {prefix.public_id for prefix in found} == set(good) - {an_id(10 + MAX_PREFIXES)}
    assert caplog.text.count("public.left_out") == 2


def test_the_root_key_is_in_no_text_of_an_authority() -> None:
    held = Authority(
        tenancy=None,  # type: ignore[arg-type]  # only how it is shown matters here
        authenticator=None,  # type: ignore[arg-type]  # so too
        root_key=b"marked-root-key",
        tenants=None,
        holdings=None,
    )
    assert "marked" not in repr(held)


async def lived_on(folder: Path, error: Exception, monkeypatch: pytest.MonkeyPatch) -> int:
    """How often the ledger was called in the life of an authority where it always fails."""
    calls = 0
    has_called = asyncio.Event()

    async def tick(_: Ledger) -> None:
        nonlocal calls
        calls += 1
        if calls >= 2:
            has_called.set()
        raise error

    monkeypatch.setattr(ledger_module, "BEAT_S", 0.001)
    monkeypatch.setattr(Ledger, "tick", tick)
    config = Config(auth=AuthConfig(auth="keys", state_dir=str(folder)))
    async with asyncio.timeout(60), open_authority(config, SystemClock(), b"", LOG):
        await has_called.wait()
    return calls


def test_a_registry_that_is_broken_is_told_of_and_the_ledger_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert run(lived_on(tmp_path, RegistryBroken("revision 3"), monkeypatch)) >= 2
    assert "ledger.behind" in caplog.text


def test_a_task_in_the_background_that_fails_ends_the_authority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ExceptionGroup, match="unhandled errors"):
        run(lived_on(tmp_path, ZeroDivisionError("a bug"), monkeypatch))


def test_what_was_counted_of_a_tenant_goes_with_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = Config(auth=AuthConfig(auth="keys", state_dir=str(tmp_path)))
        async with open_authority(config, SystemClock(), b"", LOG) as authority:
            assert authority.tenants is not None
            counts, registry = authority.tenants.allowance.counts, authority.tenants.registry
            for change in (ORG, TENANT):
                await registry.commit(change, intent())
            counts.sent(TENANT.tenant, 100)
            counts.sent("another", 100)
            for change in (raised(1, is_revoked=True), TenantRemoved(tenant=TENANT.tenant)):
                assert counts.of(TENANT.tenant) == TenantCount(requests=1, prompt_tokens=100)
                await registry.commit(change, intent())
            assert counts.of(TENANT.tenant) == TenantCount()
            assert len(counts) == 1

    run(scenario())
