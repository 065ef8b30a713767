"""Which beginnings of prompts are found in caches most often: counted, and named by their ids only.

A prompt counts once, for what was found of it, cut to a power of two of blocks: so most turns of
one session, and most prompts behind one system prompt, count together. Bounded; at the bound the
half that was asked for least goes. Must never: keep a token. Read `hot.py` for those that a new
worker is given.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from trunkline.core.identity import DIGEST_BYTES
from trunkline.core.keys import KeyChain
from trunkline.core.records import BlockKey, Instant

MAX_BEGINNINGS = 512
MAX_BEGINNING_BLOCKS = 1_024
"""Longer ones count as one of this length: 32 kB of keys each, 16 MB in all."""
HALF_LIFE_MS = 60_000.0


@dataclass(slots=True, kw_only=True)
class Beginning:
    """One of them."""

    key: BlockKey
    """Of its last block, which stands for all before it."""
    tokens: int
    lead: KeyChain | None = field(repr=False)
    """To look it up by; None for a part of a public prefix."""
    count: float = 0.0
    counted_at: Instant = Instant(0.0)

    def requests(self, now: Instant) -> float:
        """Each worth half as much after `HALF_LIFE_MS`."""
        return self.count * 0.5 ** ((now - self.counted_at) / HALF_LIFE_MS)


class Beginnings:
    """What is counted. `note` is for the hot path: a look-up, and an addition."""

    def __init__(self) -> None:
        self._by_key: dict[BlockKey, Beginning] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def note(self, keys: KeyChain, found_tokens: int, now: Instant) -> None:
        """A prompt was placed where so many of its leading tokens are expected."""
        found = min(found_tokens // keys.block_tokens, len(keys), MAX_BEGINNING_BLOCKS)
        if found <= 0:
            return
        blocks = 1 << (found.bit_length() - 1)
        key = keys[blocks - 1]
        known = self._by_key.get(key)
        if known is None:
            known = self._by_key[key] = self._new(keys, key, blocks, now)
        known.count = known.requests(now) + 1.0
        known.counted_at = now

    def hottest(self, now: Instant, most: int) -> Iterator[Beginning]:
        """Those that spare most: requests times tokens."""
        ranked = sorted(
            self._by_key.values(), key=lambda one: (-one.requests(now) * one.tokens, one.key)
        )
        return iter(ranked[:most])

    def _new(self, keys: KeyChain, key: BlockKey, blocks: int, now: Instant) -> Beginning:
        if len(self._by_key) >= MAX_BEGINNINGS:
            ranked = sorted(self._by_key.values(), key=lambda one: one.requests(now))
            for one in ranked[: MAX_BEGINNINGS // 2]:
                del self._by_key[one.key]
        lead = None
        if keys.public is None:
            packed = keys.packed[: blocks * DIGEST_BYTES]
            lead = KeyChain(namespace=keys.namespace, packed=packed)
        return Beginning(key=key, tokens=blocks * keys.block_tokens, lead=lead)
