"""One state folder and those who open it: who may touch what, and what a second one finds."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from trunkline.adapters.audit_files import log_lines, read_checkpoints
from trunkline.adapters.clock import SystemClock
from trunkline.adapters.signing import Ed25519Check
from trunkline.authority import Authority, Tenants, open_authority
from trunkline.config import AuthConfig, Config
from trunkline.control.changes import Intent, OrgAdded
from trunkline.core.audit import verify
from trunkline.errors import ConfigError
from trunkline.observe import EventLog


@asynccontextmanager
async def opened(folder: Path) -> AsyncGenerator[Tenants]:
    """What `trunkline serve` opens of the state folder."""
    config = Config(auth=AuthConfig(auth="keys", state_dir=str(folder)))
    authority: Authority
    async with open_authority(config, SystemClock(), b"", EventLog("state")) as authority:
        assert authority.tenants is not None
        yield authority.tenants


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith("registry.db-")
    }


async def add_org(tenants: Tenants, number: int) -> None:
    change = OrgAdded(org=f"{number:032x}", name=f"org-{number}")
    intent = Intent(actor="operator", auth_method="key", reason="test", wall_ms=1)
    await tenants.registry.commit(change, intent)
    assert await tenants.administration._parts.ledger.catch_up()


def run(play: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(_of(play), 120))


async def _of(play: Callable[[], Awaitable[None]]) -> None:
    await play()


@pytest.mark.parametrize("lost", ["audit-copy", "audit", "audit-copy/lock", "audit/lock"])
def test_a_second_gateway_on_a_state_folder_touches_nothing(tmp_path: Path, lost: str) -> None:
    state = tmp_path / "state"

    async def play() -> None:
        async with opened(state) as tenants:
            await add_org(tenants, 1)
            target = state / lost
            shutil.rmtree(target) if target.is_dir() else target.unlink()
            before = files_of(state)
            with pytest.raises(ConfigError, match="another process writes to"):
                async with opened(state):
                    raise AssertionError("two own one registry")
            assert files_of(state) == before
            await add_org(tenants, 2)
            await tenants.audit.tick()
            assert (state / lost).exists()
            assert tenants.audit.health().sinks_up == 2

    run(play)
    check = Ed25519Check.from_file(state / "secrets" / "audit-sign.key.pub")
    kept = read_checkpoints(state / "audit-copy-checkpoints.jsonl")
    for name in ("audit", "audit-copy"):
        found = verify(log_lines(state / name), checkpoints=kept, is_signed=check.is_signed)
        assert found.fault is None, name
        assert found.head.seq >= 2


def test_a_copy_that_somebody_wrote_into_is_set_aside_at_the_next_start(tmp_path: Path) -> None:
    state = tmp_path / "state"

    async def play() -> None:
        async with opened(state) as tenants:
            await add_org(tenants, 1)
        (segment,) = (state / "audit-copy").glob("audit-*.jsonl")
        segment.write_bytes(segment.read_bytes() + b"{}\n")
        async with opened(state) as tenants:
            health = tenants.audit.health()
            assert (health.sinks_up, health.trouble) == (2, "")
            await add_org(tenants, 2)

    run(play)
    assert list(log_lines(state / "audit")) == list(log_lines(state / "audit-copy"))
    assert (state / "audit-copy" / "diverged-1").is_dir()


def test_a_log_that_another_key_signed_is_not_called_forged(tmp_path: Path) -> None:
    state = tmp_path / "state"

    async def play() -> None:
        async with opened(state) as tenants:
            await add_org(tenants, 1)
        for path in (state / "secrets").glob("audit-sign.key*"):
            path.unlink()
        async with opened(state) as tenants:
            first, _ = await tenants.administration._parts.reader.verify()
            assert first.found is not None
            assert first.found.fault is not None
            assert "signed by another key" in first.found.fault.reason

    run(play)
