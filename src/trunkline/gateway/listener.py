"""The admin port's door: the socket, who comes in, how much they may bring.

Owns binding (never beyond loopback without a key), the bearer check, the defence of the keyless
loopback port against web pages, and the bounds on bodies and queries. Whoever comes in is a
`Caller`: the operator by the admin key, others by an API key of the registry. Must decide nothing
about what a caller may do. Read `permissions.py` for that, `admin.py` next.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import re
import socket
from collections.abc import Generator, Mapping
from typing import Any, Protocol, TypeVar

import msgspec
import uvicorn
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from trunkline.config import ListenConfig
from trunkline.core.credentials import KEY_PREFIX
from trunkline.core.principals import Principal
from trunkline.errors import ConfigError
from trunkline.gateway.authenticate import bearer
from trunkline.gateway.backend import Call, Caller
from trunkline.gateway.lasting import LastingAnswers
from trunkline.written import is_loopback, is_printable_ascii, nearest

MAX_BODY_BYTES = 1 << 20
BODY_TIMEOUT_S = 10.0
# A digest-mode worker keeps one connection for its heartbeats: 1,000 of them, ranks, and operators.
MAX_CONNECTIONS = 4_096
GRACE_S = 5

DASHBOARD = "/dashboard"
"""Under it lies the page that needs no key, and its data, which does."""

_MAX_REQUEST_ID_CHARS = 64
_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.{1,80})`")
"""As msgspec has it of a body's own field; of one further in, it says where that is."""

_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
_CODES = {
    400: "bad_request",
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "payload_too_large",
}


def bind_admin(listen: ListenConfig) -> socket.socket:
    """A listening socket. Raises ConfigError where the address is taken, or open without a key."""
    host, port = listen.admin_host, listen.admin_port
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        # What the name stands for decides, not the name.
        if not listen.admin_api_key and not is_loopback(str(address[0])):
            raise ConfigError(
                f"admin_host = {host} is reachable from other machines; set --admin-api-key"
            )
        return _listening(family, address)
    except OSError as error:
        raise ConfigError(f"admin listener {host}:{port}: {error.strerror}") from error


def _listening(family: int, address: Any) -> socket.socket:  # Any: its shape depends on the family
    # Named TCP, as asyncio switches Nagle's algorithm off on such sockets only (40 ms an answer).
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener


async def serve_admin(app: ASGIApp, listener: socket.socket, stop: asyncio.Event) -> None:
    """Serve until `stop` is set, then let open requests end. Owns `listener`; steals no signals."""
    answers = LastingAnswers(app, stop)
    server = _Server(
        uvicorn.Config(
            answers,
            http="h11",  # bounds the head, which httptools leaves to its user
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=GRACE_S,
        )
    )
    answers.connections = server.server_state.connections
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(server.serve(sockets=[listener]))
            await stop.wait()
            server.should_exit = True
    finally:
        # Cancelled, uvicorn leaves all of this open. The loop must let go before the socket closes.
        for accepting in server.servers:
            accepting.close()
        listener.close()
        for connection in list(server.server_state.connections):
            connection.transport.close()


class _Server(uvicorn.Server):
    """uvicorn inside somebody else's loop: signals belong to that loop's owner."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.servers = []  # uvicorn makes it at start-up, which a cancelled one may not reach

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


class AdminKey:
    """The operator's key. A reload may make it another one, never none."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


class Door(Protocol):
    """Who knows API keys; `backend.TenancyBackend` is one."""

    def principal(self, authorization: bytes, source: str) -> Principal | None: ...

    def refused(self, caller: Caller | None, action: str, source: str, why: str) -> None: ...


class Guard:
    """Who comes in. `/health` and the `open_paths` are open; `/heartbeat` checks for itself, by the
    worker's key.

    The admin key is the operator, and so is, without one, whoever reaches the port and brings no
    credential: where there are API keys, a wrong one is refused rather than taken for none.
    """

    def __init__(
        self, app: ASGIApp, *, key: AdminKey, door: Door | None, open_paths: tuple[str, ...] = ()
    ) -> None:
        self._app = app
        self._key = key
        self._open = frozenset(("/health", "/heartbeat", *open_paths))
        self._door = door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", scope["type"]
        headers = Headers(scope=scope)
        admitted = self._admitted(scope, headers)
        if isinstance(admitted, Caller):
            scope["trunkline.caller"] = admitted
            await self._app(scope, receive, send)
        else:
            await (admitted or self._app)(scope, receive, send)

    def _admitted(self, scope: Scope, headers: Headers) -> Caller | Response | None:
        """The caller, the refusal, or None for a path that needs no caller."""
        problem = page_problem(headers, is_keyless=not self._key.text)
        if problem:
            return problem_response(403, problem)
        if scope["path"] in self._open:
            return None
        source = str(scope["client"][0]) if scope.get("client") else ""
        request_id = _request_id(headers)
        authorization = headers.get("authorization", "").encode("latin-1")
        is_key = bearer(authorization).startswith(KEY_PREFIX)
        # Whoever brings a credential is who it says, or nobody: a mistyped key is no operator's.
        is_named = authorization != b"" and self._door is not None
        if is_bearer(headers, self._key.text) and (self._key.text or not is_named):
            return Caller(principal=None, source=source, request_id=request_id)
        if self._door is None:
            return unauthorized()
        principal = self._door.principal(authorization, source) if is_key else None
        if principal is None:
            self._door.refused(None, "admin.enter", source, "no valid credential")
            return unauthorized()
        return Caller(principal=principal, source=source, request_id=request_id)


