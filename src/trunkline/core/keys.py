"""Token ids -> chained 32-byte block keys, under a namespace.

`key_i = BLAKE2b-256(key=ns_key, person="blk", key_{i-1} || u32 n || n x u32 token || u32 len ||
extra)` with `key_{-1} = namespace.root`. Keyed *and* 256 bits wide: neither chance nor an attacker
makes two prefixes meet, and nobody without the namespace's secret can name a block (docs/adr/0001).

A chain may have two zones: leading blocks under a public namespace, the rest under the caller's
own, chained on top (`publics.py`).

Cost: one hash compression a 16-token block natively, about 0.2 us; linear in tokens.
Must never: make a key without a namespace. Read `directory.py` next.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from struct import Struct

from trunkline.core.identity import DIGEST_BYTES, Namespace
from trunkline.core.records import BlockKey, NamespaceTag
from trunkline.native import chain_keys

CHECKPOINT_TOKENS = (256, 1024, 4096)
"""Depths at which a chain value serves as compact digest of the prefix in heartbeats."""

_KEY = Struct(f"{DIGEST_BYTES}s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Blocks in a row that are of one namespace."""

    namespace: Namespace
    first_block: int
    block_count: int


# Not frozen: one is made of each choice of another gateway, and most of its cost would be that.
@dataclass(slots=True)
class KeyRun:
    """A part of a chain by its keys: the blocks from `first_block` on that are of one namespace.

    Where `first_block` is not 0, the key of the block before it comes first in `packed`. Raises
    ValueError for a run without a block.
    """

    tag: NamespaceTag
    first_block: int
    packed: bytes = field(repr=False)
    block_count: int = field(init=False)

    def __post_init__(self) -> None:
        size = len(self.packed)
        self.block_count = size // DIGEST_BYTES - (self.first_block > 0)
        if self.first_block < 0 or self.block_count < 1 or size % DIGEST_BYTES:
            raise ValueError(f"{size} bytes of keys from block {self.first_block} on")

    @property
    def first_key(self) -> bytes:
        """Of the first block."""
        at = DIGEST_BYTES if self.first_block else 0
        return self.packed[at : at + DIGEST_BYTES]

    def key(self, block: int) -> BlockKey | None:
        """Of the block at this place of the chain; None where it is of another run."""
        at = (block - max(0, self.first_block - 1)) * DIGEST_BYTES
        is_here = self.first_block <= block < self.first_block + self.block_count
        return BlockKey(self.packed[at : at + DIGEST_BYTES]) if is_here else None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyChain:
    """The keys of a prompt's full blocks: `packed` holds `len(chain)` keys of 32 bytes each.

    The first `public_blocks` of them are of the namespace `public`, all others of `namespace`.
    Raises ValueError for a public part that does not fit.
    """

    namespace: Namespace
    packed: bytes = field(repr=False)
    public: Namespace | None = None
    public_blocks: int = 0

    def __post_init__(self) -> None:
        if self.public is None:
            is_fitting = self.public_blocks == 0
        else:
            is_same_model = self.public.model == self.namespace.model
            is_fitting = is_same_model and 0 < self.public_blocks <= len(self)
        if not is_fitting:
            raise ValueError(f"{self.public_blocks} public blocks in a chain of {len(self)}")

    def __len__(self) -> int:
        return len(self.packed) // DIGEST_BYTES

    def __getitem__(self, index: int) -> BlockKey:
        if not 0 <= index < len(self):
            raise IndexError(f"block {index} of a chain of {len(self)}")
        return BlockKey(self.packed[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES])

    def __iter__(self) -> Iterator[BlockKey]:
        return map(itemgetter(0), _KEY.iter_unpack(self.packed))

    @property
    def block_tokens(self) -> int:
        return self.namespace.model.block_tokens

    def regions(self) -> tuple[Region, ...]:
        """Whose blocks they are, first to last: one region, or the public one and the private one.

        The private one may be empty; it is where the rest of the prompt and the answer belong.
        """
        rest = len(self) - self.public_blocks
        private = Region(namespace=self.namespace, first_block=self.public_blocks, block_count=rest)
        if self.public is None:
            return (private,)
        public = Region(namespace=self.public, first_block=0, block_count=self.public_blocks)
        return (public, private)

    def runs(self, first_block: int, end_block: int) -> list[KeyRun]:
        """The blocks from one place to before another: one run for each namespace among them."""
        split = self.public_blocks
        found: list[KeyRun] = []
        if self.public is not None and first_block < split:
            found.append(self._run(self.public, first_block, min(end_block, split)))
            first_block = split
        if first_block < end_block:
            found.append(self._run(self.namespace, first_block, end_block))
        return found

    def _run(self, namespace: Namespace, first_block: int, end_block: int) -> KeyRun:
        begin = first_block - 1 if first_block else 0
        packed = self.packed[begin * DIGEST_BYTES : end_block * DIGEST_BYTES]
        return KeyRun(namespace.tag, first_block, packed)

    def salt_regions(self) -> list[tuple[int, str]]:
        """`(first token, salt)` of each region, for workers that can split the salt."""
        size = self.block_tokens
        return [(region.first_block * size, region.namespace.salt) for region in self.regions()]

    def checkpoints(self) -> list[tuple[int, BlockKey]]:
        """`(tokens, key)` at 256, 1024 and 4096 tokens, as far as the chain (of two zones) reaches.

        Empty when the block size does not divide 256: such a worker has no digest mode.
        """
        if CHECKPOINT_TOKENS[0] % self.block_tokens:
            return []
        depths = [(tokens, tokens // self.block_tokens) for tokens in CHECKPOINT_TOKENS]
        return [(tokens, self[depth - 1]) for tokens, depth in depths if depth <= len(self)]


def as_tokens(token_ids: Iterable[int]) -> array[int]:
    """Pack token ids as u32. Raises ValueError for an id outside 0..2**32-1, TypeError for a
    non-integer.
    """
    try:
        return array("I", token_ids)
    except OverflowError as error:
        raise ValueError("a token id is outside 0..4294967295") from error


def chain(namespace: Namespace, tokens: array[int], extra: bytes = b"") -> KeyChain:
    """Key the full blocks of `tokens` (u32); a partial last block has no key.

    `extra` is hashed into every block (for example the digest of a media item); most prompts have
    none.
    """
    packed = chain_keys(namespace.key, namespace.root, tokens, namespace.model.block_tokens, extra)
    return KeyChain(namespace=namespace, packed=packed)
