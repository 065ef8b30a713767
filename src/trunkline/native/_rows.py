"""How one gateway's index tells another what a worker holds: a row for each engine hash.

    engine hash (u64)  key (32 bytes)  number of the namespace (u32)  copies in each tier (4 x u16)

All little-endian, 52 bytes. The number counts a list that goes with the rows. Must never: take a
row for granted; who hands rows in has checked that a gateway of the fleet made them, no more.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from trunkline.native._cells import Held

ROW = struct.Struct("<Q32sI4H")
ROW_BYTES = ROW.size


def packed_rows(cells: Iterable[tuple[int, Held, int]]) -> tuple[bytes, list[int]]:
    """Rows of engine hashes with what they name and its namespace; and the namespaces that the
    rows count.
    """
    ids: dict[int, int] = {}
    rows = [
        ROW.pack(name, held.entry.key, ids.setdefault(of, len(ids)), *held.copies)
        for name, held, of in cells
    ]
    return b"".join(rows), list(ids)


def rows_of(packed: bytes, namespace_count: int) -> list[tuple[int, bytes, int, tuple[int, ...]]]:
    """Engine hash, key, number of the namespace and copies of each row. Raises ValueError."""
    if len(packed) % ROW.size:
        raise ValueError(f"rows have {len(packed)} bytes, which is no multiple of {ROW.size}")
    table: list[tuple[int, bytes, int, tuple[int, ...]]] = []
    for engine_hash, key, place, *copies in ROW.iter_unpack(packed):
        if place >= namespace_count or not any(copies):
            raise ValueError("a row names no namespace, or a block without a copy")
        table.append((engine_hash, key, place, tuple(copies)))
    return table
