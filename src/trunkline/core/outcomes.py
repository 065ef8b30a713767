"""What became of blocks that the directory was told of.

Read `directory.py` next.
"""

from __future__ import annotations

from enum import Enum

from trunkline.native import CONFLICT, FULL, RETIRED, UNKNOWN_PARENT


class StoreOutcome(Enum):
    """What became of a run of stored blocks."""

    STORED = "stored"
    UNKNOWN_PARENT = "unknown-parent"
    UNKNOWN_SALT = "unknown-salt"
    WRONG_BLOCK_SIZE = "wrong-block-size"
    CONFLICT = "conflict"
    FULL = "full"


_CODES = {
    UNKNOWN_PARENT: StoreOutcome.UNKNOWN_PARENT,
    FULL: StoreOutcome.FULL,
    CONFLICT: StoreOutcome.CONFLICT,
    RETIRED: StoreOutcome.UNKNOWN_SALT,
}


def outcome_of(count: int) -> StoreOutcome:
    """By what the index answered: how many blocks, or a code."""
    return StoreOutcome.STORED if count >= 0 else _CODES[count]
