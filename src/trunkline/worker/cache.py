"""The paged prefix cache of one rank: blocks of real KV bytes, shared by reference count.

Semantics follow vLLM: full blocks only, named by a chain of digests that begins with the salt; a
block whose last user is gone stays resident and hittable until its place is needed; least recently
freed goes first, the tail of a prefix before its head; a block computed twice is two copies,
announced twice. What became resident or went away is kept as events until `take_events`.

Must never: hand out KV to a sequence that does not hold the block. Read `engine.py` next.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from dataclasses import dataclass, field

from trunkline.core import simkv
from trunkline.ports.publisher import BlockEvent, BlockRemoved, CacheCleared, RunStored

_NO_PARENT = hashlib.sha256(b"trunkline simulated engine, no parent").digest()


@dataclass(slots=True, eq=False)
class Block:
    """One place in KV memory."""

    index: int
    hash: bytes = b""
    """Empty while the block is not full, or not resident."""
    kv: bytes = field(default=b"", repr=False)
    """Under the mask of the salt it was computed with."""
    references: int = 0


@dataclass(slots=True, eq=False, kw_only=True)
class KvSequence:
    """The blocks bound to one request, and how far its KV goes."""

    salt: str | None = field(repr=False)
    tokens: array[int] = field(repr=False)
    """Prompt, then what was generated."""
    reserved: int
    """Blocks that it may still ask for, and is sure to get."""
    mask: bytes = field(repr=False)
    blocks: list[Block] = field(default_factory=list[Block])
    hashes: list[bytes] = field(default_factory=list[bytes], repr=False)
    """Names of all full blocks of `tokens`; may be ahead of `blocks`."""
    cached_tokens: int = 0
    state: bytes = simkv.ROOT
    """What the model has read of the KV of `blocks`."""


class BlockCache:
    """`capacity` places of `block_tokens` tokens each."""

    def __init__(self, *, capacity: int, block_tokens: int) -> None:
        if block_tokens % simkv.CELL_TOKENS:
            raise ValueError(f"block size is {block_tokens}, needed is a multiple of 16")
        self.capacity = capacity
        self.block_tokens = block_tokens
        self._resident: dict[bytes, list[Block]] = {}
        # Oldest first: places never used, then blocks in the order in which they were let go.
        self._free: OrderedDict[int, Block] = OrderedDict(
            (index, Block(index)) for index in range(capacity)
        )
        self._reserved = 0
        self._events: list[BlockEvent] = []

    @property
    def used_share(self) -> float:
        """Share of the places that running sequences hold; freed but resident ones do not count."""
        return 1 - len(self._free) / self.capacity

    @property
    def resident_blocks(self) -> int:
        return sum(len(copies) for copies in self._resident.values())

    def is_resident(self, name: bytes) -> bool:
        return name in self._resident

    def chain(self, tokens: array[int], salt: str | None, known: list[bytes]) -> None:
        """Name the full blocks of `tokens` after those in `known`, which grows."""
        packed = simkv.little_endian(tokens)
        width = self.block_tokens * 4
        extra = b"" if salt is None else b"salt" + salt.encode("utf-8", "surrogatepass")
        for start in range(len(known) * width, len(packed) - width + 1, width):
            parent = known[-1] if known else _NO_PARENT
            digest = hashlib.sha256(parent)
            digest.update(packed[start : start + width])
            if not known:
                digest.update(extra)
            known.append(digest.digest())

    def admit(self, tokens: array[int], salt: str | None, answer_tokens: int) -> KvSequence | None:
        """Bind the longest resident prefix and set places aside for the rest.

        At most all tokens but the last can hit: that one is always computed. None when memory is
        too full now; the caller tries again after a `release`.
        """
        hashes: list[bytes] = []
        self.chain(tokens, salt, hashes)
        hits = self._hits(hashes, (len(tokens) - 1) // self.block_tokens)
        whole = -(-(len(tokens) + answer_tokens) // self.block_tokens)
        needed = whole - len(hits)
        idle_hits = sum(1 for block in hits if not block.references)
        if len(self._free) - idle_hits - self._reserved < needed:
            return None
        self._reserved += needed
        sequence = KvSequence(
            salt=salt,
            tokens=array("I", tokens),
            reserved=needed,
            mask=simkv.salt_mask(salt),
            hashes=hashes,
        )
        for block in hits:
            self._hold(block)
            sequence.blocks.append(block)
        sequence.cached_tokens = len(hits) * self.block_tokens
        for block in hits:
            seen = simkv.apply_mask(block.kv, sequence.mask)
            sequence.state = simkv.absorb(sequence.state, seen)
        return sequence

    def compute(self, sequence: KvSequence, upto_tokens: int) -> None:
        """Fill blocks with KV until `upto_tokens`; full ones become resident and are announced."""
        assert upto_tokens <= len(sequence.tokens)
        first = len(sequence.blocks)
        last = upto_tokens // self.block_tokens
        if last <= first:
            return
        self.chain(sequence.tokens, sequence.salt, sequence.hashes)
        for index in range(first, last):
            start = index * self.block_tokens
            tokens = sequence.tokens[start : start + self.block_tokens]
            kv, sequence.state = simkv.extend(sequence.state, tokens)
            block = self._take(sequence)
            block.kv = simkv.apply_mask(kv, sequence.mask)
            block.hash = sequence.hashes[index]
            self._resident.setdefault(block.hash, []).append(block)
        self._events.append(
            RunStored(
                hashes=tuple(sequence.hashes[first:last]),
                parent=sequence.hashes[first - 1] if first else None,
                tokens=sequence.tokens[first * self.block_tokens : last * self.block_tokens],
                block_tokens=self.block_tokens,
                salt=sequence.salt,
            )
        )

    def answer(self, sequence: KvSequence, count: int, vocab_size: int) -> array[int]:
        """What the model says after the KV that it has read, and the tokens that follow it."""
        tail = sequence.tokens[len(sequence.blocks) * self.block_tokens :]
        return simkv.answer_from(sequence.state, tail, count, vocab_size)

    def release(self, sequence: KvSequence) -> None:
        """The sequence is over. Its blocks stay resident, its tail the next to go. Call it once."""
        assert sequence.reserved >= 0, "released twice"
        self._reserved -= sequence.reserved
        sequence.reserved = -1
        for block in reversed(sequence.blocks):
            block.references -= 1
            assert block.references >= 0
            if not block.references:
                self._free[block.index] = block
        sequence.blocks.clear()

    def reset(self) -> bool:
        """Forget all prefixes; False, and nothing done, while a sequence holds blocks."""
        if len(self._free) < self.capacity or self._reserved:
            return False
        for block in self._free.values():
            block.hash = b""
            block.kv = b""
        self._resident.clear()
        self._events.append(CacheCleared())
        return True

    def take_events(self) -> list[BlockEvent]:
        """What happened since the last call, in order."""
        taken, self._events = self._events, []
        return taken

    def _hits(self, hashes: list[bytes], limit: int) -> list[Block]:
        hits: list[Block] = []
        for name in hashes[:limit]:
            copies = self._resident.get(name)
            if not copies:
                break
            hits.append(copies[0])
        return hits

    def _hold(self, block: Block) -> None:
        if not block.references:
            del self._free[block.index]
        block.references += 1

    def _take(self, sequence: KvSequence) -> Block:
        """A place for one more block of the sequence; the oldest free block loses its content."""
        assert sequence.reserved > 0, "a sequence outgrew its reservation"
        sequence.reserved -= 1
        self._reserved -= 1
        _, block = self._free.popitem(last=False)
        if block.hash:
            copies = self._resident[block.hash]
            copies.remove(block)
            if not copies:
                del self._resident[block.hash]
            self._events.append(BlockRemoved(hash=block.hash))
            block.hash = b""
        block.references = 1
        sequence.blocks.append(block)
        return block
