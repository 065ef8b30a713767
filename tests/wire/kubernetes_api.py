"""A small Kubernetes API server: EndpointSlices of one namespace, listed, watched, forgotten."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

PATH = "/apis/discovery.k8s.io/v1/namespaces/ml/endpointslices"


def endpoint(address: str, uid: str = "u1", **conditions: bool) -> dict[str, Any]:
    return {
        "addresses": [address],
        "conditions": {"ready": True, **conditions},
        "targetRef": {"kind": "Pod", "name": f"pod-{uid}", "uid": uid},
        "nodeName": "n1",
    }


@dataclass
class FakeApi:
    """Its state, as tests change it."""

    version: int = 100
    slices: dict[str, dict[str, Any]] = field(default_factory=dict[str, Any])
    history: list[tuple[int, dict[str, Any]]] = field(default_factory=list[tuple[int, Any]])
    """What watches are told from a version on."""
    oldest: int = 0
    """Watches from before this version are answered 410."""
    page: int = 500
    token: str = "marked-token"
    is_failing: bool = False
    gone_by: str = "event"
    """How a version that is too old is told: an `event`, or the `status` of the answer."""
    asked: list[dict[str, list[str]]] = field(default_factory=list[dict[str, list[str]]])
    refused_count: int = 0
    port: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, name: str, *endpoints: dict[str, Any], port: int = 8000, **more: Any) -> None:
        kind = "MODIFIED" if name in self.slices else "ADDED"
        self.version += 1
        self.slices[name] = {
            "metadata": {"name": name, "resourceVersion": str(self.version)},
            "addressType": "IPv4",
            "endpoints": list(endpoints),
            "ports": [{"name": "http", "port": port, "protocol": "TCP"}],
            **more,
        }
        self._tell(kind, self.slices[name])

    def drop(self, name: str) -> None:
        self.version += 1
        gone = self.slices.pop(name)
        gone["metadata"]["resourceVersion"] = str(self.version)
        self._tell("DELETED", gone)

    def bookmark(self) -> None:
        self.version += 10
        self._tell("BOOKMARK", {"metadata": {"resourceVersion": str(self.version)}})

    def forget(self) -> None:
        """As after a compaction: whoever watched must list anew."""
        self.oldest = self.version = self.version + 1_000
        self.history.clear()
        self._wake()

    def _tell(self, kind: str, what: dict[str, Any]) -> None:
        self.history.append((self.version, {"type": kind, "object": json.loads(json.dumps(what))}))
        self._wake()

    def _wake(self) -> None:
        before, self.changed = self.changed, asyncio.Event()
        before.set()

    # -- HTTP --------------------------------------------------------------------------------------

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("ascii")
            url = urlsplit(head.split(" ")[1])
            query = parse_qs(url.query)
            if f"authorization: Bearer {self.token}" not in head:
                self.refused_count += 1
                self._answer(writer, "401 Unauthorized", {})
            elif self.is_failing or url.path != PATH:
                self._answer(writer, "503 Service Unavailable", {})
            elif "watch" in query:
                self.asked.append(query)
                await self._watch(writer, int(query["resourceVersion"][0]))
            else:
                self.asked.append(query)
                self._list(writer, query)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    def _answer(self, writer: asyncio.StreamWriter, status: str, body: dict[str, Any]) -> None:
        raw = json.dumps(body).encode()
        head = f"HTTP/1.1 {status}\r\ncontent-length: {len(raw)}\r\nconnection: close\r\n\r\n"
        writer.write(head.encode() + raw)

    def _list(self, writer: asyncio.StreamWriter, query: dict[str, list[str]]) -> None:
        names = sorted(self.slices)
        start = int(query.get("continue", ["0"])[0])
        end = start + min(self.page, int(query["limit"][0]))
        metadata = {"resourceVersion": str(self.version)}
        if end < len(names):
            metadata["continue"] = str(end)
        items = [self.slices[name] for name in names[start:end]]
        self._answer(writer, "200 OK", {"metadata": metadata, "items": items})

    async def _watch(self, writer: asyncio.StreamWriter, version: int) -> None:
        status = {"code": 410, "message": "too old resource version"}
        if version < self.oldest and self.gone_by == "status":
            self._answer(writer, "410 Gone", status)
            return
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        while True:
            changed = self.changed
            if version < self.oldest:
                self._chunk(writer, {"type": "ERROR", "object": status})
                writer.write(b"0\r\n\r\n")
                return
            for at, event in self.history:
                if at > version:
                    version = at
                    self._chunk(writer, event)
            await writer.drain()
            await changed.wait()

    def _chunk(self, writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
        """In two, as a line may come."""
        raw = json.dumps(event).encode() + b"\n"
        for part in (raw[:7], raw[7:]):
            writer.write(b"%x\r\n%b\r\n" % (len(part), part))


@contextlib.asynccontextmanager
async def kubernetes(tls: ssl.SSLContext | None = None) -> AsyncIterator[FakeApi]:
    api = FakeApi()
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        with contextlib.suppress(asyncio.CancelledError):
            await api.serve(reader, writer)
        tasks.discard(task)

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    api.port = server.sockets[0].getsockname()[1]
    try:
        yield api
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