def caller_of(request: Request) -> Caller:
    """Whom the guard let in."""
    caller = request.scope["trunkline.caller"]
    assert isinstance(caller, Caller)
    return caller


def call_of(request: Request) -> Call:
    """What the request may do, as `admin.py` found in the table."""
    call = request.scope["trunkline.call"]
    assert isinstance(call, Call)
    return call


def _request_id(headers: Headers) -> str:
    """What the caller calls this request, where it can stand in a record."""
    given = headers.get("x-request-id", "")
    return given if len(given) <= _MAX_REQUEST_ID_CHARS and is_printable_ascii(given) else ""


def is_bearer(headers: Headers, key: str) -> bool:
    """Whether the request carries this key; an empty one asks for nothing. Takes constant time."""
    if not key:
        return True
    scheme, _, given = headers.get("authorization", "").partition(" ")
    # The header came as Latin-1; a key in another alphabet was sent as UTF-8.
    is_equal = hmac.compare_digest(given.strip().encode("latin-1"), key.encode("utf-8"))
    return is_equal and scheme.lower() == "bearer"


def page_problem(headers: Headers, *, is_keyless: bool) -> str | None:
    """Why the request looks like a web page's, made by a browser on this machine; None if not.

    Without a key the port trusts whoever is on the machine, and a page in a browser is not: it may
    send simple requests anywhere, and reach loopback under a name of its own.
    """
    host = headers.get("host", "")
    origin = headers.get("origin")
    if origin is not None and origin.partition("://")[2] != host:
        return "requests from other web pages are not taken"
    if is_keyless:
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if not is_loopback(name):
            return f"without a key the Host must be a loopback address, not {name[:80]!r}"
    return None


async def read_body(request: Request, most_bytes: int = MAX_BODY_BYTES) -> bytes:
    """The whole body, bounded in size and time."""
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length[:12]) > most_bytes:
        raise HTTPException(413, f"the body is larger than {most_bytes} bytes")
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > most_bytes:
                    raise HTTPException(413, f"the body is larger than {most_bytes} bytes")
    except TimeoutError as error:
        raise HTTPException(408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from error
    except ClientDisconnect as error:
        raise HTTPException(400, "the client left before its body ended") from error
    return bytes(body)


_Body = TypeVar("_Body")


def decode(decoder: msgspec.json.Decoder[_Body], raw: bytes) -> _Body:
    """The body as what it should be. Raises HTTPException (400) that says what is wrong with it."""
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        text = f"the body is not what is expected: {error}{_meant(decoder, str(error))}"
        raise HTTPException(400, text) from error


def _meant(decoder: msgspec.json.Decoder[Any], error: str) -> str:
    """The field that was probably meant, where one of the body itself is not known."""
    unknown = _UNKNOWN_FIELD.fullmatch(error)
    if unknown is None:
        return ""
    body: Any = decoder.type  # only structs have fields that are not known
    known = [field.encode_name for field in msgspec.structs.fields(body)]
    near = nearest(unknown[1], known)
    return f", did you mean {near}?" if near else ""


def query_of(request: Request, *known: str) -> dict[str, str]:
    """The query's parameters, none unknown and none twice. Raises HTTPException (400)."""
    query: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name not in known or name in query:
            names = ", ".join(known) or "none"
            raise HTTPException(400, f"parameter {name[:80]!r} is unknown or twice; known: {names}")
        query[name] = value
    return query


def whole_number(query: Mapping[str, str], name: str, default: int, low: int, high: int) -> int:
    """A parameter that is a number within bounds. Raises HTTPException (400)."""
    if name not in query:
        return default
    text = query[name]
    number = int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else low - 1
    if not low <= number <= high:
        raise HTTPException(400, f"{name} is not a number from {low} to {high}")
    return number


def json_response(
    content: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """`content` is a record or what JSON knows; numbers that are not finite become null."""
    body = msgspec.json.encode(content)
    return Response(body, status, {"cache-control": "no-store"} | dict(headers or {}), _JSON)


def problem_response(status: int, message: str, code: str = "") -> Response:
    """An error in the one shape that all have."""
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "internal_error")
    code = code or _CODES.get(status, "internal_error")
    error = {"message": message[:500], "type": kind, "param": None, "code": code}
    return json_response({"error": error}, status)


def missing() -> Response:
    """One shape for whatever nobody knows, or not to this caller: path, worker, tenant, key."""
    return problem_response(404, "there is nothing here")


def unauthorized() -> Response:
    """One answer for a missing key and for a wrong one."""
    response = problem_response(401, "a valid bearer key is needed")
    response.headers["www-authenticate"] = "Bearer"
    return response


_JSON = "application/json"
