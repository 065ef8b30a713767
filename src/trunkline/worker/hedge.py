"""When a pull is not worth waiting for any more: computing what is left of it would be over sooner.

    what is left of the pull                           what is left of computing
    nothing came    until the link is through;         until the request's turn on the device
                    late: as long again as it is late  + the blocks that are missing, by the profile
    some came       at the pace so far                 - their copy from host memory

Rest against rest: what came stays either way, and what the prompt has beside it is computed either
way. Asked by the thread of the pull. Must never: end a pull before its patience is over, or read a
clock. Read `pulls.py` for who asks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trunkline.core.records import Instant


@dataclass(frozen=True, slots=True, kw_only=True)
class Hedge:
    """Of one pull of the blocks from `first_block` to `last_block`, exclusive."""

    first_block: int
    last_block: int
    due_at: Instant
    """When it should be here, by the modelled link."""
    turn_at: Instant
    """Not before this would the device begin to compute instead."""
    patient_until: Instant
    deadline: Instant
    saved_ms: Callable[[int, int], float]
    """What having the blocks from one to another spares the device."""

    def is_hopeless(self, now: Instant) -> bool:
        """Whether it is not worth asking for."""
        return self.due_at > self.patient_until and self._is_dear(0, self.due_at - now, now)

    def should_give_up(self, blocks: int, paced_ms: float | None, now: Instant) -> bool:
        """Whether it is not worth waiting on, with so many blocks here and the rest expected in
        `paced_ms` by the pace so far, None where nothing came. Its deadline is not our business.
        """
        if not self.patient_until <= now < self.deadline:
            return False
        rest_ms = abs(self.due_at - now) if paced_ms is None else paced_ms
        return self._is_dear(blocks, rest_ms, now)

    def _is_dear(self, blocks: int, rest_ms: float, now: Instant) -> bool:
        computed_ms = self.saved_ms(self.first_block + blocks, self.last_block)
        return rest_ms > max(0.0, self.turn_at - now) + computed_ms
