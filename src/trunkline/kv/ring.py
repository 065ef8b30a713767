"""Chunks between two processes of one host: a few slots of memory that both see.

The source makes it (a sealed memfd), copies a chunk of a granted block into a free slot, and says
so on the socket; the destination copies it out and gives the slot back with one byte. So nothing
but granted bytes is ever in it, and what the destination verifies is its own copy, which the source
cannot change afterwards.

Must never: be trusted by the destination: a handle whose size can still change, or that is too
small, is not mapped. Linux alone has it; elsewhere, and where it fails, TCP does the work.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
from collections.abc import Callable

from trunkline.core.records import Instant
from trunkline.core.transfer import Reason
from trunkline.kv.records import Layout
from trunkline.kv.wire import Channel, Fault

SLOTS = 4
"""Two would do for one copying in while the other copies out; two more ride out the scheduler."""
CREDIT = b"c"
OFFER = b"r"
_F_SEAL_FUTURE_WRITE = 0x10
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW = 1, 2, 4
_NEEDED_SEALS = _F_SEAL_SHRINK | _F_SEAL_GROW


def slot_bytes_of(layout: Layout) -> int:
    return min(layout.block_bytes, layout.chunk_bytes)


def is_supported() -> bool:
    return hasattr(os, "memfd_create") and hasattr(socket, "AF_UNIX")


class Ring:
    """The source's side of one connection."""

    __slots__ = ("_memory", "_slot_bytes", "_used_bytes", "_view")

    def __init__(self, connected: socket.socket, layout: Layout) -> None:
        """Make it and hand it over. Its pages cost nothing until a chunk is put there. Raises
        OSError.
        """
        self._slot_bytes = slot_bytes_of(layout)
        self._used_bytes = [0] * SLOTS
        size = SLOTS * self._slot_bytes
        handle = os.memfd_create("trunkline-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(handle, size)
            self._memory = mmap.mmap(handle, size)
            # From here on nobody maps it for writing, and its size stays.
            seals = _NEEDED_SEALS | _F_SEAL_FUTURE_WRITE | _F_SEAL_SEAL
            fcntl.fcntl(handle, _F_ADD_SEALS, seals)
            self._view = memoryview(self._memory)
            socket.send_fds(connected, [OFFER], [handle])
        finally:
            os.close(handle)

    def put(self, slot: int, chunk: memoryview) -> None:
        assert len(chunk) <= self._slot_bytes, len(chunk)
        begin = slot * self._slot_bytes
        self._used_bytes[slot] = max(self._used_bytes[slot], len(chunk))
        self._view[begin : begin + len(chunk)] = chunk

    def wipe(self) -> None:
        """Overwrite what was put; the peer has given all slots back."""
        for slot, used_bytes in enumerate(self._used_bytes):
            begin = slot * self._slot_bytes
            self._view[begin : begin + used_bytes] = bytes(used_bytes)
        self._used_bytes = [0] * SLOTS

    def close(self) -> None:
        self._view.release()
        self._memory.close()


class RingReader:
    """The destination's side."""

    __slots__ = ("_memory", "_slot_bytes", "_view")

    def __init__(
        self, channel: Channel, layout: Layout, due: Instant, guard: Callable[[], None]
    ) -> None:
        """Take the ring that the source offers. Raises Fault or OSError."""
        self._slot_bytes = slot_bytes_of(layout)
        size = SLOTS * self._slot_bytes
        handle = channel.receive_handle(OFFER, due, guard)
        try:
            seals = fcntl.fcntl(handle, _F_GET_SEALS)
            if seals & _NEEDED_SEALS != _NEEDED_SEALS or os.fstat(handle).st_size != size:
                raise Fault(Reason.PROTOCOL)
            self._memory = mmap.mmap(handle, size, prot=mmap.PROT_READ)
        finally:
            os.close(handle)
        self._view = memoryview(self._memory)

    def copy_into(self, view: memoryview, slot: int) -> None:
        """Raises Fault for a slot that is none."""
        if not 0 <= slot < SLOTS or len(view) > self._slot_bytes:
            raise Fault(Reason.PROTOCOL)
        begin = slot * self._slot_bytes
        view[:] = self._view[begin : begin + len(view)]

    def close(self) -> None:
        self._view.release()
        self._memory.close()
