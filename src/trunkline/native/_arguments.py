"""What the Python twins accept as arguments; the compiled ones check the same in `cpp/module.cpp`.

Must never: let a wrong size through, or copy a buffer. Read `_fallback.py` next.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator
from typing import Literal

KEY_BYTES = 32
MAX_BLOCK_TOKENS = 65_536
TIERS = 4


def keys_of(packed: bytes) -> Iterator[bytes]:
    if len(packed) % KEY_BYTES:
        raise ValueError(f"packed keys have {len(packed)} bytes, which is no multiple of 32")
    return (packed[start : start + KEY_BYTES] for start in range(0, len(packed), KEY_BYTES))


def items_of(
    source: array[int] | bytes | memoryview, code: Literal["I", "Q"], name: str
) -> memoryview:
    """A contiguous view of unsigned items (`code` is I or Q), of an array or of their raw bytes."""
    item_bytes = struct.calcsize(code)
    try:
        view = memoryview(source)
    except TypeError:
        view = None
    if view is not None and view.c_contiguous:
        kind = view.format.lstrip("@=<") if len(view.format) == 2 else view.format
        is_raw = kind == "B" and view.nbytes % item_bytes == 0
        if is_raw or (kind in ("I", "L", "Q") and view.itemsize == item_bytes):
            return view.cast("B").cast(code)
    raise ValueError(f"{name} must be a contiguous buffer of unsigned {item_bytes * 8}-bit items")


def check_block_tokens(block_tokens: int) -> None:
    if not 1 <= block_tokens <= MAX_BLOCK_TOKENS:
        raise ValueError(f"block_tokens is {block_tokens}, allowed are 1 to {MAX_BLOCK_TOKENS}")


def check_secrets(key: bytes, root: bytes) -> None:
    if len(key) != KEY_BYTES or len(root) != KEY_BYTES:
        raise ValueError("a chain key and its root have 32 bytes each")


def check_tier(tier: int) -> None:
    if not 0 <= tier < TIERS:
        raise ValueError(f"tier {tier} is unknown")


def check_engine_hash(engine_hash: int) -> None:
    if not 0 <= engine_hash < 1 << 64:
        raise ValueError("an engine hash is outside 0..2**64-1")
