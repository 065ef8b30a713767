"""Digests of blocks, and the one function that says whether bytes are what a manifest announces.

Every way in which a block comes to be used goes through `fault_of`: memory, disk, another worker.
Must never: take a length for a content. Read `store.py` next.
"""

from __future__ import annotations

from collections.abc import Callable

import xxhash

from trunkline.core.transfer import Reason
from trunkline.kv.records import Layout, Manifest

chunk_digest: Callable[[memoryview], bytes] = xxhash.xxh3_128_digest
"""16 bytes; protects from accidents inside one trust domain, not from who can choose the bytes."""


def digests_of(data: memoryview, layout: Layout) -> tuple[bytes, ...]:
    """One a chunk."""
    assert len(data) == layout.block_bytes
    return tuple(chunk_digest(data[begin:end]) for begin, end in layout.spans)


def shape_fault(manifest: Manifest, layout: Layout) -> Reason | None:
    """Whether the manifest speaks of blocks of this layout, before any byte is looked at."""
    if manifest.layout_digest != layout.digest or manifest.chunk_bytes != layout.chunk_bytes:
        return Reason.LAYOUT
    if manifest.size_bytes != layout.block_bytes:
        return Reason.LENGTH
    if len(manifest.digests) != len(layout.spans):
        return Reason.LENGTH
    return None


def fault_of(data: memoryview, manifest: Manifest, layout: Layout) -> Reason | None:
    """Why these bytes are not the block of that manifest; None when they are."""
    reason = shape_fault(manifest, layout)
    if reason is not None:
        return reason
    if len(data) != manifest.size_bytes:
        return Reason.LENGTH
    for (begin, end), digest in zip(layout.spans, manifest.digests, strict=True):
        if chunk_digest(data[begin:end]) != digest:
            return Reason.DIGEST
    return None
