"""Workers that Kubernetes knows: the endpoints of a service, listed once and watched from then on.

    list ──► tell all ──► watch from that version ──(each change)──► tell all
      ▲                          │
      └────(too old, or lost)────┘

Asks the API server with the service account of the pod that this runs in, for EndpointSlices of one
namespace under a label selector. An endpoint that is not ready, or is about to go, drains; one that
is listed no more is gone. The pod's uid is among its labels, so that another pod at the same
address is another worker. While the server is away, what it told last stays. Must never: follow a
redirect, or read without a bound. Read `kubernetes_http.py` for how it asks.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Annotated
from urllib.parse import urlencode

import msgspec
from msgspec import Meta

from trunkline.adapters.kubernetes_http import ApiProblem, KubernetesApi
from trunkline.core.repair import Pause
from trunkline.ports.workers import NamedWorker
from trunkline.written import host_port

PAGE_SLICES = 500
MAX_SLICES = 4_096
WATCH_S = 300
_PAUSE_MS, _MAX_PAUSE_MS = 250.0, 30_000.0
_GONE = 410

_Name = Annotated[str, Meta(max_length=512)]


class _Conditions(msgspec.Struct):
    ready: bool | None = None
    terminating: bool | None = None


class _Target(msgspec.Struct):
    name: _Name = ""
    uid: _Name = ""


class _Endpoint(msgspec.Struct):
    addresses: list[_Name] = []
    conditions: _Conditions | None = None
    target: _Target | None = msgspec.field(name="targetRef", default=None)
    node: _Name | None = msgspec.field(name="nodeName", default=None)
    zone: _Name | None = None


class _Port(msgspec.Struct):
    name: _Name | None = None
    port: int | None = None


class _Meta(msgspec.Struct):
    name: _Name = ""
    version: _Name = msgspec.field(name="resourceVersion", default="")
    go_on: str = msgspec.field(name="continue", default="")


class _Slice(msgspec.Struct):
    metadata: _Meta
    kind_of_address: str = msgspec.field(name="addressType", default="")
    endpoints: list[_Endpoint] | None = None
    ports: list[_Port] | None = None


class _List(msgspec.Struct):
    metadata: _Meta
    items: list[_Slice] = []


class _Status(msgspec.Struct):
    code: int = 0
    message: str = ""


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


_LIST = msgspec.json.Decoder(_List)
_EVENT = msgspec.json.Decoder(_Event)
_SLICE = msgspec.json.Decoder(_Slice)
_STATUS = msgspec.json.Decoder(_Status)


class WorkersKubernetes:
    """The `WorkerSource` of the services under one selector."""

    def __init__(self, api: KubernetesApi, *, namespace: str, selector: str, port: int = 0) -> None:
        """`port` 0 takes that of the service: the only one, or the one that is called `http`."""
        self.name = f"kubernetes {namespace}, {selector}"
        self._api = api
        self._path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        self._selector = selector
        self._port = port
        self._slices: dict[str, _Slice] = {}
        self._pause = Pause(_PAUSE_MS, _MAX_PAUSE_MS)

    async def run(
        self, tell: Callable[[Sequence[NamedWorker]], None], on_trouble: Callable[[str], None]
    ) -> None:
        while True:
            try:
                version = await self._list()
                tell(self._named())
                await self._follow(version, tell)
            except ApiProblem as error:
                if error.status != _GONE:  # too old a version: that is how the protocol has it
                    on_trouble(str(error))
            except (msgspec.MsgspecError, json.JSONDecodeError, RecursionError) as error:
                on_trouble(f"an answer that is none: {error}")
            await asyncio.sleep(self._pause.take() / 1e3)

    # -- list and watch ----------------------------------------------------------------------------

    async def _list(self) -> str:
        """All slices anew; the version to watch from."""
        slices: dict[str, _Slice] = {}
        go_on, version = "", ""
        while True:
            page = _LIST.decode(await self._api.get(self._url(limit=PAGE_SLICES, go_on=go_on)))
            slices |= {one.metadata.name: one for one in page.items}
            _require_room(slices)
            version, go_on = page.metadata.version, page.metadata.go_on
            if not go_on:
                break
        self._slices = slices
        return version

    async def _follow(self, version: str, tell: Callable[[Sequence[NamedWorker]], None]) -> None:
        """Changes from that version on, as long as the server tells them: it ends each watch in
        time. Raises ApiProblem.
        """
        while True:
            has_told = False
            async for event in self._events(version):
                has_told = True
                version = self._take(event, tell) or version
            if has_told:
                self._pause.reset()
            await asyncio.sleep(self._pause.take() / 1e3)

    async def _events(self, version: str) -> AsyncIterator[_Event]:
        url = self._url(
            watch=1, allowWatchBookmarks="true", timeoutSeconds=WATCH_S, resourceVersion=version
        )
        async for line in self._api.lines(url, silent_s=WATCH_S + 30.0):
            yield _EVENT.decode(line)

    def _take(self, event: _Event, tell: Callable[[Sequence[NamedWorker]], None]) -> str:
        """One change; the version that it leads to, empty for none. Raises ApiProblem."""
        if event.type == "ERROR":
            status = _STATUS.decode(event.object)
            raise ApiProblem(f"the watch ended: {status.message}", status=status.code)
        one = _SLICE.decode(event.object)
        name = one.metadata.name
        match event.type:
            case "ADDED" | "MODIFIED":
                self._slices[name] = one
                _require_room(self._slices)
            case "DELETED":
                self._slices.pop(name, None)
            case _:
                return one.metadata.version  # a bookmark, or what is still to be invented
        tell(self._named())
        return one.metadata.version

    def _url(self, *, go_on: str = "", **query: str | int) -> str:
        query["labelSelector"] = self._selector
        if go_on:
            query["continue"] = go_on
        return f"{self._path}?{urlencode(query)}"

    # -- what the slices name ----------------------------------------------------------------------

    def _named(self) -> list[NamedWorker]:
        """Each endpoint once: while slices are rebuilt it may be in two, and is then as the better
        of them says.
        """
        found: dict[str, NamedWorker] = {}
        for name in sorted(self._slices):
            for one in self._named_in(self._slices[name]):
                known = found.get(one.url)
                if known is None or known.is_draining:
                    found[one.url] = one
        return list(found.values())

    def _named_in(self, one: _Slice) -> Iterable[NamedWorker]:
        port = self._port or _port_of(one.ports or ())
        if not port or one.kind_of_address not in ("IPv4", "IPv6"):
            return
        for endpoint in one.endpoints or ():
            if not endpoint.addresses:
                continue
            # The others are the same, by the API's word.
            address = host_port(endpoint.addresses[0], port)
            yield NamedWorker(
                url=f"http://{address}",
                labels=_labels(endpoint),
                is_draining=not _is_ready(endpoint.conditions),
                is_found=True,
            )


def _port_of(ports: Sequence[_Port]) -> int | None:
    if len(ports) == 1:
        return ports[0].port
    return next((one.port for one in ports if one.name == "http"), None)


def _is_ready(conditions: _Conditions | None) -> bool:
    """Not said is ready, by the API's word."""
    return conditions is None or (conditions.ready is not False and not conditions.terminating)


def _labels(endpoint: _Endpoint) -> tuple[tuple[str, str], ...]:
    target = endpoint.target or _Target()
    told = {
        "pod": target.name,
        "pod_uid": target.uid,
        "node": endpoint.node or "",
        "zone": endpoint.zone or "",
    }
    return tuple(sorted((name, value) for name, value in told.items() if value))


def _require_room(slices: dict[str, _Slice]) -> None:
    if len(slices) > MAX_SLICES:
        raise ApiProblem(f"more than {MAX_SLICES} slices under the selector")
