"""Which web pages may use the API from a browser: those whose origins the operator named, or none.

Owns the headers that a browser asks for (CORS). Nobody is let in by them: a key is asked for as
ever, and cookies are never. Must never: echo what a page wrote into an answer unchecked. Read
`client.py` for who asks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from trunkline.gateway.answers import Answer
from trunkline.gateway.head import RequestHead
from trunkline.gateway.routes import Local

ANY = "*"
MAX_ASKED_BYTES = 1_024
_NAMES = re.compile(rb"[a-z0-9-]+(?:, ?[a-z0-9-]+)*", re.IGNORECASE)
_USUAL_NAMES = "authorization, content-type"
_SHOWN = (
    "x-request-id, request-id, retry-after, x-trunkline-decision, x-trunkline-session, "
    "x-router-error-code, "
    "x-ratelimit-limit-requests, x-ratelimit-remaining-requests, x-ratelimit-limit-tokens, "
    "x-ratelimit-remaining-tokens"
)

Known = TypeVar("Known")
Lines = tuple[tuple[str, str], ...]


class Browsers:
    """`origins` as the settings have them; none for no pages at all."""

    def __init__(self, origins: Sequence[str] = ()) -> None:
        self._origins = frozenset(origins)

    def lines(self, headers: Mapping[bytes, bytes]) -> Lines:
        """What an answer to a request with these headers says of it; nothing to all others."""
        if not self._origins:
            return ()
        origin = headers.get(b"origin")
        if origin is None:
            return () if ANY in self._origins else (("vary", "origin"),)
        name = origin.decode("latin-1")
        if ANY in self._origins:
            return (("access-control-allow-origin", ANY), ("access-control-expose-headers", _SHOWN))
        if name not in self._origins:
            return (("vary", "origin"),)
        return (
            ("access-control-allow-origin", name),
            ("access-control-expose-headers", _SHOWN),
            ("vary", "origin"),
        )

    def marked(self, answer: Answer, headers: Mapping[bytes, bytes]) -> Answer:
        """An answer of ours, with what a browser has to know of it."""
        lines = self.lines(headers)
        return replace(answer, headers=(*answer.headers, *lines)) if lines else answer

    def route(self, head: RequestHead, known: Known) -> Known | Local:
        """A browser's question whether it may ask, where its page may; else what is there."""
        if head.method != "OPTIONS" or not self._origins or known is None:
            return known
        is_asking = b"access-control-request-method" in head.headers
        is_named = any(name.endswith("allow-origin") for name, _ in self.lines(head.headers))
        return Local.PREFLIGHT if is_asking and is_named else known


def permitted(headers: Mapping[bytes, bytes]) -> Answer:
    """The answer to that question: any method that the path has, and the headers it asked for."""
    asked = headers.get(b"access-control-request-headers", b"")
    is_plain = len(asked) <= MAX_ASKED_BYTES and _NAMES.fullmatch(asked) is not None
    names = asked.decode("ascii") if is_plain else _USUAL_NAMES
    return Answer(
        status=200,
        body=b"",
        headers=(
            ("access-control-allow-methods", "GET, POST"),
            ("access-control-allow-headers", names),
            ("access-control-max-age", "600"),
        ),
    )
