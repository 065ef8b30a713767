"""The registry's log on a real nats-server: what any store keeps to, and what it survives."""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from nats_desk import NatsServer, cluster, nats_server, opened, place
from store_machine import assert_they_agree_with_a_list
from trunkline.adapters import nats_bucket
from trunkline.adapters.nats_bucket import MAX_VALUE_BYTES, NatsBucket, checked_place
from trunkline.adapters.nats_store import NatsStore
from trunkline.adapters.sqlite_store import SqliteStore
from trunkline.control.mirrored_store import MirroredStore
from trunkline.errors import ConfigError
from trunkline.ports.store import (
    Store,
    StoreBehind,
    StoreBroken,
    StoreConflict,
    StoreDown,
)


@pytest.fixture(scope="module")
def shared_server() -> Iterator[NatsServer]:
    with tempfile.TemporaryDirectory() as folder, nats_server(Path(folder)) as server:
        yield server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    with nats_server(tmp_path / "nats") as made:
        yield made


def test_the_shared_log_and_its_copy_keep_to_what_any_store_keeps_to(
    shared_server: NatsServer,
) -> None:
    async def lasting(folder: Path) -> list[Store]:
        plain = await opened(shared_server, bucket=folder.name)
        shared = await opened(shared_server, bucket=f"{folder.name}-m")
        mirrored = MirroredStore(shared, await SqliteStore.open(folder / "registry.db"))
        await mirrored.sync()
        return [plain, mirrored]

    assert_they_agree_with_a_list(lasting, examples=10, steps=15)


def test_of_two_writers_at_one_revision_one_succeeds(server: NatsServer) -> None:
    async def scenario() -> None:
        stores = [await opened(server) for _ in range(4)]
        for rev in range(20):
            ends = await asyncio.gather(
                *(store.append(rev, b"by %d" % number) for number, store in enumerate(stores)),
                return_exceptions=True,
            )
            assert sorted(map(str, ends)) == sorted(
                [str(rev + 1), *[f"the log is at revision {rev + 1}"] * 3]
            )
        logs = [await store.read(0, 100) for store in stores]
        assert all(log == logs[0] for log in logs)
        assert [rev for rev, _ in logs[0]] == list(range(1, 21))
        for store in stores:
            await store.close()

    asyncio.run(scenario())


def test_news_are_told_to_who_listens(server: NatsServer) -> None:
    async def scenario() -> None:
        bucket = NatsBucket(place([server]))
        await bucket.connect()
        heard = asyncio.Event()
        keys: list[str] = []
        bucket.listen(keys.append)
        bucket.listen(lambda _key: heard.set())
        writer = await opened(server)
        await writer.append(0, b"a")
        async with asyncio.timeout(30):
            await heard.wait()
        assert keys == ["log.1"]
        assert await NatsStore(bucket).head() == 1
        await writer.close()
        await bucket.close()

    asyncio.run(scenario())


def test_what_is_sent_is_heard_by_all_and_not_kept(server: NatsServer) -> None:
    async def scenario() -> None:
        one, other = NatsBucket(place([server])), NatsBucket(place([server]))
        await one.send(b"lost")
        await one.connect()
        heard: asyncio.Queue[bytes] = asyncio.Queue()
        other.hear(heard.put_nowait)
        await one.send(b"lost, too")
        await other.connect()
        await one.send(b"heard")
        async with asyncio.timeout(30):
            assert await heard.get() == b"heard"
        assert await one.newest(">") is None
        await one.close()
        await other.close()

    asyncio.run(scenario())


def test_a_value_may_be_of_the_bound_and_no_longer(server: NatsServer) -> None:
    async def scenario() -> None:
        store = await opened(server)
        longest = b"x" * (MAX_VALUE_BYTES - 32)
        assert await store.append(0, longest) == 1
        with pytest.raises(StoreDown, match="at most"):
            await store.append(1, longest + b"x")
        assert await store.read(0, 5) == [(1, longest)]
        await store.close()

    asyncio.run(scenario())


