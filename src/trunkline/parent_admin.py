"""The one admin port of several processes: passes on what comes in, and joins what they answer.

    metrics, workers, decisions     asked of all; joined, each series and row with its `process`
    changes of workers, heartbeats  carried out by all, one change at a time, and again by a process
                                    that is started later
    tenants, keys, revocations      carried out by the first process; answered when all the others
                                    have taken it in, as they share the registry
    the audit log                   the first process's own

Who may do what each process decides, by the caller's own credential. Must never: let anybody in by
itself, or answer for a process that was not asked. Read `parent.py` for who starts the processes.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast
from urllib.parse import parse_qs, unquote

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from trunkline.control.probe import Told, exchange
from trunkline.errors import ConfigError, GatewayError, WorkerLost, WorkerTimeout
from trunkline.gateway.admin import MAX_PREVIEW_BYTES
from trunkline.gateway.listener import (
    MAX_BODY_BYTES,
    json_response,
    problem_response,
    read_body,
)
from trunkline.gateway.metrics import render
from trunkline.ports.worker import Endpoint
from trunkline.seat import CATCH_UP, SOURCE_HEADER, TOKEN_HEADER
from trunkline.worker_url import worker_name, worker_url_problem

ASK_MS = 65_000.0
"""More than any answer takes: a revocation 3.2 s, to verify a long audit log some tens."""
CATCH_UP_MS = 5_000.0
READ_MS = 5_000.0
"""A process that takes longer is left out of what all are asked for."""
MAX_ANSWER_BYTES = 64 << 20
MAX_KEPT_CHANGES = 65_536
"""Workers whose last changes are kept for processes that are started later."""
_PASSED_ON = (b"authorization", b"origin", b"host", b"content-type", b"x-request-id")
_PASSED_BACK = (b"content-type", b"retry-after", b"www-authenticate", b"allow", b"cache-control")
_PROCESS = "process"
_NOWHERE = "/nowhere"
"""A path that is nobody's: who is let in is told that it is not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request, as it is passed on."""

    method: str
    target: str
    """Path and query."""
    headers: tuple[tuple[bytes, bytes], ...] = field(default=(), repr=False)
    body: bytes = field(default=b"", repr=False)
    source: str = ""

    @property
    def path(self) -> str:
        return unquote(self.target.partition("?")[0])

    @property
    def query(self) -> dict[str, list[str]]:
        return parse_qs(self.target.partition("?")[2], keep_blank_values=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """A process, and where it is asked."""

    number: int
    endpoint: Endpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """What one process answered."""

    number: int
    told: Told

    @property
    def is_good(self) -> bool:
        return self.told.status < 300

    @property
    def json(self) -> dict[str, Any]:
        return cast("dict[str, Any]", json.loads(self.told.body))


class ParentAdmin:
    """An ASGI application. `posts` says which processes can be asked now, in order."""

    def __init__(
        self,
        posts: Callable[[], Sequence[Post]],
        token: str,
        admin_key: str,
        own_metrics: Callable[[], dict[str, float]],
    ) -> None:
        self._posts = posts
        self._token = token
        self._admin_key = admin_key
        self._own_metrics = own_metrics
        self._changing = asyncio.Lock()
        self._kept: OrderedDict[str, list[Asked]] = OrderedDict()
        """By worker: what a process that is started later has to be told, in order."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", scope["type"]
        try:
            response = await self._answer(Request(scope, receive))
        except HTTPException as error:
            response = problem_response(error.status_code, error.detail)
            response.headers["connection"] = "close"
        await response(scope, receive, send)

    async def bring_up(self, post: Post, is_here: Callable[[], None]) -> None:
        """Tell a process what was changed before it came; from `is_here` on it is asked, too."""
        async with self._changing:
            for asked in self.kept():
                await self._ask(post, asked)
            is_here()

    async def is_alive(self, post: Post, timeout_ms: float) -> bool:
        """Whether it answers in time, or does not listen any more: then it ends by itself."""
        request = self._request(post, Asked(method="GET", target="/health"))
        try:
            await exchange(post.endpoint, request, "/health", timeout_ms)
        except WorkerTimeout:
            return False
        except WorkerLost:
            pass
        return True

    # -- who is asked ----------------------------------------------------------------------------

    async def _answer(self, request: Request) -> Response:
        asked = _asked(request)
        if asked.path == "/health":
            return json_response({"status": "ok"})
        if not self._posts():
            return _away("no gateway process is up: it is started again")
        if request.method not in ("GET", "HEAD"):
            # Who is nobody is told so before a body of theirs is held; heartbeats say in it who.
            if asked.path != "/heartbeat":
                door = await self._first(replace(asked, method="GET", target=_NOWHERE))
                if door.status_code != 404:
                    return door
            limit = MAX_PREVIEW_BYTES if asked.path == "/decisions" else MAX_BODY_BYTES
            asked = replace(asked, body=await read_body(request, limit))
        wanted = asked.query.get(_PROCESS)
        if wanted is not None and asked.method == "GET":
            return await self._one(asked, wanted[0])
        root = "/" + asked.path.split("/")[1]
        if asked.method == "GET":
            return await self._read(root, asked)
        if root in ("/workers", "/add_worker", "/remove_worker", "/heartbeat"):
            return await self._change(root, asked)
        if root == "/decisions":  # one that is only thought of: each would say the same
            return await self._first(asked)
        return await self._administer(asked)

    async def _read(self, root: str, asked: Asked) -> Response:
        if root in ("/metrics", "/workers", "/decisions", "/revocations"):
            heard = await self._all(asked, READ_MS)
            if root in ("/decisions", "/revocations") and asked.path != root:
                return _first_good(heard)  # known where it was made
            good = [each for each in heard if each.is_good]
            if not good:
                return _first_good(heard)
            if root == "/metrics":
                own = render({name: {(): value} for name, value in self._own_metrics().items()})
                page = await asyncio.to_thread(joined_metrics, good, own)
                return Response(page, headers={"content-type": _header(good, b"content-type")})
            return json_response(_joined(root, asked, good))
        if root == "/audit":  # each process has a log of its own
            return await self._one(asked, "0")
        return await self._first(asked)

    async def _one(self, asked: Asked, wanted: str) -> Response:
        """One process, by its number."""
        post = next((post for post in self._posts() if str(post.number) == wanted), None)
        if post is None:
            return _away(f"process {wanted[:8]!r} is not up")
        heard = await self._ask(post, _without_process(asked))
        return _away(f"process {post.number} ended") if heard is None else _passed_back(heard)

    async def _first(self, asked: Asked) -> Response:
        """The first that is there."""
        for post in self._posts():
            heard = await self._ask(post, asked)
            if heard is not None:
                return _passed_back(heard)
            if asked.method != "GET":
                break  # it may have been done
        return _away("the process that was asked ended; ask again")

    async def _administer(self, asked: Asked) -> Response:
        """A change of the registry: whoever heard that it is done finds it done at each process."""
        response = await self._first(asked)
        if response.status_code < 300:
            others = Asked(method="POST", target=CATCH_UP)
            await asyncio.gather(
                *(self._ask(post, others, CATCH_UP_MS) for post in self._posts()[1:])
            )
        return response

    async def _change(self, root: str, asked: Asked) -> Response:
        """A change of what each process knows of workers."""
        if root == "/heartbeat":
            return _worst(await self._all(asked, READ_MS))
        if asked.path.endswith("/check"):
            heard = await self._all(asked)
            if heard and all(each.is_good for each in heard):
                return json_response(joined_worker([(one.number, one.json) for one in heard]))
            return _worst(heard)
        async with self._changing:
            posts = self._posts()
            heard = await self._all(asked)
            if any(each.is_good for each in heard):
                self.keep(root, asked)
            told = {each.number for each in heard}
            silent = [post.number for post in posts if post.number not in told]
            # Who has ended meanwhile is told when it comes again; who lives has missed it.
            missed = [post.number for post in self._posts() if post.number in silent]
        if missed and heard:
            return _away(f"process {missed[0]} did not answer, and may not have done it: ask again")
        return _worst(heard)

    def keep(self, root: str, asked: Asked) -> None:
        """For processes to come. What is told anew to them is told by the operator."""
        name, verb = _change_of(root, asked)
        if not name or verb == "reset":
            return
        kept = self._kept.pop(name, [])
        again = Asked(method=asked.method, target=asked.target, body=asked.body)
        if verb in ("add", "remove"):
            kept = [again]
        else:
            kept = [one for one in kept if _change_of("/workers", one)[1] in ("add", "remove")]
            kept.append(again)
        self._kept[name] = kept
        while len(self._kept) > MAX_KEPT_CHANGES:
            self._kept.popitem(last=False)

    def kept(self) -> list[Asked]:
        """In the order in which workers were last changed."""
        return [asked for changes in self._kept.values() for asked in changes]

    # -- asking ----------------------------------------------------------------------------------

    async def _all(self, asked: Asked, timeout_ms: float = ASK_MS) -> list[Heard]:
        """What those answered that are alive, in order."""
        asking = (self._ask(post, asked, timeout_ms) for post in self._posts())
        heard = await asyncio.gather(*asking)
        return [each for each in heard if each is not None]

    async def _ask(self, post: Post, asked: Asked, timeout_ms: float = ASK_MS) -> Heard | None:
        """None where the process ended before it had answered."""
        request = self._request(post, asked)
        try:
            told = await exchange(
                post.endpoint, request, asked.path, timeout_ms, max_bytes=MAX_ANSWER_BYTES
            )
        except GatewayError:
            return None
        return Heard(number=post.number, told=told)

    def _request(self, post: Post, asked: Asked) -> bytes:
        headers = list(asked.headers)
        if not headers:  # of our own: as the operator
            headers.append((b"host", post.endpoint.host_header.encode()))
            if self._admin_key:
                headers.append((b"authorization", b"Bearer " + self._admin_key.encode()))
            if asked.body:
                headers.append((b"content-type", b"application/json"))
        headers += [
            (TOKEN_HEADER.encode(), self._token.encode()),
            (SOURCE_HEADER.encode(), asked.source.encode()),
            (b"connection", b"close"),
            (b"content-length", str(len(asked.body)).encode()),
        ]
        lines = [f"{asked.method} {asked.target} HTTP/1.1".encode("latin-1")]
        lines += [name + b": " + value for name, value in headers]
        return b"\r\n".join(lines) + b"\r\n\r\n" + asked.body


def _asked(request: Request) -> Asked:
    scope = request.scope
    target = scope["raw_path"].decode("latin-1")
    if scope["query_string"]:
        target += "?" + scope["query_string"].decode("latin-1")
    headers = tuple((name, value) for name, value in scope["headers"] if name in _PASSED_ON)
    client = scope.get("client")
    return Asked(
        method=request.method,
        target=target,
        headers=headers,
        source=str(client[0]) if client else "",
    )


def _without_process(asked: Asked) -> Asked:
    path, _, query = asked.target.partition("?")
    kept = "&".join(part for part in query.split("&") if part.partition("=")[0] != _PROCESS)
    return replace(asked, target=f"{path}?{kept}" if kept else path)


def _change_of(root: str, asked: Asked) -> tuple[str, str]:
    """The worker that a change is about, and its verb; no name where there is none."""
    if root in ("/add_worker", "/remove_worker"):
        url = (asked.query.get("url") or [""])[0]
        return _named(url), root[1:].partition("_")[0]
    if asked.path == "/workers":
        try:
            return _named(str(json.loads(asked.body)["url"])), "add"
        except (ValueError, KeyError, TypeError):
            return "", "add"
    rest = asked.path.removeprefix("/workers/")
    if asked.method == "DELETE":
        return _named(rest), "remove"
    name, _, verb = rest.rpartition("/")
    return _named(name), verb


def _named(given: str) -> str:
    url = given if "://" in given else f"http://{given}"
    try:
        return given if worker_url_problem(url) else worker_name(url)
    except ConfigError:
        return given


# -- what is made of several answers ---------------------------------------------------------------


def _passed_back(heard: Heard) -> Response:
    headers = {
        name.decode("latin-1"): value.decode("latin-1")
        for name, value in heard.told.headers
        if name in _PASSED_BACK
    }
    headers["x-trunkline-process"] = str(heard.number)
    return Response(heard.told.body, heard.told.status, headers)


def _away(why: str) -> Response:
    response = problem_response(503, why, "process_away")
    response.headers["retry-after"] = "1"
    return response


def _first_good(heard: Sequence[Heard]) -> Response:
    """The first that knows; else what the first says."""
    if not heard:
        return _away("the processes that were asked ended; ask again")
    return _passed_back(next((each for each in heard if each.is_good), heard[0]))


def _worst(heard: Sequence[Heard]) -> Response:
    """The first refusal, as the change is not everywhere then; else what the first says."""
    if not heard:
        return _away("the processes that were asked ended; ask again")
    return _passed_back(next((each for each in heard if not each.is_good), heard[0]))


def _header(heard: Sequence[Heard], name: bytes) -> str:
    found = (value for key, value in heard[0].told.headers if key == name)
    return next(found, b"").decode("latin-1")


def _joined(root: str, asked: Asked, heard: Sequence[Heard]) -> Any:  # as JSON has it
    answers = [(each.number, each.json) for each in heard]
    if root == "/workers" and asked.path == "/workers":
        rows = joined_workers(answers)
        return {"workers": rows, "total": len(rows)}
    if root == "/workers":
        return joined_worker(answers)
    name = root[1:]
    rows = [[{**row, _PROCESS: number} for row in answer[name]] for number, answer in answers]
    if root == "/revocations":
        found = sorted((row for part in rows for row in part), key=lambda row: -row["rev"])
    else:
        found = list(in_turns(rows))
    limit = (asked.query.get("limit") or ["100"])[0]
    return {**answers[0][1], name: found[: int(limit)]}


def in_turns(parts: Sequence[Sequence[Any]]) -> Iterable[Any]:
    """The first of each, the second of each, and so on."""
    for place in range(max(map(len, parts), default=0)):
        yield from (part[place] for part in parts if place < len(part))


def joined_workers(answers: Sequence[tuple[int, dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row a worker, in the order in which they are met."""
    seen: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for number, answer in answers:
        for row in answer["workers"]:
            seen.setdefault(row["worker"], []).append((number, row))
    return [joined_worker(rows) for rows in seen.values()]


def joined_worker(rows: Sequence[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
    """What the processes see of one worker: the first that may not choose it, else the first; with
    the requests of all, and what each sees in `detail.processes`.
    """
    shown = next((row for _, row in rows if row["state"] != "ready"), rows[0][1])
    seen = [
        {_PROCESS: number}
        | {name: row[name] for name in ("state", "mode", "reason", "breaker", "requests_active")}
        for number, row in rows
    ]
    return shown | {
        "requests_active": sum(row["requests_active"] for _, row in rows),
        "queue_ms": max(row["queue_ms"] for _, row in rows),
        "detail": shown["detail"] | {"processes": seen},
    }


def joined_metrics(heard: Sequence[Heard], own: bytes) -> bytes:
    """Each family once, its series with the label `process`; then our own."""
    families: dict[bytes, tuple[list[bytes], list[bytes]]] = {}
    for each in heard:
        label = f'{_PROCESS}="{each.number}"'.encode()
        into: list[bytes] = []
        for line in each.told.body.splitlines():
            if line.startswith(b"# HELP "):
                name = line.split(b" ", 3)[2]
                heads, into = families.setdefault(name, ([], []))
                if not heads:
                    heads.append(line)
            elif line.startswith(b"# TYPE "):
                heads, into = families.setdefault(line.split(b" ", 3)[2], ([], []))
                if len(heads) < 2:
                    heads.append(line)
            elif line:
                into.append(_labelled(line, label))
    lines = [line for heads, series in families.values() for line in (*heads, *series)]
    return b"\n".join(lines) + b"\n" + own


def _labelled(line: bytes, label: bytes) -> bytes:
    brace = line.find(b"{")  # where there is one, labels begin with it: a name has none
    if brace < 0:
        name, _, value = line.partition(b" ")
        return name + b"{" + label + b"} " + value
    return line[: brace + 1] + label + b"," + line[brace + 1 :]
