"""Which block goes first where room is needed: the policies behind one interface.

All of them are leaf first (`residents.py`): what is left of a prefix is always whole. Time is the
number of uses. A block of which another worker has a live copy is worth only what fetching it saves
over computing it, so of two that are used alike the copied one goes first.

Must never: name a block that is held or has blocks after it, or read a clock. Read `residents.py`
next; docs/eviction.md has the policies and their figures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Protocol

from trunkline.core.frequency import Gdsf, S3Fifo, WTinyLfu
from trunkline.core.recency import Recency
from trunkline.core.residents import Order, Residents
from trunkline.core.reuse import Reuse
from trunkline.core.tournament import Tournament


class Evictor(Protocol):
    """Whose turn it is to go. It keeps no bytes; its owner removes what it names."""

    def add(
        self,
        key: bytes,
        parent: bytes,
        *,
        size_bytes: int,
        saved_ms: float = 0.0,
        copies: int = 0,
    ) -> None:
        """A block is resident from now on. Its parent need not be."""
        ...

    def touch(self, keys: Sequence[bytes]) -> None:
        """A prompt used this leading run, root first. What is not resident is passed over."""
        ...

    def hold(self, key: bytes) -> None:
        """No victim until it is released as often as it was held, and none before it either."""
        ...

    def release(self, key: bytes) -> None: ...

    def set_copies(self, key: bytes, copies: int) -> None:
        """Live copies elsewhere. Nothing happens where the block is not resident."""
        ...

    def remove(self, key: bytes) -> None:
        """It is resident no longer, whatever held it: there is nothing to release any more."""
        ...

    def victim(self) -> bytes | None:
        """What goes first of all that may; None where nothing may. It stays until it is removed."""
        ...


class Policy(Enum):
    """The names that `make_evictor` takes."""

    LRU = "lru"
    S3FIFO = "s3fifo"
    WTINYLFU = "wtinylfu"
    GDSF = "gdsf"
    REUSE = "reuse"
    TOURNAMENT = "tournament"
    """Each of the others on a sample; the best of them decides."""


DEFAULT_POLICY = Policy.TOURNAMENT

DEFAULT_COPIED_WORTH = 0.5
"""What is left of a block's worth while another worker has a live copy. A pull that pays takes at
most about half the time of computing: see the break-even of pulls."""


def make_evictor(
    name: str = DEFAULT_POLICY.value,
    *,
    capacity_bytes: int,
    copied_worth: float = DEFAULT_COPIED_WORTH,
) -> Evictor:
    """The evictor of that name, for a tier of so many bytes.

    `copied_worth` is one minus what a pull costs over what computing costs.
    """
    assert capacity_bytes > 0, capacity_bytes
    assert 0.0 <= copied_worth <= 1.0, copied_worth
    policy = Policy(name)
    makers = order_makers(copied_worth)
    if policy is Policy.TOURNAMENT:
        return Tournament({each.value: makers[each] for each in makers}, capacity_bytes)
    return Residents(makers[policy](capacity_bytes))


def order_makers(copied_worth: float) -> dict[Policy, Callable[[int], Order]]:
    """Makers of the orders that can be compared, for a capacity in bytes; the one that a tournament
    begins with comes first.
    """

    def sized(order: Callable[..., Order]) -> Callable[[int], Order]:
        return lambda capacity_bytes: order(
            capacity_bytes=capacity_bytes, copied_worth=copied_worth
        )

    def unsized(order: Callable[..., Order]) -> Callable[[int], Order]:
        return lambda _: order(copied_worth=copied_worth)

    return {
        Policy.REUSE: sized(Reuse),
        Policy.LRU: unsized(Recency),
        Policy.GDSF: unsized(Gdsf),
        Policy.S3FIFO: sized(S3Fifo),
        Policy.WTINYLFU: sized(WTinyLfu),
    }
