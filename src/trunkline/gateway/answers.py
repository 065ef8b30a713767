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

ANTHROPIC_ID = "request-id"
"""Where clients of that API look for what others find in `x-request-id`."""
RETRY_AFTER_S = 1
ECHO_BYTES = 64
"""Most bytes of a client's words in any answer."""

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


_ANTHROPIC_KINDS: dict[int, str] = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 500: "api_error", 502: "api_error",
    503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


def refused(refusal: Refusal, request_id: str, *, is_anthropic: bool = False) -> Answer:
    """The answer to a client's message that is not served. `is_anthropic`: in that API's shape,
    with the id where its clients look for it.
    """
    kind = _KINDS.get(refusal.status, "invalid_request_error")
    headers: tuple[tuple[str, str], ...] = ()
    if refusal.status in {429, 503}:
        headers = (("retry-after", str(RETRY_AFTER_S)),)
    elif refusal.status == 401:
        headers = (("www-authenticate", "Bearer"),)
    if is_anthropic:
        kind = _ANTHROPIC_KINDS.get(refusal.status, "invalid_request_error")
        headers = (*headers, (ANTHROPIC_ID, request_id))
    told = _error(kind, refusal.code, refusal.message, refusal.param)
    return Answer(
        status=refusal.status,
        body=_error_body(told, request_id, is_anthropic=is_anthropic),
        headers=headers,
        code=refusal.code,
    )


def failed(error: GatewayError, request_id: str, *, is_anthropic: bool = False) -> Answer:
    """The answer where the gateway or the fleet is at fault."""
    if isinstance(error, ClientError):
        return refused(error.refusal, request_id, is_anthropic=is_anthropic)
    headers = error.headers
    if error.status in {429, 503}:
        headers = (("retry-after", str(error.retry_after_s)), *headers)
    kind = error.kind
    if is_anthropic:
        kind = _ANTHROPIC_KINDS.get(error.status, "api_error")
        headers = (*headers, (ANTHROPIC_ID, request_id))
    told = _error(kind, error.code, str(error), None)
    return Answer(
        status=error.status,
        body=_error_body(told, request_id, is_anthropic=is_anthropic),
        headers=headers,
        code=error.code,
    )


def fields_of(answer: Answer, request_id: str) -> tuple[tuple[str, str], ...]:
    """The headers of a local answer, but for its framing."""
    code = (("x-router-error-code", answer.code),) if answer.code else ()
    named = (("content-type", answer.content_type), ("x-request-id", request_id))
    return (*named, *code, *answer.headers)


def encode(answer: Answer, request_id: str, *, keeps_alive: bool, has_body: bool) -> bytes:
    """The bytes of a local answer. `has_body` is False for HEAD."""
    lines = [
        f"HTTP/1.1 {answer.status} {REASONS[answer.status]}",
        f"content-length: {len(answer.body)}",
        *(f"{name}: {value}" for name, value in fields_of(answer, request_id)),
    ]
    if not keeps_alive:
        lines.append("connection: close")
    head = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
    return head + answer.body if has_body else head


_BROKEN = {502: "upstream_lost", 504: "timeout"}


def error_event(
    error: GatewayError, request_id: str, tokens_delivered: int, *, is_anthropic: bool = False
) -> bytes:
    """The last event of a stream that broke after it had begun. No `[DONE]` follows it."""
    told: dict[str, object] = {
        "type": _BROKEN.get(error.status, error.kind),
        "code": error.code,
        "message": str(error),
        "param": None,
        "request_id": request_id,
        "tokens_delivered": tokens_delivered,
        "retryable": error.status >= 500,
    }
    if not is_anthropic:
        return b"data: " + msgspec.json.encode({"error": told}) + b"\n\n"
    told["type"] = _ANTHROPIC_KINDS.get(error.status, "api_error")
    body = {"type": "error", "error": told, "request_id": request_id}
    return b"event: error\ndata: " + msgspec.json.encode(body) + b"\n\n"


def numbered_error_event(error: GatewayError, request_id: str, number: int) -> bytes:
    """As `error_event`, in a stream of `/v1/responses`, whose events bear numbers."""
    kind = _BROKEN.get(error.status, error.kind)
    told = _error(kind, error.code, str(error), None)
    body = {**told, "type": "error", "sequence_number": number}
    body["error"] = {**told, "request_id": request_id}
    return b"event: error\ndata: " + msgspec.json.encode(body) + b"\n\n"


def quoted(text: object) -> str:
    """A client's word for use in a message: short, printable, quoted."""
    shown = str(text)[:ECHO_BYTES].encode("unicode_escape").decode("ascii")[: ECHO_BYTES - 2]
    return f"`{shown}`"


def unknown_model(name: str) -> Refusal:
    text = f"the model {quoted(name)} is not served here"
    return Refusal(status=404, code="model_not_found", message=text, param="model")


def _error(kind: str, code: str, message: str, param: str | None) -> dict[str, object]:
    return {"message": message, "type": kind, "param": param, "code": code}


def _error_body(error: dict[str, object], request_id: str, *, is_anthropic: bool) -> bytes:
    error["request_id"] = request_id
    if is_anthropic:
        return msgspec.json.encode({"type": "error", "error": error, "request_id": request_id})
    return msgspec.json.encode({"error": error})
