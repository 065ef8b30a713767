"""What a request carries from the gateway: `kv_transfer_params.trunkline`, read strictly.

    {"trunkline": {"ticket": {...}, "name": "...", "pull": {...}}}      the last two may be absent

A client cannot write it: the gateway takes its own away. Whatever is not exactly right counts as
not given: such a request neither fills nor uses the store, and is computed. Read `kv/tickets.py`
and `kv/orders.py` for what is in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from trunkline.connectors.messages import PullWish
from trunkline.core.transfer import Grant, read_grant
from trunkline.kv.orders import read_order
from trunkline.kv.tickets import Ticket, read_ticket

NAME = "trunkline"
MAX_NAME_CHARACTERS = 64
MAX_WISH_BYTES = 32_768
"""A ticket and an order at their own bounds."""


class _Wire(msgspec.Struct, kw_only=True):
    ticket: msgspec.Raw
    name: Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARACTERS)] = ""
    pull: msgspec.Raw = msgspec.Raw(b"null")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What a gateway said of one request."""

    ticket: Ticket
    pull: PullWish | None
    grant: Grant | None
    """Of `pull`; None where there is none that can be read."""


def read_wishes(params: Mapping[str, Any] | None, transfer_key: bytes) -> Wishes | None:
    """None where nothing was said. Raises ValueError for what makes no sense."""
    said: Any = params.get(NAME) if params else None  # any JSON
    if said is None:
        return None
    try:
        raw = msgspec.json.encode(said)
        if len(raw) > MAX_WISH_BYTES:
            raise ValueError(f"it has {len(raw)} bytes, at most {MAX_WISH_BYTES} are taken")
        wire = msgspec.json.decode(raw, type=_Wire)
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    ticket = read_ticket(bytes(wire.ticket))
    pull = bytes(wire.pull)
    if pull == b"null":
        return Wishes(ticket=ticket, pull=None, grant=None)
    order = read_order(pull)
    grant = read_grant(order.grant, transfer_key) if transfer_key else None
    return Wishes(ticket=ticket, pull=PullWish(name=wire.name, order=order), grant=grant)
