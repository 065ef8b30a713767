"""The headers of pulls: `x-trunkline-pull` of a request, `x-trunkline-pulled` of its answer.

Read `kv/orders.py` for what they say, `pulls.py` for what is done with an order.
"""

from __future__ import annotations

from collections.abc import Sequence

from trunkline.core.transfer import MAX_ORDER_BYTES
from trunkline.kv.orders import PullOrder, read_order
from trunkline.worker.ticket import bad_header, only

HEADER = b"x-trunkline-pull"
ANSWER_HEADER = b"x-trunkline-pulled"


def order_from(headers: Sequence[tuple[bytes, bytes]]) -> PullOrder | None:
    """The order among raw headers; None where there is none. Raises BadRequest where it is not of
    this shape. An address or a name that nothing can be pulled by is the pull's fault, not the
    client's.
    """
    raw = only(headers, HEADER, MAX_ORDER_BYTES)
    if raw is None:
        return None
    try:
        return read_order(raw)
    except ValueError as error:  # msgspec's are as well
        raise bad_header(HEADER, str(error)) from error
