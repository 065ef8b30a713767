"""What many prompts begin with lately, and find in some cache.

Their leading tokens are kept, few and bounded, with the grant of one who asked. Must never: keep
what nobody may reuse. Read `warmup.py` for who is given it.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from trunkline.core.keys import KeyChain
from trunkline.core.records import BlockKey, Instant
from trunkline.gateway.contracts import Grant

MAX_HOT = 64
"""Beginnings that are counted; the least asked for goes for a new one."""
WARMED = 8
"""Of these a worker is given so many."""
STEP_TOKENS, MOST_TOKENS = 1_024, 16_384
"""Beginnings are cut to whole steps, so that turns of one session count together; and bounded."""
LEAST_COUNT = 3.0
HALF_LIFE_MS = 60_000.0


@dataclass(slots=True, kw_only=True)
class HotPrompt:
    """A beginning that is asked for often."""

    grant: Grant
    """Of who asked for it last."""
    keys: KeyChain
    tokens: array[int] = field(repr=False)
    count: float = 0.0
    """Requests, each worth half as much after `HALF_LIFE_MS`."""
    noted_at: Instant = Instant(0.0)

    def weight(self, now: Instant) -> float:
        """What it saves: requests times tokens."""
        return self.count * 0.5 ** ((now - self.noted_at) / HALF_LIFE_MS) * len(self.tokens)


class HotPrompts:
    """The beginnings that are asked for most. At most `MAX_HOT` x `MOST_TOKENS` ids: 4 MiB."""

    def __init__(self) -> None:
        self._by_key: dict[BlockKey, HotPrompt] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def note(
        self, grant: Grant, keys: KeyChain, tokens: array[int], reused_tokens: int, now: Instant
    ) -> None:
        """A prompt was placed, of which so many leading tokens are somewhere already."""
        kept = min(reused_tokens, MOST_TOKENS) // STEP_TOKENS * STEP_TOKENS
        blocks = kept // keys.block_tokens
        if not blocks or keys.public is not None or grant.scope is None:
            return
        key = keys[blocks - 1]
        known = self._by_key.get(key)
        if known is None:
            if len(self._by_key) >= MAX_HOT:
                del self._by_key[min(self._by_key, key=lambda k: self._by_key[k].weight(now))]
            lead = KeyChain(namespace=keys.namespace, packed=keys.packed[: blocks * len(key)])
            first = tokens[: blocks * keys.block_tokens]
            known = self._by_key[key] = HotPrompt(grant=grant, keys=lead, tokens=first)
        faded = known.count * 0.5 ** ((now - known.noted_at) / HALF_LIFE_MS)
        known.grant, known.count, known.noted_at = grant, faded + 1.0, now

    def hottest(self, now: Instant, block_tokens: int) -> list[HotPrompt]:
        """Those worth taking over, first what saves most."""
        worth = [
            prompt
            for prompt in self._by_key.values()
            if prompt.keys.block_tokens == block_tokens
            and prompt.weight(now) >= LEAST_COUNT * len(prompt.tokens)
        ]
        return sorted(worth, key=lambda prompt: -prompt.weight(now))[:WARMED]
