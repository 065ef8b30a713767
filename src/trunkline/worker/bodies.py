"""Reading a request's body, up to a bound."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request

from trunkline.worker.requests import BadRequest

MAX_BODY_BYTES = 64 << 20


async def read_body(request: Request, max_bytes: int) -> bytearray:
    """Raises BadRequest for a body beyond the bound, and where the client left."""
    raw = bytearray()
    try:
        async for part in request.stream():
            raw += part
            if len(raw) > max_bytes:
                raise BadRequest(f"the body is larger than {max_bytes} bytes", status=413)
    except ClientDisconnect as error:
        raise BadRequest("the client left") from error
    return raw


async def json_body(request: Request) -> dict[str, Any]:
    """Raises BadRequest."""
    raw = await read_body(request, MAX_BODY_BYTES)
    try:
        return msgspec.json.decode(raw, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadRequest("the body is not a JSON object") from error
