"""What a worker tells of the end of a pull, in a header of its answer or with a lease.

Believed only as far as it can be of the order that it is about. Read `pulls.py` for what it
teaches, `kv/orders.py` for the other end.
"""

from __future__ import annotations

import msgspec

from trunkline.core.transfer import PullEnd, Reason

MAX_TOLD_BYTES = 1_024
_MOST_MS = 1e9


class First(msgspec.Struct, kw_only=True):
    """How the first source failed."""

    reason: Reason
    ms: float = 0.0


class Told(msgspec.Struct, kw_only=True):
    """What is said; what else is said is passed over."""

    end: PullEnd
    reason: Reason | None = None
    blocks: int = msgspec.field(default=0)
    ms: float = 0.0
    first: First | None = None
    """Where the other source was asked: all else is about that one."""

    def is_of(self, block_count: int) -> bool:
        """Whether it can be of an order of so many blocks."""
        times = (self.ms, self.first.ms if self.first else 0.0)
        return 0 <= self.blocks <= block_count and all(0.0 <= ms < _MOST_MS for ms in times)


def read_told(told: bytes) -> Told | None:
    """None for what says nothing sensible."""
    if len(told) > MAX_TOLD_BYTES:
        return None
    try:
        return msgspec.json.decode(told, type=Told)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
