"""What `BlockIndex.store` answers in place of a count when a run cannot be taken whole."""

UNKNOWN_PARENT = -1
"""The worker never announced the parent block (or it was removed): nothing was stored."""

FULL = -2
"""The index holds `max_blocks` distinct blocks; blocks of the run before that point stay."""

CONFLICT = -3
"""One engine hash names two different blocks; blocks of the run before that point stay."""

RETIRED = -4
"""The parent block is of a namespace that was retired since: nothing was stored."""
