"""The headers that a gateway adds to a request: read strictly, and answered 400 where they are not
exactly right. Read `kv/tickets.py` for what a ticket says.
"""

from __future__ import annotations

from collections.abc import Sequence

from trunkline.kv.tickets import MAX_TICKET_BYTES, Ticket, read_ticket
from trunkline.worker.requests import BadRequest

HEADER = b"x-trunkline-ticket"


def ticket_from(headers: Sequence[tuple[bytes, bytes]]) -> Ticket | None:
    """The ticket among raw headers; None where there is none. Raises BadRequest."""
    raw = only(headers, HEADER, MAX_TICKET_BYTES)
    if raw is None:
        return None
    try:
        return read_ticket(raw)
    except ValueError as error:  # msgspec's are as well
        raise bad_header(HEADER, str(error)) from error


def bad_header(name: bytes, why: str) -> BadRequest:
    return BadRequest(f"{name.decode()}: {why}", name.decode())


def only(headers: Sequence[tuple[bytes, bytes]], name: bytes, max_bytes: int) -> bytes | None:
    """The value of a header that may be there once; None where it is not. Raises BadRequest."""
    found = [value for header, value in headers if header == name]
    if not found:
        return None
    if len(found) > 1:
        raise bad_header(name, "there are two")
    if len(found[0]) > max_bytes:
        raise bad_header(name, f"it has {len(found[0])} bytes, at most {max_bytes} are taken")
    return found[0]
