"""The KV and the answers of the simulated model, as pure functions of tokens.

KV is real bytes, 64 a token, so that using the wrong KV shows. Each cell of 16 tokens has 1 KiB,
expanded from the state before it and its tokens; the state after a cell digests the bytes *read*:

    state_-1 = ROOT      kv_i = XOF(state_{i-1}, tokens_i)      state_i = H(state_{i-1}, kv_i)
    next token = H(state of the last full cell, tokens after it)  mapped into the answer vocabulary

A cache keeps `kv_i XOR mask(salt)`, and whoever reads it takes off the mask of its own salt. Bytes
of other tokens, of another order, of another salt or damaged thus give another state and another
answer, while the right answer depends on the prompt's tokens alone: `answer_tokens` is the truth
that a client compares with. Answers go token by token, so a prompt with half its answer continues
with the other half.

Must never: know of blocks, sockets or the cache; `worker/cache.py` keeps the bytes.
Read `profiles.py` next.
"""

from __future__ import annotations

import hashlib
import struct
import sys
import zlib
from array import array

CELL_TOKENS = 16
"""Tokens a cell; a cache block holds whole cells, so answers do not depend on its size."""

TOKEN_KV_BYTES = 64
CELL_KV_BYTES = CELL_TOKENS * TOKEN_KV_BYTES

ROOT = hashlib.sha256(b"trunkline simulated model, revision 1").digest()
"""State before the first token."""

_U32_BYTES = 4
_CELL_ID_BYTES = CELL_TOKENS * _U32_BYTES


def cell_kv(state: bytes, token_bytes: bytes) -> bytes:
    """KV of one cell: `token_bytes` are its 16 ids, little-endian u32."""
    assert len(token_bytes) == _CELL_ID_BYTES
    return hashlib.shake_128(state + token_bytes).digest(CELL_KV_BYTES)


def absorb(state: bytes, kv: bytes) -> bytes:
    """The state after reading one or more whole cells of KV (mask taken off)."""
    assert len(kv) % CELL_KV_BYTES == 0
    for start in range(0, len(kv), CELL_KV_BYTES):
        state = hashlib.sha256(state + kv[start : start + CELL_KV_BYTES]).digest()
    return state


def extend(state: bytes, tokens: array[int]) -> tuple[bytes, bytes]:
    """Prefill whole cells: `(kv, state after them)`. Tokens after the last one are left out."""
    packed = little_endian(tokens)
    parts: list[bytes] = []
    for start in range(0, len(packed) - _CELL_ID_BYTES + 1, _CELL_ID_BYTES):
        kv = cell_kv(state, packed[start : start + _CELL_ID_BYTES])
        state = hashlib.sha256(state + kv).digest()
        parts.append(kv)
    return b"".join(parts), state


def prefix_digests(tokens: array[int], state: bytes = ROOT) -> list[bytes]:
    """The state after each whole cell of `tokens`, which follow `state`.

    Keep the last one to go on from there when a prompt grows: `prefix_digests(more, kept)`.
    """
    packed = little_endian(tokens)
    states: list[bytes] = []
    for start in range(0, len(packed) - _CELL_ID_BYTES + 1, _CELL_ID_BYTES):
        kv = cell_kv(state, packed[start : start + _CELL_ID_BYTES])
        state = hashlib.sha256(state + kv).digest()
        states.append(state)
    return states


def answer_tokens(prompt: array[int], count: int, vocab_size: int) -> array[int]:
    """The one right answer: `count` ids. About 0.2 us a prompt token and 1 us an answer token."""
    states = prefix_digests(prompt)
    tail = prompt[len(states) * CELL_TOKENS :]
    return answer_from(states[-1] if states else ROOT, tail, count, vocab_size)


def answer_from(state: bytes, tail: array[int], count: int, vocab_size: int) -> array[int]:
    """The same, from the state after some whole cells and all the tokens that follow them."""
    assert count >= 0
    first_id = answer_first_id(vocab_size)
    width = vocab_size - first_id
    answer: array[int] = array("I")
    open_cell = array("I", tail)
    for _ in range(count):
        if len(open_cell) >= CELL_TOKENS:
            _, state = extend(state, open_cell)
            del open_cell[: len(open_cell) // CELL_TOKENS * CELL_TOKENS]
        digest = hashlib.sha256(state + little_endian(open_cell) + b"next").digest()
        token = first_id + struct.unpack_from("<Q", digest)[0] % width
        answer.append(token)
        open_cell.append(token)
    return answer


def answer_first_id(vocab_size: int) -> int:
    """Answers use the last quarter of the vocabulary.

    There the simulated model's own tokenizer has nothing but whole words with a space before them,
    so that an answer sent back as text encodes to the very ids that were generated.
    """
    if vocab_size < 4:
        raise ValueError(f"vocab_size is {vocab_size}, needed is 4 or more")
    return vocab_size - vocab_size // 4


def salt_mask(salt: str | None) -> bytes:
    """What is laid over each cell of a cache under this salt; None is a domain of its own."""
    named = b"none" if salt is None else b"salt" + salt.encode("utf-8", "surrogatepass")
    return hashlib.shake_128(b"trunkline kv mask\0" + named).digest(CELL_KV_BYTES)


def apply_mask(kv: bytes | bytearray, mask: bytes) -> bytes:
    """Lay the mask over whole cells, or take it off again."""
    assert len(kv) % CELL_KV_BYTES == 0
    assert len(mask) == CELL_KV_BYTES
    whole_mask = int.from_bytes(mask * (len(kv) // CELL_KV_BYTES), "little")
    return (int.from_bytes(kv, "little") ^ whole_mask).to_bytes(len(kv), "little")


def little_endian(tokens: array[int]) -> bytes:
    """Ids as little-endian u32, on any machine."""
    assert tokens.itemsize == _U32_BYTES
    if sys.byteorder == "little":
        return tokens.tobytes()
    swapped = array("I", tokens)
    swapped.byteswap()
    return swapped.tobytes()


def checksum(kv: bytes | bytearray) -> int:
    """32 bits of a block's KV, against damage and not against an attacker: any flipped bit shows.

    The bytes are those that the cache keeps, mask and all.
    """
    return zlib.crc32(kv)
