"""What one gateway hands another of what a worker holds: slices of it, as of one batch of events.

Read `directory.py` for who makes and takes slices, `standstill.py` for the moment that all of them
are of.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

from trunkline.core.epochs import Subject
from trunkline.core.identity import Epochs, Scope
from trunkline.core.records import NamespaceTag
from trunkline.native import ROW_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A slice of what one worker holds."""

    packed: bytes = field(repr=False)
    """As `native/_rows.py` has it."""
    tags: tuple[NamespaceTag, ...]
    """The namespaces that the rows count; empty for one that was retired."""
    next_start: int = -1
    """Where the next slice begins; -1 where this is the last."""

    @property
    def count(self) -> int:
        return len(self.packed) // ROW_BYTES

    def hashes(self) -> Iterator[int]:
        """The engine's names of the blocks, with which rows begin."""
        whole = self.packed[: self.count * ROW_BYTES]
        return (name for (name,) in struct.iter_unpack(f"<Q{ROW_BYTES - 8}x", whole))


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where a feed stands: all that is known is as of the batch `seq`, which looked like this."""

    seq: int
    fingerprint: int
    base: int
    """From which batch on nothing is missing; 0 where all is known that is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """What a namespace is derived from, but for the fleet's secret and the model: who has those
    derives the same one, and nobody else can.
    """

    tag: NamespaceTag
    scope: Scope
    epochs: Epochs
    adapter: str
    block_tokens: int
    subjects: tuple[Subject, ...]
