"""The one admin port of several processes: passes on what comes in, and joins what they answer.

    metrics, workers, decisions     asked of all; joined, each series and row with its `process`
    the list of tenants             asked of all; what they count of each is added up
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
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from trunkline.control.changes import Intent
from trunkline.control.probe import exchange
from trunkline.errors import (
    AnswerTooLong,
    AuditDown,
    ConfigError,
    GatewayError,
    WorkerLost,
    WorkerTimeout,
)
from trunkline.gateway.admin import MAX_PREVIEW_BYTES
from trunkline.gateway.listener import (
    MAX_BODY_BYTES,
    json_response,
    problem_response,
    read_body,
)
from trunkline.gateway.metrics import render
from trunkline.gateway.metrics_pages import joined_pages
from trunkline.parent_answers import (
    PROCESS_HEADER,
    Asked,
    Heard,
    away,
    cut,
    header_of,
    joined,
    known,
    label,
    passed_back,
    worst,
)
from trunkline.parent_joins import PROCESS, joined_worker
from trunkline.ports.worker import Endpoint
from trunkline.reload import Reloaded
from trunkline.reload_record import Asking, Note
from trunkline.seat import CATCH_UP, NOTE_RELOAD, SOURCE_HEADER, TAKE_SETTINGS, TOKEN_HEADER
from trunkline.worker_url import worker_name, worker_url_problem

ASK_MS = 65_000.0
"""More than any answer takes: a revocation 3.2 s, to verify a long audit log some tens."""
CATCH_UP_MS = 5_000.0
READ_MS = 5_000.0
"""A process that takes longer is left out of what all are asked for."""
MAX_ANSWER_BYTES = 64 << 20
MAX_KEPT_CHANGES = 65_536
"""Workers whose last changes are kept for processes that are started later."""
MAX_KEPT_AMENDS = 8
"""Of one worker, since it was last told of as a whole: of more the oldest is forgotten."""
_PASSED_ON = (b"authorization", b"origin", b"host", b"content-type", b"x-request-id")
_OF_ALL = ("/metrics", "/workers", "/decisions", "/revocations", "/tenants", "/get_loads")
_NOWHERE = "/nowhere"
"""A path that is nobody's: who is let in is told that it is not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """A process, and where it is asked."""

    number: int
    endpoint: Endpoint


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
        self.reload: Callable[[Intent], Awaitable[Reloaded]] | None = None
        """Reads the settings again. Raises ConfigError, AuditDown."""
        self._settings = b""
        """Those that are in force since a reload."""
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
            if self._settings:  # it may have been started before they were
                await self._ask(post, self._told(self._settings))
            for asked in self.kept():
                await self._ask(post, asked)
            is_here()

    async def take_settings(self, settings: bytes, admin_key: str) -> None:
        """All processes take these, and those to come. Whoever is too slow for it ends before we
        give up: none goes on by the old ones.
        """
        async with self._changing:
            self._settings, self._admin_key = settings, admin_key
            await self._all(self._told(settings))

    async def is_alive(self, post: Post, timeout_ms: float) -> bool:
        """Whether it answers in time, or does not listen any more: then it ends by itself."""
        request = self._request(post, Asked(method="GET", target="/health", is_our_own=True))
        try:
            await exchange(post.endpoint, request, "/health", timeout_ms)
        except WorkerTimeout:
            return False
        except WorkerLost:
            pass
        return True

    async def hear(self, request: Request, target: str) -> list[Heard]:
        """What all answer to this caller that are asked for something else than the request is."""
        return await self._all(replace(_asked(request), method="GET", target=target), READ_MS)

    # -- who is asked ----------------------------------------------------------------------------

    async def _answer(self, request: Request) -> Response:
        asked = _asked(request)
        if asked.path == "/health":
            return json_response({"status": "ok"})
        if not self._posts():
            return away("no gateway process is up: it is started again")
        if asked.method != "GET":
            # Who is nobody is told so before a body of theirs is held; heartbeats say in it who.
            if asked.path != "/heartbeat":
                door = await self._first(replace(asked, method="GET", target=_NOWHERE))
                if door.status_code != 404:
                    return door
            limit = MAX_PREVIEW_BYTES if asked.path == "/decisions" else MAX_BODY_BYTES
            asked = replace(asked, body=await read_body(request, limit))
        wanted = asked.query.get(PROCESS)
        if wanted is not None and asked.method == "GET":
            return await self._one(asked, wanted[0])
        root = "/" + asked.path[1:].partition("/")[0]
        if asked.method == "GET":
            return await self._read(root, asked)
        if root in ("/workers", "/add_worker", "/remove_worker", "/heartbeat", "/flush_cache"):
            return await self._change(root, asked)
        if asked.path == "/reload":
            return await self._reload(asked)
        if root == "/decisions":  # one that is only thought of: each would say the same
            return await self._first(asked)
        return await self._administer(asked)

    async def _read(self, root: str, asked: Asked) -> Response:
        if root in _OF_ALL:
            heard = await self._all(asked, READ_MS)
            if root in ("/decisions", "/revocations") and asked.path != root:
                return known(asked, heard)  # where it was made
            good = [each for each in heard if each.is_good]
            if not good or any(each.is_cut for each in heard):
                return worst(heard)
            if root == "/metrics":
                own = render({name: {(): value} for name, value in self._own_metrics().items()})
                pages = [(label(each.number), each.told.body) for each in good]
                page = await asyncio.to_thread(joined_pages, pages, own)
                return Response(page, headers={"content-type": header_of(good, b"content-type")})
            return json_response(joined(root, asked, good))
        if root == "/audit":  # each process has a log of its own
            return await self._one(asked, "0")
        return await self._first(asked)

    async def _one(self, asked: Asked, wanted: str) -> Response:
        """One process, by its number."""
        post = next((post for post in self._posts() if str(post.number) == wanted), None)
        if post is None:
            return away(f"process {wanted[:8]!r} is not up")
        heard = await self._ask(post, _without_process(asked))
        return away(f"process {post.number} ended") if heard is None else passed_back(heard)

    async def _first(self, asked: Asked) -> Response:
        """The first that is there."""
        for post in self._posts():
            heard = await self._ask(post, asked)
            if heard is not None:
                return passed_back(heard)
            if asked.method != "GET":
                break  # it may have been done
        return away("the process that was asked ended; ask again")

    async def _administer(self, asked: Asked) -> Response:
        """A change of the registry: whoever heard that it is done finds it done at each process."""
        response = await self._first(asked)
        if response.status_code < 300:
            catch_up = Asked(method="POST", target=CATCH_UP, is_our_own=True)
            done_by = response.headers.get(PROCESS_HEADER)
            others = [post for post in self._posts() if str(post.number) != done_by]
            await asyncio.gather(*(self._ask(post, catch_up, CATCH_UP_MS) for post in others))
        return response

    async def _reload(self, asked: Asked) -> Response:
        """The sources are read here, once; a process says whether who asks may have them read."""
        permitted = await self._first(asked)
        if permitted.status_code >= 300 or self.reload is None:
            return permitted
        by = msgspec.json.decode(permitted.body, type=Asking).by
        try:
            return json_response(await self.reload(by))
        except ConfigError as error:
            return problem_response(409, str(error), "config_refused")
        except AuditDown as error:
            return problem_response(error.status, str(error), error.code)

    async def note_reload(self, note: Note) -> None:
        """In the first process's audit log. Raises AuditDown for a wish."""
        body = msgspec.json.encode(note)
        answer = await self._first(
            Asked(method="POST", target=NOTE_RELOAD, body=body, is_our_own=True)
        )
        if answer.status_code >= 300 and not note.result:
            raise AuditDown("the audit log does not take that the settings are to be read")

    def _told(self, settings: bytes) -> Asked:
        return Asked(method="POST", target=TAKE_SETTINGS, body=settings, is_our_own=True)

    async def _change(self, root: str, asked: Asked) -> Response:
        """A change of what each process knows of workers."""
        if root == "/heartbeat":
            return worst(await self._all(asked, READ_MS))
        if asked.path.endswith("/check"):
            heard = await self._all(asked)
            if heard and all(each.is_good for each in heard):
                return json_response(joined_worker([(one.number, one.json) for one in heard]))
            return worst(heard)
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
            return away(f"process {missed[0]} did not answer, and may not have done it: ask again")
        return worst(heard)

    def keep(self, root: str, asked: Asked) -> None:
        """For processes to come. What is told anew to them is told by the operator."""
        name, verb = _change_of(root, asked)
        if not name or verb == "reset":
            return
        kept = self._kept.pop(name, [])
        again = Asked(method=asked.method, target=asked.target, body=asked.body, is_our_own=True)
        if verb in ("add", "remove"):
            kept = [again]
        elif verb == "amend":
            amends = [one for one in kept if _verb_of(one) == "amend"]
            gone = amends if asked.method == "PUT" else amends[: len(amends) + 1 - MAX_KEPT_AMENDS]
            kept = [*(one for one in kept if one not in gone), again]
        else:
            kept = [one for one in kept if _verb_of(one) in ("add", "remove", "amend")]
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
        except AnswerTooLong:
            return cut(post.number, MAX_ANSWER_BYTES)
        except GatewayError:
            return None
        return Heard(number=post.number, told=told)

    def _request(self, post: Post, asked: Asked) -> bytes:
        headers = list(asked.headers)
        if asked.is_our_own:
            headers.append((b"host", post.endpoint.host_header.encode()))
            if self._admin_key:
                headers.append((b"authorization", b"Bearer " + self._admin_key.encode()))
            if asked.body:
                headers.append((b"content-type", b"application/json"))
        else:  # what has a source is never taken for the parent's own word
            headers.append((SOURCE_HEADER.encode(), asked.source.encode()))
        headers += [
            (TOKEN_HEADER.encode(), self._token.encode()),
            (b"connection", b"close"),
            (b"content-length", str(len(asked.body)).encode()),
        ]
        # Without a Host, as HTTP/1.0 allows, it goes on without one: the door looks at it.
        version = "1.1" if any(name == b"host" for name, _ in headers) else "1.0"
        lines = [f"{asked.method} {asked.target} HTTP/{version}".encode("latin-1")]
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
        # The server leaves the body out for whoever asks by HEAD.
        method="GET" if request.method == "HEAD" else request.method,
        target=target,
        headers=headers,
        source=str(client[0]) if client else "",
    )


def _without_process(asked: Asked) -> Asked:
    path, _, query = asked.target.partition("?")
    kept = "&".join(part for part in query.split("&") if part.partition("=")[0] != PROCESS)
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
    if asked.method in ("PUT", "PATCH"):
        return _named(rest), "amend"
    name, _, verb = rest.rpartition("/")
    return _named(name), verb


def _verb_of(kept: Asked) -> str:
    return _change_of("/workers", kept)[1]


def _named(given: str) -> str:
    url = given if "://" in given else f"http://{given}"
    try:
        return given if worker_url_problem(url) else worker_name(url)
    except ConfigError:
        return given
