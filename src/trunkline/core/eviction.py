"""Which block goes first where room is needed: the policies behind one interface.

All of them are leaf first (`residents.py`): what is left of a prefix is always whole. Time is the
number of uses. A block of which another worker has a live copy is worth only what fetching it saves
over computing it, so of two that are used alike the copied one goes first.

Must never: name a block that is held or has blocks after it, or read a clock. Read `residents.py`
next.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

from trunkline.core.recency import Recency
from trunkline.core.residents import Residents


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


def make_evictor(name: str, *, capacity_bytes: int, copied_worth: float = 0.5) -> Evictor:
    """The evictor of that name, for a tier of so many bytes.

    `copied_worth` is what is left of a block's worth while another worker has a live copy: one
    minus what a pull costs over what computing costs.
    """
    assert capacity_bytes > 0, capacity_bytes
    assert 0.0 <= copied_worth <= 1.0, copied_worth
    policy = Policy(name)
    match policy:
        case Policy.LRU:
            return Residents(Recency(copied_worth=copied_worth))
