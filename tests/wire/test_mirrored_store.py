"""The copy of the shared log that each gateway keeps, and what it brings back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from nats_desk import NatsServer, nats_server, opened, place
from trunkline.adapters.nats_bucket import NatsBucket
from trunkline.adapters.nats_store import NatsStore
from trunkline.adapters.sqlite_store import SqliteStore
from trunkline.control.mirrored_store import MirroredStore
from trunkline.ports.store import StoreDown, StoreForked


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    with nats_server(tmp_path / "nats") as made:
        yield made


async def mirrored(server: NatsServer, folder: Path) -> tuple[MirroredStore, SqliteStore]:
    folder.mkdir(exist_ok=True)  # noqa: ASYNC240  # a test
    copy = await SqliteStore.open(folder / "registry.db")
    return MirroredStore(await opened(server), copy), copy


def test_a_gateway_starts_by_its_copy_and_writes_nothing_by_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        shared = NatsStore(NatsBucket(place([NatsServer(tmp_path / "nats")])))
        copy = await SqliteStore.open(tmp_path / "registry.db")
        await copy.append(0, b"a")
        store = MirroredStore(shared, copy)
        assert (await store.read(0, 5), await store.head()) == ([(1, b"a")], 1)
        with pytest.raises(StoreDown, match="not connected"):
            await store.sync()
        with pytest.raises(StoreDown, match="not reached"):
            await store.append(1, b"b")
        assert not store.is_joined
        await store.close()

    asyncio.run(scenario())


def test_what_one_gateway_wrote_is_in_the_copy_of_the_other(
    server: NatsServer, tmp_path: Path
) -> None:
    async def scenario() -> None:
        one, _ = await mirrored(server, tmp_path / "one")
        other, copy = await mirrored(server, tmp_path / "other")
        await one.sync()
        await other.sync()
        for rev in range(5):
            await one.append(rev, b"record %d" % rev)
        assert len(await other.read(0, 3)) == 3
        await other.sync()
        assert await copy.read(3, 5) == [(4, b"record 3"), (5, b"record 4")]
        assert await other.high_water() == 5
        await one.close()
        await other.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("is_whole", [True, False], ids=["all its data", "an old backup"])
def test_lost_data_is_put_in_again_from_the_copy_and_owes_a_mend(
    server: NatsServer, tmp_path: Path, is_whole: bool
) -> None:
    async def scenario() -> None:
        store, _ = await mirrored(server, tmp_path / "state")
        await store.sync()
        await store.append(0, b"a")
        server.stop()
        server.saved(tmp_path / "backup")
        server.start()
        await synced(store)
        assert not store.owes_mend, "a restart loses nothing"
        await store.append(1, b"b")
        await store.append(2, b"c")
        server.restored(None if is_whole else tmp_path / "backup")
        await synced(store)
        assert store.owes_mend
        assert await store.high_water() == 4
        fresh = await opened(server)
        assert [record for _, record in await fresh.read(0, 9)] == [b"a", b"b", b"c"]
        await store.close()
        await fresh.close()

    asyncio.run(scenario())


def test_a_gateway_that_saw_the_log_before_owes_a_mend_also_when_another_put_it_in_again(
    server: NatsServer, tmp_path: Path
) -> None:
    async def scenario() -> None:
        one, _ = await mirrored(server, tmp_path / "one")
        other, _ = await mirrored(server, tmp_path / "other")
        await one.sync()
        for rev in range(3):
            await one.append(rev, b"record %d" % rev)
        await other.sync()
        server.stop()
        server.saved(tmp_path / "backup")
        server.start()
        bucket = NatsBucket(place([server]))
        await bucket.connect()
        for _ in range(9):  # holders beat meanwhile
            await bucket.put("holder.x", b"")
        await synced(one)
        server.restored(None)
        await synced(one)
        await synced(other)
        assert (one.owes_mend, other.owes_mend) == (True, True)
        for each in (one, other, bucket):
            await each.close()

    asyncio.run(scenario())


def test_copies_that_went_different_ways_are_not_joined(server: NatsServer, tmp_path: Path) -> None:
    async def scenario() -> None:
        one, _ = await mirrored(server, tmp_path / "one")
        await one.sync()
        await one.append(0, b"a")
        other, copy = await mirrored(server, tmp_path / "other")
        await copy.append(0, b"another fleet's")
        with pytest.raises(StoreForked, match="revision 1"):
            await other.sync()
        assert not other.is_joined
        await one.close()
        await other.close()

    asyncio.run(scenario())


async def synced(store: MirroredStore) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                await store.sync()
            except StoreForked:
                raise
            except StoreDown:
                await asyncio.sleep(0.05)
            else:
                return
