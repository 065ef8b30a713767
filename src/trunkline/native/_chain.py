"""The Python twin of the chain of block keys (`core/keys.py` gives the formula).

Must never: answer otherwise than the compiled one. Read `_fallback.py` next, which hands it out.
"""

from __future__ import annotations

import hashlib
import struct
from array import array

from trunkline.native._arguments import KEY_BYTES, check_block_tokens, check_secrets, items_of


def chain_keys(
    key: bytes,
    root: bytes,
    tokens: array[int] | bytes | memoryview,
    block_tokens: int,
    extra: bytes = b"",
) -> bytes:
    """Chain the full blocks of `tokens` from `root`: 32 bytes a block, packed first to last.

    `tokens` is a contiguous buffer of u32, or its raw bytes; `key` and `root` have 32 bytes each;
    `extra` is hashed into every block. Raises ValueError for a wrong size.
    """
    ids = items_of(tokens, "I", "tokens")
    check_block_tokens(block_tokens)
    check_secrets(key, root)
    raw = ids.cast("B")
    block_bytes = block_tokens * 4
    count_word = struct.pack("<I", block_tokens)
    tail = struct.pack("<I", len(extra)) + extra
    # Forking the keyed state is cheaper than setting up each hash anew.
    fork = hashlib.blake2b(digest_size=KEY_BYTES, key=key, person=b"blk").copy
    previous = root
    out: list[bytes] = []
    for start in range(0, len(raw) - block_bytes + 1, block_bytes):
        block_hash = fork()
        block_hash.update(b"".join((previous, count_word, raw[start : start + block_bytes], tail)))
        previous = block_hash.digest()
        out.append(previous)
    return b"".join(out)
