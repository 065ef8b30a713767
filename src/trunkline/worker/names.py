"""What the blocks of a prompt are called: kv keys, the same that a gateway computes.

A prompt without a salt has a chain of its own that no salt leads to. Read `core/transfer.py` for
what a kv key says, `cache.py` for who looks blocks up by it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from trunkline.core.transfer import KV_KEY_BYTES, kv_chain
from trunkline.worker.blocks import Zone

_UNSALTED = "-"
_UNSALTED_ROOT = hashlib.sha256(b"trunkline simulated engine, no salt").digest()
"""A chain under the salt "-" begins elsewhere."""


def name_blocks(
    names: list[bytes], tokens: array[int], zones: Sequence[Zone], block_tokens: int
) -> None:
    """Name the full blocks of `tokens` that have no name yet: `names` goes on."""
    full = len(tokens) // block_tokens
    ends = [*(zone.first for zone in zones[1:]), full]
    for zone, end in zip(zones, ends, strict=True):
        first = max(len(names), zone.first)
        last = min(end, full)
        if first >= last:
            continue
        parent = names[first - 1] if first else None
        if zone.salt is None and parent is None:
            parent = _UNSALTED_ROOT
        salt = _UNSALTED if zone.salt is None else zone.salt
        run = tokens[first * block_tokens : last * block_tokens]
        packed = kv_chain(salt, run, block_tokens, parent)
        names.extend(
            packed[start : start + KV_KEY_BYTES] for start in range(0, len(packed), KV_KEY_BYTES)
        )