def test_a_key_with_a_time_goes_and_is_kept_by_putting_it_again(server: NatsServer) -> None:
    async def scenario() -> None:
        bucket = NatsBucket(place([server]))
        await bucket.connect()
        await bucket.put("holder.gone", b"1", ttl_s=1)
        kept_at = await bucket.put("holder.kept", b"1", ttl_s=1)
        kept_at = await bucket.put("holder.kept", b"2", ttl_s=600)
        async with asyncio.timeout(60):
            while await bucket.newest("holder.gone") is not None:  # noqa: ASYNC110  # it is asked
                await asyncio.sleep(0.05)
        held = await bucket.newest("holder.kept")
        assert held is not None
        assert (held.value, held.seq) == (b"2", kept_at)
        await bucket.close()

    asyncio.run(scenario())


def test_killed_in_the_middle_of_appends_it_loses_none_that_was_acknowledged(
    server: NatsServer,
) -> None:
    """20 kills at any point of a stream of appends, by -9."""
    dice = random.Random(7)

    async def scenario() -> None:
        store = await opened(server)
        acknowledged: list[bytes] = []
        unsure = 0

        async def write() -> None:
            nonlocal unsure
            while True:
                record = b"record %d" % len(acknowledged)
                try:
                    rev = await store.append(len(acknowledged), record)
                    assert rev == len(acknowledged) + 1
                    acknowledged.append(record)
                except StoreConflict:
                    rows = await store.read(len(acknowledged), 1)
                    assert rows == [(len(acknowledged) + 1, record)], "kept, though unanswered"
                    acknowledged.append(record)
                    unsure += 1
                except StoreDown:
                    await asyncio.sleep(0.002)

        writing = asyncio.create_task(write())
        for _ in range(20):
            before = len(acknowledged)
            while len(acknowledged) < before + 2:
                await asyncio.sleep(0.001)
                assert not writing.done()
            await asyncio.sleep(dice.random() * 0.02)
            server.kill()
            server.start()
        writing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await writing
        fresh = await opened(server)
        log: list[bytes] = []
        while rows := await fresh.read(len(log), 500):
            log += [record for _, record in rows]
        assert log[: len(acknowledged)] == acknowledged
        assert len(log) <= len(acknowledged) + 1
        await store.close()
        await fresh.close()

    asyncio.run(scenario())


def test_while_it_is_stopped_it_is_down_and_afterwards_it_goes_on(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats_bucket, "REQUEST_S", 0.2)

    async def scenario() -> None:
        store = await opened(server)
        await store.append(0, b"a")
        server.pause()
        with pytest.raises(StoreDown):
            await store.head()
        with pytest.raises(StoreDown):
            await store.append(1, b"b")  # whether it happened is unknown
        server.resume()
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(StoreDown):
                    rows = await store.read(0, 5)
                    break
                await asyncio.sleep(0.05)
        assert rows[0] == (1, b"a")
        assert await store.append(len(rows), b"c") == len(rows) + 1
        await store.close()

    asyncio.run(scenario())


def test_a_log_that_was_restored_is_not_gone_on_with(server: NatsServer, tmp_path: Path) -> None:
    async def scenario() -> None:
        store = await opened(server)
        await store.append(0, b"a")
        server.stop()
        server.saved(tmp_path / "backup")
        server.start()
        await in_touch(store)
        await store.append(1, b"b")
        server.restored(tmp_path / "backup")
        await in_touch(store)
        with pytest.raises(StoreBehind, match="ends at 1"):
            await store.head()
        with pytest.raises(StoreBehind):
            await store.append(2, b"c")
        other = await opened(server)
        await other.append(1, b"another b")
        with pytest.raises(StoreBroken, match="another than it was"):
            await store.append(2, b"c")
        await store.close()
        await other.close()

    asyncio.run(scenario())


async def in_touch(store: NatsStore) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                await store.head()
            except StoreBehind:
                return
            except StoreDown:
                await asyncio.sleep(0.05)
            else:
                return


# -- settings, and three servers -------------------------------------------------------------------


def test_a_server_that_is_not_there_is_named_without_its_password(tmp_path: Path) -> None:
    async def scenario() -> None:
        port = NatsServer(tmp_path).port
        url = f"nats://me:secret@127.0.0.1:{port}"
        bucket = NatsBucket(nats_bucket.NatsPlace(servers=(url,), bucket="x", replicas=1))
        with pytest.raises(StoreDown, match=rf"127\.0\.0\.1:{port} is not reached") as caught:
            await bucket.connect()
        assert "secret" not in str(caught.value)

    asyncio.run(scenario())


