"""Who has how many of a bounded number of places, and who may have one more.

Must never: let one tenant alone have all of them. Read `front.py` for who asks.
"""

from __future__ import annotations

from trunkline.core.principals import Principal

UNRESERVED = 7 / 8
"""The share of all places that one tenant alone may have: the rest is kept for those who ask for
little.
"""


class Places:
    """Bounded by who asks `is_full` before each `begin`."""

    def __init__(self) -> None:
        self.taken = 0
        self._running: dict[str, int] = {}
        """By tenant; those who have none are not in it."""

    def __len__(self) -> int:
        """Tenants of which something runs."""
        return len(self._running)

    def is_full(self, principal: Principal, busy: int, most: int) -> bool:
        """Whether, where `busy` of `most` places are taken, there is none for this caller's tenant.
        Of the reserve, only those have any who have less than an equal share of all.
        """
        if busy < most * UNRESERVED or principal.auth_method == "off":
            return busy >= most  # where all are one tenant nothing is reserved
        running = self._running
        tenants = len(running) + (principal.tenant not in running)
        share = most / (tenants + 1)  # one more may come
        return busy >= most or running.get(principal.tenant, 0) >= share

    def begin(self, principal: Principal) -> None:
        """One more request of this tenant runs, until `end`."""
        self.taken += 1
        self._running[principal.tenant] = self._running.get(principal.tenant, 0) + 1

    def end(self, principal: Principal) -> None:
        self.taken -= 1
        left = self._running.pop(principal.tenant) - 1
        if left:
            self._running[principal.tenant] = left
