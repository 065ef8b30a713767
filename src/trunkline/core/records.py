"""The small types every other core module speaks: identifiers, instants, tiers.

Owns no behaviour. Read `identity.py` next.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NewType

WorkerId = NewType("WorkerId", str)
"""Name of one worker. A worker with data-parallel ranks is one `WorkerId` per rank: `name@rank`."""

Incarnation = NewType("Incarnation", int)
"""Counts the lives of one worker id. What an earlier life announced is never believed in a later
one.
"""

Slot = NewType("Slot", int)
"""Dense index of a live worker incarnation in the directory, 0 <= slot < 65,535; reused after
removal.
"""

BlockKey = NewType("BlockKey", bytes)
"""32 bytes. Only `keys.py` makes one, always under a namespace."""

NamespaceTag = NewType("NamespaceTag", bytes)
"""16 bytes naming a namespace; safe to log and to index."""

EngineHash = NewType("EngineHash", int)
"""An engine's own name for a block, folded to 64 bits. Means something inside one worker only."""

Instant = NewType("Instant", float)
"""Milliseconds on a monotonic clock: for intervals."""

BootInstant = NewType("BootInstant", float)
"""Milliseconds on the boot clock, which goes on while a machine is suspended: for leases."""

WallTime = NewType("WallTime", float)
"""Seconds since 1970 on the wall clock: for people, never for order."""


class Tier(IntEnum):
    """Where KV lies, fastest first."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    SHARED = 3
