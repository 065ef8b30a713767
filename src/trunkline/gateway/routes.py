"""What a client path is, judged on the raw bytes of the request target.

Owns the table of the client listener. The very bytes that are judged here are forwarded; nothing is
decoded, normalised or joined in between, so that what was authorised is what is served. Read
`client.py` next.
"""

from __future__ import annotations

import re
from enum import Enum

from trunkline.gateway.contracts import ClientError, Refusal, Route
from trunkline.gateway.fields import FORBIDDEN
from trunkline.gateway.spelling import meant_by


class Local(Enum):
    """What the gateway answers itself."""

    MODELS = "models"
    HEALTH = "health"
    LIVENESS = "liveness"
    READINESS = "readiness"
    VERSION = "version"


_TABLE: dict[bytes, Route | Local] = {
    b"/v1/chat/completions": Route.CHAT,
    b"/v1/completions": Route.COMPLETION,
    b"/v1/models": Local.MODELS,
    b"/health": Local.HEALTH,
    b"/liveness": Local.LIVENESS,
    b"/live": Local.LIVENESS,
    b"/healthz": Local.LIVENESS,
    b"/readiness": Local.READINESS,
    b"/readyz": Local.READINESS,
    b"/version": Local.VERSION,
}

# Engines serve these beside the API; they change the worker for everybody.
_ENGINE_ADMIN = frozenset({b"/v1/load_lora_adapter", b"/v1/unload_lora_adapter"})

# One segment is one or more plain characters, never `.` or `..`. A path has no escapes: a worker
# would decode them, and read another path than the one that was judged here.
_PATH = re.compile(rb"(?:/(?!\.{1,2}(?:/|\Z))[A-Za-z0-9._~!$&'()*+,=:@-]++)++/?|/")
_QUERY = re.compile(rb"(?:[A-Za-z0-9._~!$&'()*+,=:@/?-]|%(?!00|0[aAdD])[0-9A-Fa-f]{2})*+")

_POST = ("POST",)
_ANY = ("GET", "POST")
_READ = ("GET", "HEAD")


def route_of(target: bytes) -> Route | Local | None:
    """What `target` is; None where there is nothing. Raises ClientError for no sound target."""
    known = _TABLE.get(target)
    if known is not None:
        return known
    path, mark, query = target.partition(b"?")
    if _PATH.fullmatch(path) is None or (mark and _QUERY.fullmatch(query) is None):
        text = "the request target is not a plain path, without escapes, with an optional query"
        raise ClientError(Refusal(code="invalid_target", message=text))
    if mark:
        _check_names(query.decode("ascii"))
    known = _TABLE.get(path)
    if known is not None:
        return known
    bare = path.rstrip(b"/")
    if path.startswith(b"/v1/") and bare not in _ENGINE_ADMIN and bare not in _TABLE:
        return Route.OTHER
    return None


def _check_names(query: str) -> None:
    """What a body may not say, a query may not. Raises ClientError."""
    for pair in query.split("&"):
        meant = meant_by(pair.partition("=")[0], FORBIDDEN)
        if meant is not None:
            text = f"{meant} is not taken from clients, in no query either"
            raise ClientError(Refusal(code="forbidden_field", message=text, param=meant))


def allowed_methods(route: Route | Local) -> tuple[str, ...]:
    """Checked against, and told in the Allow header."""
    match route:
        case Route.CHAT | Route.COMPLETION:
            return _POST
        case Route.OTHER:
            return _ANY
        case _:
            return _READ
