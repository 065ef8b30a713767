"""What the parts of the KV library tell each other: whose blocks, which ones, what is on them.

A block is one run of tokens and all of its components (keys, values, side-cars) in one piece of
memory of `Layout.block_bytes`; whole or nothing. Must never: hold KV bytes. Read `store.py` next.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Protocol

from trunkline.core.identity import TAG_BYTES
from trunkline.core.records import Tier
from trunkline.core.transfer import KV_KEY_BYTES, LAYOUT_BYTES, Reason

DIGEST_BYTES = 16
"""xxh3_128 of a chunk."""
DEFAULT_CHUNK_BYTES = 1 << 20
"""A digest is made while its chunk is in the processor's cache."""
_LAYOUT_TAG = b"tl-kv-layout-v1"


class BlockState(Enum):
    """staged -> ready -> condemned. Only READY blocks can be found."""

    STAGED = "staged"
    READY = "ready"
    CONDEMNED = "condemned"


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Whose blocks they are, and whose quota they use."""

    ns: bytes
    """The namespace tag; it names the epochs as well."""
    subjects: tuple[str, ...] = ()
    epochs: tuple[int, ...] = ()
    """The epoch of each subject."""
    domain: str = ""

    def __post_init__(self) -> None:
        assert len(self.ns) == TAG_BYTES
        assert len(self.subjects) == len(self.epochs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One part of every block, in the order in which they lie in memory."""

    name: str
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What the bytes of a block mean. Two stores exchange blocks only where all of it is equal."""

    model: str
    """This and the next five are digests of content, never names for display."""
    adapter: str
    tokenizer: str
    rope: str
    dtype: str
    kv_format: str
    tp_rank: int
    tp_size: int
    block_tokens: int
    components: tuple[Component, ...]
    chunk_bytes: int = DEFAULT_CHUNK_BYTES

    def __post_init__(self) -> None:
        assert self.components
        assert self.chunk_bytes > 0
        assert all(part.size_bytes > 0 for part in self.components)
        assert 0 <= self.tp_rank < self.tp_size

    @cached_property
    def digest(self) -> bytes:
        """Each field tagged with its name and length, whole: no two layouts are written alike."""
        fields: list[tuple[str, bytes]] = [
            *((name, getattr(self, name).encode()) for name in _TEXTS),
            *((name, getattr(self, name).to_bytes(8, "big")) for name in _NUMBERS),
        ]
        for part in self.components:
            fields.append(("component", part.name.encode()))
            fields.append(("size_bytes", part.size_bytes.to_bytes(8, "big")))
        state = hashlib.blake2b(_LAYOUT_TAG, digest_size=LAYOUT_BYTES)
        for name, value in fields:
            for piece in (name.encode(), value):
                state.update(len(piece).to_bytes(4, "big"))
                state.update(piece)
        return state.digest()

    @cached_property
    def block_bytes(self) -> int:
        return sum(part.size_bytes for part in self.components)

    @cached_property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Begin and end of each chunk in a block."""
        total = self.block_bytes
        return tuple(
            (begin, min(begin + self.chunk_bytes, total))
            for begin in range(0, total, self.chunk_bytes)
        )


_TEXTS = ("model", "adapter", "tokenizer", "rope", "dtype", "kv_format")
_NUMBERS = ("tp_rank", "tp_size", "block_tokens", "chunk_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which block of which chain."""

    key: bytes
    parent: bytes
    """Key of the block before it; what the chain starts from where `index` is 0."""
    index: int

    def __post_init__(self) -> None:
        assert len(self.key) == KV_KEY_BYTES
        assert self.index >= 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What is on one finished block: one for all its components."""

    place: Place
    owner: Owner
    generation: int
    """Of the memory it lies in: raised each time that is given to a block."""
    layout_digest: bytes
    chunk_bytes: int
    digests: tuple[bytes, ...]
    """One a chunk, made from the final bytes where the block was made."""
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One block that is pinned, and what is on it."""

    manifest: Manifest
    data: memoryview
    """Read only, and the block's own as long as the pin lives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pins:
    """A run of blocks that was found and is held, in one step."""

    token: bytes
    """For `unpin` and `renew`; empty where nothing was found and nothing is to be given back."""
    blocks: tuple[Block, ...]
    reason: Reason | None
    """Why the run ended before the keys did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The block is in the store."""

    manifest: Manifest
    is_new: bool
    """False where it was there already, with the same bytes."""


PutOutcome = Kept | Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """How many leading blocks of a staging others can find from now on."""

    count: int
    reason: Reason | None
    """Why not all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """A run of one chain became resident."""

    keys: tuple[bytes, ...]
    parent: bytes
    first_index: int
    tier: Tier
    owner: Owner


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """A block is not in that tier any more."""

    key: bytes
    tier: Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class Overflowed:
    """Events were dropped because nobody took them: ask the store for all that is resident."""


StoreEvent = Added | Gone | Overflowed


class Judge(Protocol):
    """The host's opinion. Asked under the store's lock: it must not wait, nor call the store."""

    def fault(self, owner: Owner) -> Reason | None:
        """Why nothing of this owner may be used or kept now; None when it may."""
        ...


def always() -> bool:
    """Somebody wants it, however long it takes."""
    return True
