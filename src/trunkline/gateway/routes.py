"""What a client path is, judged on the raw bytes of the request target.

Owns the table of the client listener. The very bytes that are judged here are forwarded; nothing is
decoded, normalised or joined in between, so that what was authorised is what is served. Read
`client.py` next.
"""

from __future__ import annotations

import re
from dataclasses import replace
from enum import Enum

from trunkline.gateway.answers import Answer, quoted
from trunkline.gateway.contracts import ClientError, Refusal, Route
from trunkline.gateway.fields import FORBIDDEN
from trunkline.gateway.spelling import meant_by


class Local(Enum):
    """What the gateway answers itself."""

    MODELS = "models"
    MODEL = "model"
    """One of them, by its name."""
    HEALTH = "health"
    LIVENESS = "liveness"
    READINESS = "readiness"
    VERSION = "version"
    PREFLIGHT = "preflight"
    """A browser asks whether a page may ask; no path is this by itself."""

    def __init__(self, name: str) -> None:
        self.label = name
        """In metrics."""
        self.is_for_callers = name in {"models", "model"}
        """What it says depends on who asks."""

    __hash__ = object.__hash__  # as that of `Route`


_TABLE: dict[bytes, Route | Local] = {
    b"/v1/chat/completions": Route.CHAT,
    b"/v1/completions": Route.COMPLETION,
    b"/v1/messages": Route.MESSAGES,
    b"/v1/messages/count_tokens": Route.COUNT_TOKENS,
    b"/v1/responses": Route.RESPONSES,
    b"/v1/embeddings": Route.EMBEDDINGS,
    b"/v1/rerank": Route.SCORES,
    b"/rerank": Route.SCORES,
    b"/v1/score": Route.SCORES,
    b"/score": Route.SCORES,
    b"/tokenize": Route.TOKENIZE,
    b"/detokenize": Route.TOKENIZE,
    b"/v1/audio/transcriptions": Route.AUDIO,
    b"/v1/audio/translations": Route.AUDIO,
    b"/v1/models": Local.MODELS,
    b"/health": Local.HEALTH,
    b"/liveness": Local.LIVENESS,
    b"/live": Local.LIVENESS,
    b"/healthz": Local.LIVENESS,
    b"/readiness": Local.READINESS,
    b"/readyz": Local.READINESS,
    b"/version": Local.VERSION,
}

_MODEL = b"/v1/models/"

# Engines serve these beside the API; they change the worker for everybody.
_ENGINE_ADMIN = frozenset({b"/v1/load_lora_adapter", b"/v1/unload_lora_adapter"})

# One segment is one or more plain characters, never `.` or `..`. A path has no escapes: a worker
# would decode them, and read another path than the one that was judged here.
_PATH = re.compile(rb"(?:/(?!\.{1,2}(?:/|\Z))[A-Za-z0-9._~!$&'()*+,=:@-]++)++/?|/")
_QUERY = re.compile(rb"(?:[A-Za-z0-9._~!$&'()*+,=:@/?-]|%(?!00|0[aAdD])[0-9A-Fa-f]{2})*+")

_METHODS: dict[Route | Local, tuple[str, ...]] = {
    **dict.fromkeys(Route, ("POST",)),
    Route.OTHER: ("GET", "POST"),
    **dict.fromkeys(Local, ("GET", "HEAD")),
    Local.PREFLIGHT: ("OPTIONS",),
}


def route_of(target: bytes) -> Route | Local | None:
    """What `target` is; None where there is nothing. Raises ClientError for no sound target."""
    known = _TABLE.get(target)
    if known is not None:
        return known
    path, mark, query = target.partition(b"?")
    path = _named_model(path)
    if _PATH.fullmatch(path) is None or (mark and _QUERY.fullmatch(query) is None):
        text = "the request target is not a plain path, without escapes, with an optional query"
        raise ClientError(Refusal(code="invalid_target", message=text))
    if mark:
        _check_names(query.decode("ascii"))
    known = _TABLE.get(path)
    if known is not None:
        return known
    bare = path.rstrip(b"/")
    if bare in _ENGINE_ADMIN or bare in _TABLE or path.startswith(b"/v1/v1/"):
        return None
    if path.startswith(_MODEL):
        return Local.MODEL
    return Route.OTHER if path.startswith(b"/v1/") else None


def model_in(target: bytes) -> str:
    """The name in the path of one model."""
    path = _named_model(target.partition(b"?")[0])
    return path.removeprefix(_MODEL).decode("ascii")


def unknown_path(target: bytes) -> Refusal:
    """The one refusal of all paths that are not there: admin paths, and those of others' engines,
    look like any other. It says what may have been meant, by the path alone.
    """
    path = target.partition(b"?")[0]
    text = f"there is nothing at {quoted(path.decode('ascii', 'replace'))}"
    bare = path.rstrip(b"/")
    for meant in (bare, b"/v1" + bare, bare.removeprefix(b"/v1")):
        if meant in _TABLE:
            text += f"; did you mean {meant.decode('ascii')}?"
            break
    return Refusal(status=404, code="not_found", message=text)


def _named_model(path: bytes) -> bytes:
    """Clients escape the slash in the name of a model. That path is forwarded to nobody, so that
    nobody reads it otherwise.
    """
    return re.sub(rb"%2[Ff]", b"/", path) if path.startswith(_MODEL) else path


def _check_names(query: str) -> None:
    """What a body may not say, a query may not. Raises ClientError."""
    for pair in query.split("&"):
        meant = meant_by(pair.partition("=")[0], FORBIDDEN)
        if meant is not None:
            text = f"{meant} is not taken from clients, in no query either"
            raise ClientError(Refusal(code="forbidden_field", message=text, param=meant))


def allowed_methods(route: Route | Local) -> tuple[str, ...]:
    """Checked against, and told in the Allow header."""
    return _METHODS[route]


def with_methods(answer: Answer, route: Route | Local | None) -> Answer:
    """An answer that says that a method is not allowed says which are."""
    if answer.status != 405 or route is None:
        return answer
    allow = ("allow", ", ".join(allowed_methods(route)))
    return replace(answer, headers=(*answer.headers, allow))
