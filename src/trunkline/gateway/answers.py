"""What the gateway says in its own name: error bodies, small local answers, the error frame of a
stream.

Owns their shapes. Must never carry prompt text, a worker's address or more than 64 bytes of what a
client sent. Read `client.py` for who sends them.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from trunkline.errors import GatewayError
from trunkline.gateway.contracts import ClientError, Refusal

REASONS: dict[int, str] = {
    200: "OK", 400: "Bad Request", 401: "Unauthorized", 403: "Forbidden", 404: "Not Found",
    405: "Method Not Allowed", 408: "Request Timeout", 413: "Content Too Large",
    415: "Unsupported Media Type", 417: "Expectation Failed", 429: "Too Many Requests",
    431: "Request Header Fields Too Large", 500: "Internal Server Error", 502: "Bad Gateway",
    503: "Service Unavailable", 504: "Gateway Timeout", 505: "HTTP Version Not Supported",
}  # fmt: skip

_KINDS: dict[int, str] = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    408: "timeout", 429: "rate_limit_error", 503: "unavailable",
}  # fmt: skip

RETRY_AFTER_S = 1
ECHO_BYTES = 64
"""Most bytes of a client's words in any answer."""

NOT_FOUND = Refusal(status=404, code="not_found", message="there is nothing here")
"""One shape for unknown paths, admin paths and foreign things alike."""

SCOPE_WIDENING = Refusal(
    status=403,
    code="scope_widening",
    message="x-cache-scope may only narrow sharing: user, session or none",
)
UNREADABLE = Refusal(code="invalid_prompt", message="the prompt cannot be rendered or tokenised")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One whole local answer."""

    status: int
    body: bytes
    content_type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()
    code: str = ""
    """The refusal's code; empty for good answers."""


def refused(refusal: Refusal, request_id: str) -> Answer:
    """The answer to a client's message that is not served."""
    kind = _KINDS.get(refusal.status, "invalid_request_error")
    headers: tuple[tuple[str, str], ...] = ()
    if refusal.status in {429, 503}:
        headers = (("retry-after", str(RETRY_AFTER_S)),)
    elif refusal.status == 401:
        headers = (("www-authenticate", "Bearer"),)
    return Answer(
        status=refusal.status,
        body=_error_body(kind, refusal.code, refusal.message, refusal.param, request_id),
        headers=headers,
        code=refusal.code,
    )


def failed(error: GatewayError, request_id: str) -> Answer:
    """The answer where the gateway or the fleet is at fault."""
    if isinstance(error, ClientError):
        return refused(error.refusal, request_id)
    headers = error.headers
    if error.status in {429, 503}:
        headers = (("retry-after", str(error.retry_after_s)), *headers)
    return Answer(
        status=error.status,
        body=_error_body(error.kind, error.code, str(error), None, request_id),
        headers=headers,
        code=error.code,
    )


def encode(answer: Answer, request_id: str, *, keeps_alive: bool, has_body: bool) -> bytes:
    """The bytes of a local answer. `has_body` is False for HEAD."""
    lines = [
        f"HTTP/1.1 {answer.status} {REASONS[answer.status]}",
        f"content-type: {answer.content_type}",
        f"content-length: {len(answer.body)}",
        f"x-request-id: {request_id}",
    ]
    lines += [f"{name}: {value}" for name, value in answer.headers]
    if not keeps_alive:
        lines.append("connection: close")
    head = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
    return head + answer.body if has_body else head


_BROKEN = {502: "upstream_lost", 504: "timeout"}


def error_event(error: GatewayError, request_id: str, tokens_delivered: int) -> bytes:
    """The last event of a stream that broke after it had begun. No `[DONE]` follows it."""
    body = {
        "error": {
            "type": _BROKEN.get(error.status, error.kind),
            "code": error.code,
            "message": str(error),
            "param": None,
            "request_id": request_id,
            "tokens_delivered": tokens_delivered,
            "retryable": error.status >= 500,
        }
    }
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def quoted(text: object) -> str:
    """A client's word for use in a message: short, printable, quoted."""
    shown = str(text)[:ECHO_BYTES].encode("unicode_escape").decode("ascii")[: ECHO_BYTES - 2]
    return f"`{shown}`"


def unknown_model(name: str) -> Refusal:
    text = f"the model {quoted(name)} is not served here"
    return Refusal(status=404, code="model_not_found", message=text, param="model")


def _error_body(kind: str, code: str, message: str, param: str | None, request_id: str) -> bytes:
    error = {
        "message": message, "type": kind, "param": param, "code": code, "request_id": request_id,
    }  # fmt: skip
    return msgspec.json.encode({"error": error})
