"""What a worker without cache events reports in its heartbeats, joined with what we sent there.

It names the checkpoints (256, 1024, 4096 tokens) of what it holds. Must never: extend a prefix by
what was not reported. Read `directory.py` for who asks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from trunkline.core.keys import KeyChain
from trunkline.core.records import BlockKey, Instant

MAX_CHECKPOINTS_PER_HEARTBEAT = 4_096


@dataclass(slots=True, kw_only=True)
class Digest:
    """The last heartbeat of one worker, and when we last routed to each checkpoint."""

    reported: frozenset[BlockKey] = frozenset()
    is_complete: bool = False
    taken_at: Instant = Instant(0.0)
    routed_at: OrderedDict[BlockKey, Instant] = field(
        default_factory=OrderedDict[BlockKey, Instant]
    )

    def report(
        self, checkpoints: Collection[BlockKey], *, is_complete: bool, taken_at: Instant
    ) -> None:
        """A heartbeat came; the caller has looked at how many there are."""
        self.reported = frozenset(checkpoints)
        self.is_complete = is_complete
        self.taken_at = taken_at

    def routed(self, checkpoints: Iterable[BlockKey], now: Instant) -> None:
        """A request that fills these is on its way."""
        for key in checkpoints:
            self.routed_at.pop(key, None)
            self.routed_at[key] = now
        while len(self.routed_at) > MAX_CHECKPOINTS_PER_HEARTBEAT:
            self.routed_at.popitem(last=False)

    def depth(self, checkpoints: list[tuple[int, BlockKey]], chain: KeyChain, expected: int) -> int:
        """Leading blocks of a chain of which `expected` are otherwise: a checkpoint that a complete
        report lacks, and that we did not route since, ends the prefix; one that it has extends it.
        """
        depth = expected
        for tokens, key in checkpoints:
            blocks = tokens // chain.block_tokens
            if key in self.reported:
                depth = max(depth, blocks)
            elif self.is_complete and self.routed_at.get(key, -1.0) < self.taken_at:
                return depth if blocks > depth else _below(checkpoints, tokens, chain)
        return depth


def _below(checkpoints: list[tuple[int, BlockKey]], tokens: int, chain: KeyChain) -> int:
    """Blocks of the deepest checkpoint above a missing one; 0 when there is none."""
    return max((t // chain.block_tokens for t, _ in checkpoints if t < tokens), default=0)
