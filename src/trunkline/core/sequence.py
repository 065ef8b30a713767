"""Where one event stream stands: the next number, the last ones seen, and batches that wait.

    base ... applied ... expected-1 | expected ...missing... | held ... held
                          witness                              strictly growing

Owns numbers and the buffer, no meaning: what a gap leads to is `feed.py`'s affair. Must never: hold
batches out of order. The buffer's bound is kept by the feed.
"""

from __future__ import annotations

from collections import OrderedDict

from trunkline.core.events import EventBatch

_PLACE_BYTES = 400
"""What the buffer takes for one batch, its content apart."""
RECENT_BATCHES = 1_024
"""Fingerprints kept: a repeat further back than this is taken for another life of the engine."""


class Sequence:
    """One life's numbering. `expected` is None where any number may come next."""

    def __init__(self) -> None:
        self.expected: int | None = None
        self.base: int | None = None
        """The first batch that the present state was built from; None before there is one."""
        self.is_whole = False
        """Whether the present state is all there is, and not only what was told from `base` on."""
        self.buffered_bytes = 0
        """What the batches that wait take in memory, about."""
        # Not plain dicts: taking the oldest again and again would search past all taken before.
        self._recent: OrderedDict[int, int] = OrderedDict()
        self._held: OrderedDict[int, tuple[int, EventBatch | None, int]] = OrderedDict()
        self._newest_held = -1

    @property
    def buffered_count(self) -> int:
        return len(self._held)

    @property
    def has_begun(self) -> bool:
        """Whether any batch was applied or waits."""
        return self.expected is not None or bool(self._held)

    def holds_more(self, batch_count: int, size_bytes: int) -> bool:
        return self.buffered_count > batch_count or self.buffered_bytes > size_bytes

    # -- beginning anew ----------------------------------------------------------------------------

    def begin(self, *, keep_buffer: bool = False) -> None:
        """Nothing is applied any more, and any number may come next."""
        self.expected = None
        self.base = None
        self.is_whole = False
        self._recent.clear()
        if not keep_buffer:
            self._held.clear()
            self.buffered_bytes = 0

    def begin_at_tail(self) -> None:
        """Begin anew with the last unbroken stretch of what waits."""
        tail: list[int] = []
        for seq in reversed(self._held):
            if self._held[seq][1] is None or (tail and tail[-1] != seq + 1):
                break
            tail.append(seq)
        held = {seq: self._held[seq] for seq in reversed(tail)}
        self.begin()
        for seq, (fingerprint, batch, _) in held.items():
            self.hold(seq, fingerprint, batch)

    def keep_newest(self) -> None:
        """Let go of all that waits but the newest batch."""
        while len(self._held) > 1:
            self.release(next(iter(self._held)))

    def expect_first(self) -> None:
        """The publisher had sent nothing yet: its first batch has number 0."""
        self.expected = 0
        self.is_whole = True

    def begin_whole(self, base: int) -> None:
        """From this batch on all is known that is there."""
        self.base = base
        self.is_whole = True

    # -- asking ------------------------------------------------------------------------------------

    def grows(self, seq: int) -> bool:
        """Whether a live batch is newer than all that came before it."""
        if self._held:
            return seq > self._newest_held
        return not self.is_past(seq)

    def is_past(self, seq: int) -> bool:
        return self.expected is not None and seq < self.expected

    def follows(self, seq: int) -> bool:
        return self.expected is None or seq == self.expected

    def is_repeat(self, seq: int, fingerprint: int) -> bool:
        """Whether this very batch is known already."""
        held = self._held.get(seq)
        return (held is not None and held[0] == fingerprint) or (
            self._recent.get(seq) == fingerprint
        )

    def contradicts(self, seq: int, fingerprint: int) -> bool:
        """Whether another batch of this number was applied."""
        return self._recent.get(seq, fingerprint) != fingerprint

    def witness(self) -> int | None:
        """The last batch applied, if it can be recognised."""
        last = None if self.expected is None else self.expected - 1
        return last if last in self._recent else None

    def place(self) -> tuple[int, int] | None:
        """Number and fingerprint of the last batch applied, if it can be recognised."""
        last = self.witness()
        return None if last is None else (last, self._recent[last])

    def has_reached_held(self) -> bool:
        """Whether batches wait, and none is missing before the first of them: a replay that told
        so much has no more to tell. (A publisher drops what its reader is too slow for, the mark
        at the end, too.)
        """
        held = self.first_held()
        return held is not None and self.expected is not None and held[0] <= self.expected

    # -- moving ------------------------------------------------------------------------------------

    def advance(self, seq: int, fingerprint: int) -> None:
        """A batch was applied, or given up."""
        if self.base is None:
            self.base = seq
            self.is_whole = seq == 0 or self.is_whole
        self.expected = seq + 1
        self._recent.pop(seq, None)
        self._recent[seq] = fingerprint
        if len(self._recent) > RECENT_BATCHES:
            self._recent.popitem(last=False)

    def hold(self, seq: int, fingerprint: int, batch: EventBatch | None) -> None:
        """Let a batch wait; None stands for one that cannot be decoded."""
        assert not self._held or seq > self._newest_held, "what waits is strictly growing"
        size_bytes = _PLACE_BYTES + (0 if batch is None else batch.size_bytes())
        self._held[seq] = (fingerprint, batch, size_bytes)
        self._newest_held = seq
        self.buffered_bytes += size_bytes

    def first_held(self) -> tuple[int, int, EventBatch | None] | None:
        """Number, fingerprint and batch of the oldest that waits."""
        for seq, (fingerprint, batch, _) in self._held.items():
            return seq, fingerprint, batch
        return None

    def release(self, seq: int) -> None:
        """Take a batch out of the buffer."""
        _, _, size_bytes = self._held.pop(seq)
        self.buffered_bytes -= size_bytes
