"""What the audit log needs: sinks for its lines, a signer, and a second place for checkpoints.

`control/audit.py` makes the records and asks; `adapters/audit_files.py` and `adapters/signing.py`
are what stands behind. A sink keeps lines and never judges what is in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from trunkline.core.audit import Checkpoint, Head


class SinkDown(Exception):
    """The sink cannot keep or show anything now. An append that ends so may have left a part of
    itself behind, which `rewind` takes away.
    """


class SinkStuck(SinkDown):
    """The sink did not answer in time."""


class SinkBroken(SinkDown):
    """What the sink holds is no unbroken chain; the message names where. It can be set aside."""


class AuditSink(Protocol):
    """One place that keeps the log's lines durably. Owned by one process at a time."""

    name: str
    """For operators: where it is."""

    async def open(self) -> Head:
        """Take the place, drop a torn last line, and say where its chain ends. May be called again
        after it failed. Raises SinkDown.
        """
        ...

    async def append(self, lines: Sequence[bytes], head: Head) -> None:
        """Durably add lines (without line ends), after which the chain ends at `head`. Raises
        SinkDown.
        """
        ...

    async def rewind(self, head: Head) -> None:
        """Drop what stands behind `head`: lines whose append was never acknowledged. Raises
        SinkDown, also where `head` is not in the newest segment.
        """
        ...

    async def read(self, after_seq: int, limit: int) -> list[bytes]:
        """Up to `limit` lines behind this position, in order. Raises SinkDown."""
        ...

    async def closed_segments(self) -> list[Segment]:
        """The segments that take no more lines, oldest first. Raises SinkDown."""
        ...

    async def drop_segment(self, segment: Segment) -> None:
        """Remove one closed segment. Raises SinkDown."""
        ...

    async def set_aside(self) -> Head:
        """Move everything to a folder of its own, as evidence, and begin anew. Raises SinkDown,
        also where there is so much of it that somebody must look first.
        """
        ...

    async def check(self) -> None:
        """Whether the place is still there, as its owner left it. Raises SinkDown."""
        ...

    async def close(self) -> None: ...


class Segment(Protocol):
    """A closed piece of the log, as its sink names it."""

    @property
    def first_seq(self) -> int: ...
    @property
    def last(self) -> Head: ...
    @property
    def last_wall_ms(self) -> int: ...


class Signer(Protocol):
    """Signs checkpoints. The secret stays in the adapter."""

    key_id: str

    def sign(self, message: bytes) -> bytes: ...

    def is_signed(self, message: bytes, signature: bytes) -> bool: ...


class CheckpointKeeper(Protocol):
    """The second place of checkpoints: another disk, an auditor's process."""

    name: str
    """For operators: where it is."""

    async def keep(self, checkpoint: Checkpoint) -> None:
        """Raises SinkDown."""
        ...

    async def recent(self, limit: int) -> list[Checkpoint]:
        """The last ones that were kept, in that order. Raises SinkDown."""
        ...
