"""Who pulls from this worker, and waits for what its prompts are still to compute.

    a prompt is queued ──► coming ──(its first token: its blocks are in the store)──► over
                             └──────(cancelled, failed)─────────────────────────────► over
    a pull that misses a block ──► waits while a prompt that has it is coming, then looks again

The loop says what comes, threads of the pull server wait. Names of blocks are made by who waits, so
a prompt that nobody asks for costs nothing. Must never: let anybody wait for a prompt that itself
waits for a pull. Read `lending.py` for who waits.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from trunkline.core.records import Instant
from trunkline.core.transfer import Reason
from trunkline.ports.clock import Clock
from trunkline.worker.blocks import Terms, zones_of
from trunkline.worker.names import name_blocks

MAX_WAITS = 8
"""Pulls that wait at a time: half of those that a source serves. A further one is `busy`."""
MAX_LOOKED_AT = 64
"""Prompts, oldest first, in which a missing block is looked for: as many as the gateway has."""
TICK_MS = 50.0
"""How often a wait looks whether its peer is still there."""


@dataclass(slots=True, eq=False, kw_only=True)
class Prompt:
    """One that will have its blocks in the store, unless it is cancelled."""

    tokens: array[int] = field(repr=False)
    salt: str | None = field(repr=False)
    terms: Terms
    is_over: bool = False
    _names: list[bytes] | None = field(default=None, repr=False)

    def names(self, block_tokens: int) -> list[bytes]:
        """Of its full blocks; made once."""
        if self._names is None:
            names: list[bytes] = []
            zones = zones_of(self.salt, self.terms, len(self.tokens) // block_tokens)
            name_blocks(names, self.tokens, zones, block_tokens)
            self._names = names
        return self._names

    def is_of(self, ns: bytes) -> bool:
        ticket = self.terms.ticket
        return ticket is not None and (ticket.ns == ns or ns in ticket.regions)


class Coming:
    """Of all ranks of a worker. Safe for threads."""

    def __init__(self, clock: Clock, *, block_tokens: int, max_waits: int = MAX_WAITS) -> None:
        self._clock = clock
        self._block_tokens = block_tokens
        self._max_waits = max_waits
        self._changed = threading.Condition()
        self._prompts: dict[Prompt, None] = {}
        self._wait_count = 0
        self._is_closing = False

    @property
    def wait_count(self) -> int:
        """Pulls that wait now."""
        return self._wait_count

    def __len__(self) -> int:
        return len(self._prompts)

    def add(self, tokens: array[int], salt: str | None, terms: Terms) -> Prompt:
        """A prompt is queued, and lacks nothing but its turn."""
        prompt = Prompt(tokens=tokens, salt=salt, terms=terms)
        with self._changed:
            self._prompts[prompt] = None
        return prompt

    def end(self, prompt: Prompt) -> None:
        """It is computed and in the store, or will never be: whoever waits looks again."""
        with self._changed:
            self._prompts.pop(prompt, None)
            prompt.is_over = True
            self._changed.notify_all()

    def close(self) -> None:
        """Nobody waits any longer."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()

    def wait(
        self, ns: bytes, key: bytes, *, until: Instant, is_wanted: Callable[[], bool]
    ) -> Reason | None:
        """Until the first prompt that has this block is over: None, and the store may have it now.
        A reason where there is nothing to wait for, or nobody to.
        """
        with self._changed:
            prompts = [p for p in self._prompts if p.is_of(ns)][:MAX_LOOKED_AT]
        prompt = next((p for p in prompts if key in p.names(self._block_tokens)), None)
        if prompt is None:
            return Reason.MISS
        with self._changed:
            if self._wait_count >= self._max_waits:
                return Reason.BUSY
            self._wait_count += 1
            try:
                return self._wait(prompt, until, is_wanted)
            finally:
                self._wait_count -= 1

    def _wait(self, prompt: Prompt, until: Instant, is_wanted: Callable[[], bool]) -> Reason | None:
        while not prompt.is_over:
            left_ms = until - self._clock.now()
            if self._is_closing:
                return Reason.CLOSING
            if left_ms <= 0.0:
                return Reason.TIMEOUT
            if not is_wanted():
                return Reason.LOST
            self._changed.wait(min(left_ms, TICK_MS) / 1e3)
        return None
