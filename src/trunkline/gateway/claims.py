"""What the head of a request claims of it: its name, its type, its coding, its expectations.

Owns which of these claims are taken. Must never look at the body. Read `client.py` next.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from trunkline.core.identity import ScopeKind
from trunkline.gateway.answers import SCOPE_WIDENING
from trunkline.gateway.contracts import ClientError, Refusal
from trunkline.gateway.head import RequestHead

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,64}")
_JSON = re.compile(rb"application/json\s*(?:;\s*charset=\"?utf-?8\"?\s*)?", re.IGNORECASE)
_JSON_LIKE = re.compile(rb"[a-z]+/(?:json|[a-z0-9.+-]+\+json)\s*(?:;.*)?", re.IGNORECASE)
_SCOPES = {
    b"user": ScopeKind.USER, b"session": ScopeKind.SESSION, b"none": ScopeKind.NONE,
}  # fmt: skip


def claimed_names(
    head: RequestHead, names: Sequence[bytes] = (b"x-request-id",)
) -> tuple[str, str]:
    """The request id that the client wishes, if it is a good one; and what it wished, escaped and
    cut short, if it is none. It is in the first of the headers with these names that is there.
    """
    for name in names:
        wish = head.headers.get(name)
        if wish is not None:
            break
    else:
        return "", ""
    if _REQUEST_ID.fullmatch(wish) is not None:
        return wish.decode("ascii"), ""
    return "", wish[:64].decode("latin-1").encode("unicode_escape").decode("ascii")[:64]


def wished_scope(headers: dict[bytes, bytes]) -> ScopeKind | None:
    """The narrower scope that the client wishes, if any. Raises ClientError for any other word."""
    wish = headers.get(b"x-cache-scope")
    if wish is None:
        return None
    kind = _SCOPES.get(wish.lower())
    if kind is None:
        raise ClientError(SCOPE_WIDENING)
    return kind


def check_media(head: RequestHead, *, is_read: bool) -> None:
    """Raises ClientError for a body that could not be taken. `is_read`: it has to be JSON."""
    coding = head.headers.get(b"content-encoding")
    if coding is not None and coding.lower() != b"identity":
        text = "the body must not be compressed"
        raise ClientError(Refusal(status=415, code="content_encoding", message=text))
    kind = head.headers.get(b"content-type", b"")
    if is_read and kind != b"application/json" and _JSON.fullmatch(kind) is None:
        text = "the content type must be application/json, in UTF-8"
        raise ClientError(Refusal(status=415, code="content_type", message=text))


def is_json(head: RequestHead) -> bool:
    """Whether the body is said to be JSON; so is one of which nothing is said."""
    kind = head.headers.get(b"content-type")
    return kind is None or _JSON_LIKE.fullmatch(kind) is not None


def expects_answer(head: RequestHead) -> bool:
    """Whether the client waits to be told to go on. Raises ClientError for other expectations."""
    expectation = head.headers.get(b"expect")
    if expectation is None:
        return False
    if expectation.lower() != b"100-continue":
        text = "only 100-continue can be expected"
        raise ClientError(Refusal(status=417, code="unknown_expectation", message=text))
    return True
