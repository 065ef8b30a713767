"""What a run needs of a fleet, and how replay asks for one. Read `command.py` next."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from trunkline.replay.counters import FleetCounters
from trunkline.replay.run import Decode

FEEDS = ("exact", "digest", "approximate")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """A gateway and simulated workers."""

    policy: str
    workers: int
    capacity_blocks: int
    """KV blocks of a worker, of `block_tokens` tokens each."""
    block_tokens: int
    profile: str
    """Name or `fifo:...` spelling, as `profile_named` takes it."""
    time_scale: float
    feed: str = "exact"
    """How workers tell what they hold: one of `FEEDS`."""
    link_gbit: float | None = None
    """Speed of the workers' links; None where they pull nothing."""
    max_copies: int = 64
    """What so many workers hold is not pulled any more."""
    host_blocks: int = 0
    """Blocks in a worker's host memory, beside those of its device."""
    port: int = 0
    admin_port: int = 0
    """0 takes any free port."""


class Fleet(Protocol):
    """A gateway and its workers, up and ready."""

    target_urls: Sequence[str]
    api_key: str
    model: str
    """Asked for where the user names none: what a trace calls its model is not served here."""
    vocab_size: int
    decode: Decode | None
    """Text of token ids, for the comparison of answers sent as text."""

    async def counters(self) -> FleetCounters:
        """Figures of the run so far. Asked once, after the last answer."""
        ...

    async def stop(self) -> None: ...


StartFleet = Callable[[FleetPlan], Awaitable[Fleet]]