def test_a_client_that_loses_a_cancellation_waits_no_longer_than_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost: list[str] = []

    class Deaf(nats_bucket.Client):
        async def connect(self, *_: object, **__: object) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            while True:
                try:
                    await asyncio.sleep(60.0)
                except asyncio.CancelledError:
                    lost.append("a cancellation")
                    if len(lost) > 2:
                        raise

        async def close(self) -> None:
            """It was never connected."""

    async def scenario() -> None:
        place = nats_bucket.NatsPlace(servers=("nats://127.0.0.1:1",), bucket="x", replicas=1)
        with pytest.raises(StoreDown, match="TimeoutError"):
            await nats_bucket.NatsBucket(place).connect()

    monkeypatch.setattr(nats_bucket, "Client", Deaf)
    asyncio.run(asyncio.wait_for(scenario(), 30.0))
    assert len(lost) == 3


def test_more_replicas_than_servers_say_what_to_do(server: NatsServer) -> None:
    async def scenario() -> None:
        with pytest.raises(StoreDown, match="--control-replicas"):
            await opened(server, replicas=3)

    asyncio.run(scenario())


@pytest.mark.parametrize("servers", ["http://127.0.0.1:4222", "nats://", "127.0.0.1:4222"])
def test_what_is_no_place_is_refused(servers: str) -> None:
    with pytest.raises(ConfigError):
        checked_place(nats_bucket.NatsPlace(servers=(servers,), bucket="x", replicas=1))
    with pytest.raises(ConfigError, match="bucket"):
        checked_place(
            nats_bucket.NatsPlace(servers=("nats://127.0.0.1",), bucket="a.b", replicas=1)
        )


def test_a_file_that_holds_no_certificate_is_named(tmp_path: Path) -> None:
    ca_file = tmp_path / "ca.pem"
    ca_file.write_text("no certificate")
    place = nats_bucket.NatsPlace(
        servers=("tls://127.0.0.1:4222",), bucket="x", replicas=1, ca_file=str(ca_file)
    )
    with pytest.raises(ConfigError, match=r"ca\.pem"):
        asyncio.run(NatsBucket(checked_place(place)).connect())


@pytest.mark.parametrize("body", [b"{", b'{"message": {"subject": "a", "seq": 1, "data": "a"}}'])
def test_an_answer_that_makes_no_sense_is_no_answer(body: bytes) -> None:
    class Odd:
        is_connected = True

        async def request(self, subject: str, payload: bytes, **_: object) -> object:
            return SimpleNamespace(data=body)

    async def scenario() -> None:
        place = nats_bucket.NatsPlace(servers=("nats://127.0.0.1",), bucket="x", replicas=1)
        bucket = NatsBucket(place)
        bucket._client = Odd()  # type: ignore[assignment]
        with pytest.raises(StoreDown, match="makes no sense"):
            await bucket.newest("log.*")

    asyncio.run(scenario())


def test_of_three_servers_one_may_be_killed_at_any_time(tmp_path: Path) -> None:
    """Each in turn, so that the leader is among them; none of the acknowledged is lost."""

    async def scenario(servers: list[NatsServer]) -> None:
        store = await until_open(servers)
        kept: list[bytes] = []

        async def append() -> None:
            record = b"record %d" % len(kept)
            async with asyncio.timeout(120):
                while True:
                    try:
                        await store.append(len(kept), record)
                        break
                    except StoreConflict:
                        assert await store.read(len(kept), 1) == [(len(kept) + 1, record)]
                        break
                    except StoreDown:
                        await asyncio.sleep(0.05)
            kept.append(record)

        for server in servers:
            for _ in range(10):
                await append()
            server.kill()
            for _ in range(10):
                await append()
            server.start()
        assert [record for _, record in await store.read(0, 100)] == kept
        await store.close()

    servers = cluster(tmp_path)
    try:
        asyncio.run(scenario(servers))
    finally:
        for server in servers:
            server.kill()


async def until_open(servers: list[NatsServer]) -> NatsStore:
    async with asyncio.timeout(120):
        while True:
            with contextlib.suppress(StoreDown):
                return await opened(*servers, replicas=3)
            await asyncio.sleep(0.1)
