"""What tenants may hold of a store, as their tickets say it of the device.

A tenant's share of the device is its share of the store. As many quotas are told as the store
keeps; at the bound the one told first is taken back, until its tenant asks again. Read `shelf.py`
for what a quota does.
"""

from __future__ import annotations

from trunkline.kv.shelf import MAX_QUOTAS
from trunkline.kv.store import BlockStore
from trunkline.kv.tickets import Ticket

MAX_SHARES = MAX_QUOTAS


class Shares:
    """The quotas that one store has been told."""

    def __init__(self, store: BlockStore, device_share: float) -> None:
        """`device_share`: the store's size over the device's."""
        self._store = store
        self._device_share = device_share
        self.told: dict[str, tuple[int, int | None]] = {}
        """Floor and cap in bytes, oldest first."""

    def tell(self, ticket: Ticket) -> None:
        """Somebody with this ticket uses the store."""
        floor = int(ticket.floor_bytes * self._device_share)
        cap = None if ticket.cap_bytes is None else int(ticket.cap_bytes * self._device_share)
        if self.told.get(ticket.tenant, (0, None)) == (floor, cap):
            return
        if ticket.tenant not in self.told and len(self.told) >= MAX_SHARES:
            oldest = next(iter(self.told))
            del self.told[oldest]
            self._store.set_quota(oldest)
        if self._store.set_quota(ticket.tenant, floor_bytes=floor, cap_bytes=cap):
            self.told[ticket.tenant] = (floor, cap)
