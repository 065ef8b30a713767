"""Bringing blocks up from disk before a request is scheduled, in threads: disks take their time.

Must never: make a request wait beyond `PATIENCE_MS`, or the loop for a disk. What is not up by then
is computed. Read `tiers.py` for where blocks come up to, `pulls.py` for the other thing that a
request may wait for.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from trunkline.core.records import Instant
from trunkline.ports.clock import Clock
from trunkline.worker.blocks import KvSequence, Terms
from trunkline.worker.cache import BlockCache
from trunkline.worker.pulls import PullCall
from trunkline.worker.tiers import HostTier

PATIENCE_MS = 500.0
"""For all of a prompt's blocks."""
MAX_LIFTS = 4
"""Requests that wait for the disk at a time; a further one is computed at once. The disk itself
does one thing after another."""


class Lifts:
    """All waits of one worker for its disk. Belongs to the event loop."""

    def __init__(
        self, tier: HostTier, *, clock: Clock, load_ms: Callable[[int], float], block_tokens: int
    ) -> None:
        """`load_ms(tokens)`: what reading so much KV takes, as modelled."""
        self._tier = tier
        self._clock = clock
        self._load_ms = load_ms
        self._block_tokens = block_tokens
        self._threads = ThreadPoolExecutor(MAX_LIFTS, thread_name_prefix="kv-lift")
        self._open_count = 0

    def is_wanted(
        self, cache: BlockCache, prompt: array[int], salt: str | None, terms: Terms
    ) -> bool:
        """Whether what the prompt can reuse goes on on disk."""
        if terms.ticket is None or self._open_count >= MAX_LIFTS:
            return False
        sequence = cache.sketch(prompt, salt, terms)
        return self._tier.goes_on_below(sequence, len(sequence.blocks), self._limit(sequence))

    async def lift(
        self, call: PullCall, cache: BlockCache, prompt: array[int], salt: str | None, terms: Terms
    ) -> None:
        """Bring up what the prompt can reuse: `call.lifted_tokens` says how much came."""
        if self._open_count >= MAX_LIFTS:
            return
        sequence = cache.sketch(prompt, salt, terms)
        until = Instant(self._clock.now() + PATIENCE_MS)
        self._open_count += 1
        try:
            count = await asyncio.get_running_loop().run_in_executor(
                self._threads, self._lift, call, sequence, until
            )
        finally:
            self._open_count -= 1
        call.lifted_tokens = count * self._block_tokens
        self._tier.flush()
        await call.pause(self._load_ms(call.lifted_tokens))

    def close(self) -> None:
        self._threads.shutdown()

    def _lift(self, call: PullCall, sequence: KvSequence, until: Instant) -> int:
        """In a thread of its own: how many blocks came up."""
        if call.cancelled.is_cancelled:
            return 0
        return self._tier.bring_up(sequence, len(sequence.blocks), self._limit(sequence), until)

    def _limit(self, sequence: KvSequence) -> int:
        return (len(sequence.tokens) - 1) // self._block_tokens
