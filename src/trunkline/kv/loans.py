"""What a source lends for one pull: the blocks of a grant that it has, and until when.

Must never: lend a block that the grant does not name. Read `server.py` for who sends them.
"""

from __future__ import annotations

from collections.abc import Iterator

from trunkline.core.records import Instant
from trunkline.core.transfer import KV_KEY_BYTES, MAX_GRANT_BLOCKS, Grant, Reason
from trunkline.kv.records import Block, Layout, Pins
from trunkline.kv.wire import MAX_BUFFERS, MAX_MESSAGE_BYTES, ChunkHead, ChunkKind

MAX_ANNOUNCED_BYTES = MAX_MESSAGE_BYTES // 2
"""Digests in one answer; a pull of more gets its leading blocks."""


class Loan:
    """One pull that was granted, and what is lent for it."""

    __slots__ = ("blocks", "grant", "keys", "peer", "rest", "token", "until")

    def __init__(self, grant: Grant, packed_keys: bytes, until: Instant, peer: str) -> None:
        self.grant = grant
        self.keys = [
            packed_keys[at : at + KV_KEY_BYTES] for at in range(0, len(packed_keys), KV_KEY_BYTES)
        ]
        assert 1 <= len(self.keys) <= MAX_GRANT_BLOCKS
        self.until = until
        self.peer = peer
        self.token = b""
        self.blocks: list[Block] = []
        self.rest: Reason | None = None
        """Why not all blocks are lent."""

    def take(self, pins: Pins) -> None:
        """Lend the leading blocks that go into one answer, numbered as in the grant."""
        self.token, self.rest = pins.token, pins.reason
        size = 0
        for number, block in enumerate(pins.blocks):
            size += sum(len(digest) for digest in block.manifest.digests)
            if block.manifest.place.index != self.grant.first_block + number:
                self.rest = Reason.CHAIN
                return
            if size > MAX_ANNOUNCED_BYTES:
                self.rest = Reason.BUSY
                return
            self.blocks.append(block)


def chunks(blocks: list[Block], layout: Layout) -> Iterator[tuple[int, int, memoryview]]:
    """Number of the block, of its chunk, and the chunk."""
    for number, block in enumerate(blocks):
        for chunk, (begin, end) in enumerate(layout.spans):
            yield number, chunk, block.data[begin:end]


def batches(
    blocks: list[Block], layout: Layout, batch_bytes: int
) -> Iterator[tuple[list[bytes | memoryview], int]]:
    """What is sent together, chunks with their heads; and the bytes of the chunks."""
    buffers: list[bytes | memoryview] = []
    size = 0
    for block, chunk, data in chunks(blocks, layout):
        buffers.append(ChunkHead(ChunkKind.DATA, block, chunk, len(data)).packed())
        buffers.append(data)
        size += len(data)
        if size >= batch_bytes or len(buffers) >= MAX_BUFFERS:
            yield buffers, size
            buffers, size = [], 0
    if buffers:
        yield buffers, size
