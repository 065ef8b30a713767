"""A key-value bucket of NATS JetStream: put behind a revision, read from the leader, hear of news.

A bucket is a stream with one message a key, so that everything in it has one order, whatever key it
is under. What decides is read from the stream's leader; a plain subscription only says that there
is something to read, and may lose that. Nothing is kept back for a connection that is gone: a put
either reached a server now, or failed. Must never: delete, or take silence for an answer. Read
`nats_store.py` for what is kept in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
import nats
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from trunkline.errors import ConfigError
from trunkline.ports.board import Answer
from trunkline.ports.store import StoreBroken, StoreDown

REQUEST_S = 2.0
CONNECT_S = 2.0
CANCEL_AGAIN_S = 0.1
RECONNECT_S = 0.25
PING_S = 2
"""A server that vanished without a word is noticed after two of these."""
OLDEST_SERVER = (2, 12)
"""The first that compares the newest revision under a pattern of keys."""
MAX_VALUE_BYTES = 768 << 10
"""With its frame inside the 1 MiB of `max_payload` that servers take unless told otherwise."""

_WRONG_SEQUENCE = 10071
_NO_MESSAGE = 10037
_NO_STREAM = 10059
_NAME_IN_USE = 10058
_TOO_FEW_SERVERS = frozenset({10005, 10074, 10052})
_Answer = TypeVar("_Answer", bound="_Reply")


class BucketConflict(Exception):
    """The newest revision under the pattern is another than the one named: nothing was put."""


class BucketGone(StoreDown):
    """The servers have no such bucket: it was removed, or their data was lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NatsPlace:
    """Where a bucket is."""

    servers: tuple[str, ...]
    bucket: str
    replicas: int
    credentials_file: str = ""
    ca_file: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What is under a key. `seq` is its place in the order of all puts to the bucket, `stamp` when
    that put happened, by a server's clock: the same put has both the same for ever.
    """

    key: str
    seq: int
    stamp: str
    value: bytes


class _Failure(msgspec.Struct):
    err_code: int = 0
    description: str = ""


class _Reply(msgspec.Struct):
    error: _Failure | None = None


class _PutReply(_Reply):
    seq: int = 0


class _Message(msgspec.Struct):
    subject: str
    seq: int
    data: bytes = b""
    """In base64, as JSON has bytes."""
    time: str = ""


class _GetReply(_Reply):
    message: _Message | None = None


class _StreamConfig(msgspec.Struct):
    num_replicas: int = 0
    storage: str = ""
    max_age: int = 0
    max_msgs_per_subject: int = 0
    discard: str = ""


class _StreamReply(_Reply):
    config: _StreamConfig | None = None


class NatsBucket:
    """Make one, then `connect`. Belongs to one event loop."""

    def __init__(self, place: NatsPlace) -> None:
        """Raises ConfigError for a file of certificates that holds none."""
        self._place = place
        self._tls = _trusting(place.ca_file) if place.ca_file else None
        self._stream = f"KV_{place.bucket}"
        self._prefix = f"$KV.{place.bucket}."
        self._wire = f"{place.bucket}.load"
        self._calls = f"{place.bucket}.calls"
        self._on_call: list[Callable[[bytes, Answer], None]] = []
        self._on_body: list[Callable[[bytes], None]] = []
        self._client: Client | None = None
        self._on_news: list[Callable[[str], None]] = []
        self._is_apart = asyncio.Event()
        """The connection was lost while something waited for its answer."""
        self.why_apart = "not connected yet"
        """Why there is no connection; empty while there is one."""

    def listen(self, on_news: Callable[[str], None]) -> None:
        """From now on it is called with the key when something may have been put, and without one
        after each time apart.
        """
        self._on_news.append(on_news)

    async def send(self, body: bytes) -> None:
        """To all that `hear`; lost where there is no connection."""
        client = self._client
        if client is not None and client.is_connected:
            with contextlib.suppress(nats.errors.Error, OSError):
                await client.publish(self._wire, body)

    def hear(self, on_body: Callable[[bytes], None]) -> None:
        self._on_body.append(on_body)

    async def call(self, body: bytes, wait_s: float) -> bytes:
        """The first answer of any gateway that `answer`s. Raises StoreDown."""
        return (await self._asked(self._calls, body, wait_s, None)).data

    def answer(self, on_call: Callable[[bytes, Answer], None]) -> None:
        self._on_call.append(on_call)

    async def connect(self) -> None:
        """Connect once; from then on the connection comes back by itself. Makes the bucket where
        there is none. Raises StoreDown, StoreBroken for a bucket with other settings, ConfigError.
        """
        if self._client is None:
            self._client = await self._connected()
        await self.ensure()

    async def close(self) -> None:
        client, self._client = self._client, None
        self.why_apart = "closed"
        if client is not None:
            with contextlib.suppress(nats.errors.Error, OSError):
                await client.close()

    async def ensure(self) -> None:
        """Make the bucket where there is none; look at its settings where there is one."""
        reply = await self._api("STREAM.INFO." + self._stream, {}, _StreamReply)
        if reply.error is not None and reply.error.err_code == _NO_STREAM:
            reply = await self._api("STREAM.CREATE." + self._stream, self._config(), _StreamReply)
        if reply.error is not None and reply.error.err_code == _NAME_IN_USE:
            reply = await self._api("STREAM.INFO." + self._stream, {}, _StreamReply)
        if reply.error is not None and reply.error.err_code in _TOO_FEW_SERVERS:
            wanted = self._place.replicas
            raise StoreDown(
                f"fewer than {wanted} servers of NATS can keep the bucket"
                f" ({reply.error.description}); start them, or set --control-replicas"
            )
        config = self._unfailed(reply, "the bucket").config
        if config is None:
            raise StoreBroken("the servers of NATS say nothing of the bucket's settings")
        self._check(config)

    async def put(
        self, key: str, value: bytes, *, behind: tuple[str, int] | None = None, ttl_s: int = 0
    ) -> int:
        """Put a value under a key, durable when this returns; its place in the order.

        `behind` (pattern, seq): only where the newest under the pattern is at `seq`, 0 for none.
        `ttl_s`: the servers may drop it that long after its last put. Raises BucketConflict,
        StoreDown: it may have happened.
        """
        if len(value) > MAX_VALUE_BYTES:
            raise StoreDown(f"a value of {len(value)} bytes; at most {MAX_VALUE_BYTES} are kept")
        headers = {"Nats-Expected-Stream": self._stream}
        if behind is not None:
            headers["Nats-Expected-Last-Subject-Sequence"] = str(behind[1])
            headers["Nats-Expected-Last-Subject-Sequence-Subject"] = self._prefix + behind[0]
        if ttl_s:
            headers["Nats-TTL"] = f"{ttl_s}s"
        reply = await self._request(self._prefix + key, value, _PutReply, headers)
        if reply.error is not None and reply.error.err_code == _WRONG_SEQUENCE:
            raise BucketConflict(reply.error.description)
        return self._unfailed(reply, "a put").seq

    async def newest(self, pattern: str) -> Held | None:
        """What was put last under the pattern; None for nothing. Raises StoreDown."""
        return await self._get({"last_by_subj": self._prefix + pattern})

    async def after(self, seq: int, pattern: str) -> Held | None:
        """What was put next behind `seq` under the pattern and is there still."""
        return await self._get({"seq": seq + 1, "next_by_subj": self._prefix + pattern})

    # -- inside ----------------------------------------------------------------------------------

    async def _connected(self) -> Client:
        client, is_apart = Client(), asyncio.Event()
        try:
            await _within(CONNECT_S, self._reach(client, is_apart))
            await _within(CONNECT_S, self._subscribe(client))
        except (nats.errors.Error, OSError, TimeoutError) as error:
            with contextlib.suppress(nats.errors.Error, OSError):
                await client.close()
            named = ", ".join(_without_password(server) for server in self._place.servers)
            self.why_apart = f"NATS at {named} is not reached: {_said(error)}"
            raise StoreDown(self.why_apart) from error
        except BaseException:
            await client.close()
            raise
        self.why_apart, self._is_apart = "", is_apart
        return client

    async def _reach(self, client: Client, is_apart: asyncio.Event) -> None:
        """Connect, and have it said when that is lost and when it is back."""

        async def apart() -> None:
            self.why_apart = "the connection to NATS was lost"
            is_apart.set()

        async def back() -> None:
            self.why_apart = ""
            is_apart.clear()
            self._tell("")

        async def failed(error: Exception) -> None:
            self.why_apart = self.why_apart and f"NATS: {_said(error)}"

        await client.connect(
            list(self._place.servers),
            name="trunkline",
            error_cb=failed,
            disconnected_cb=apart,
            reconnected_cb=back,
            connect_timeout=int(CONNECT_S),
            reconnect_time_wait=RECONNECT_S,  # pyright: ignore[reportArgumentType]  # slept
            max_reconnect_attempts=-1,
            ping_interval=PING_S,
            tls=self._tls,
            user_credentials=self._place.credentials_file or None,
            pending_size=0,  # nothing waits for a connection: see the module
        )
        version = client.connected_server_version
        if (version.major, version.minor) < OLDEST_SERVER:
            raise ConfigError(
                f"nats-server {version.major}.{version.minor} is too old: 2.12 or newer"
            )

    async def _subscribe(self, client: Client) -> None:
        async def told(message: Msg) -> None:
            for on_body in self._on_body:
                on_body(message.data)

        async def called(message: Msg) -> None:
            async def answer(body: bytes) -> None:
                with contextlib.suppress(nats.errors.Error, OSError):
                    await client.publish(message.reply, body)

            for on_call in self._on_call:
                on_call(message.data, answer)

        async def heard(message: Msg) -> None:
            self._tell(message.subject[len(self._prefix) :])

        await client.subscribe(  # pyright: ignore[reportUnknownMemberType]  # its `future`
            self._prefix + ">", cb=heard
        )
        await client.subscribe(  # pyright: ignore[reportUnknownMemberType]  # its `future`
            self._wire, cb=told
        )
        await client.subscribe(  # pyright: ignore[reportUnknownMemberType]  # its `future`
            self._calls, cb=called
        )

    def _tell(self, key: str) -> None:
        for on_news in self._on_news:
            on_news(key)

    def _config(self) -> dict[str, object]:
        return {
            "name": self._stream,
            "subjects": [self._prefix + ">"],
            "retention": "limits",
            "storage": "file",
            "discard": "new",
            "num_replicas": self._place.replicas,
            "max_msgs_per_subject": 1,
            "max_consumers": -1,
            "max_msgs": -1,
            "max_bytes": -1,
            "max_msg_size": -1,
            "max_age": 0,
            "deny_delete": True,
            "deny_purge": True,
            "allow_direct": False,
            "allow_msg_ttl": True,
        }

    def _check(self, config: _StreamConfig) -> None:
        found = (config.storage, config.max_age, config.max_msgs_per_subject)
        if found != ("file", 0, 1):
            raise StoreBroken(
                f"the stream {self._stream} was made by somebody else (storage, age, history:"
                f" {found}); give another --control-fleet"
            )
        if config.num_replicas < self._place.replicas:
            raise StoreBroken(
                f"the stream {self._stream} has {config.num_replicas} replicas, --control-replicas"
                f" asks for {self._place.replicas}: `nats stream edit`, or set it lower"
            )

    async def _get(self, query: dict[str, object]) -> Held | None:
        reply = await self._api("STREAM.MSG.GET." + self._stream, query, _GetReply)
        if reply.error is not None and reply.error.err_code == _NO_MESSAGE:
            return None
        message = self._unfailed(reply, "a read").message
        if message is None:
            return None
        return Held(
            key=message.subject[len(self._prefix) :],
            seq=message.seq,
            stamp=message.time,
            value=message.data,
        )

    def _unfailed(self, reply: _Answer, what: str) -> _Answer:
        error = reply.error
        if error is None:
            return reply
        text = f"NATS refuses {what}: {error.description} ({error.err_code})"
        raise (BucketGone if error.err_code == _NO_STREAM else StoreDown)(text)

    async def _api(self, verb: str, body: dict[str, object], kind: type[_Answer]) -> _Answer:
        return await self._request(f"$JS.API.{verb}", msgspec.json.encode(body), kind, None)

    async def _request(
        self, subject: str, body: bytes, kind: type[_Answer], headers: dict[str, str] | None
    ) -> _Answer:
        reply = await self._asked(subject, body, REQUEST_S, headers)
        try:
            return msgspec.json.decode(reply.data, type=kind)
        except msgspec.DecodeError as error:
            raise StoreDown(f"NATS answers what makes no sense: {error}") from error

    async def _asked(
        self, subject: str, body: bytes, wait_s: float, headers: dict[str, str] | None
    ) -> Msg:
        client = self._client
        if client is None or not client.is_connected:
            raise StoreDown(self.why_apart or "not connected to NATS")
        try:
            return await self._while_connected(
                client.request(subject, body, timeout=wait_s, headers=headers)
            )
        except nats.errors.NoRespondersError as error:
            raise StoreDown("NATS has no leader for the bucket, or JetStream is off") from error
        except (nats.errors.Error, OSError, TimeoutError) as error:
            raise StoreDown(f"NATS does not answer: {_said(error)}") from error

    async def _while_connected(self, work: Coroutine[Any, Any, Msg]) -> Msg:
        """No answer comes to a connection that is gone: nobody waits for it. Raises OSError."""
        asked = asyncio.ensure_future(work)
        apart = asyncio.ensure_future(self._is_apart.wait())
        try:
            await asyncio.wait({asked, apart}, return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                raise ConnectionResetError(self.why_apart)
            return asked.result()
        finally:
            asked.cancel()
            apart.cancel()


def _said(error: BaseException) -> str:
    """Of a time-out, its name: it says nothing."""
    return str(error) or type(error).__name__


async def _within(limit_s: float, work: Coroutine[Any, Any, None]) -> None:
    """`asyncio.timeout` is not enough: in Python 3.11 `wait_for` loses a cancellation that meets
    the end of what it waits for, and then the library tries to connect for ever. Raises
    TimeoutError.
    """
    task = asyncio.create_task(work)
    try:
        await asyncio.wait({task}, timeout=limit_s)
        if task.done():
            return task.result()
        raise TimeoutError
    finally:
        while not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=CANCEL_AGAIN_S)


def _trusting(ca_file: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"{ca_file} cannot be read as certificates: {error}") from error


def _without_password(server: str) -> str:
    return server.replace(f"{urlsplit(server).netloc.rpartition('@')[0]}@", "")


def checked_place(place: NatsPlace) -> NatsPlace:
    """Raises ConfigError for what cannot be a place."""
    for server in place.servers:
        if urlsplit(server).scheme not in ("nats", "tls") or not urlsplit(server).hostname:
            raise ConfigError(f"{_without_password(server)!r} is no nats://HOST:PORT")
    name = place.bucket
    if not name.isascii() or not name.replace("-", "").replace("_", "").isalnum():
        raise ConfigError(f"{name!r} is no name of a bucket: letters, digits, - and _")
    for named in (place.credentials_file, place.ca_file):
        if named and not Path(named).is_file():
            raise ConfigError(f"{named} is not there")
    return place
