"""Wrong functions for `planted.py`: each takes the right one and gives what stands in its place.

Read `planted.py` for where each is put, and which check has to see it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from trunkline.core.identity import Epochs, derive_namespace
from trunkline.ports.worker import AttemptEnd

Wrong = Any
"""What stands in a function's place: its types are those of whatever it replaces."""


def always(value: Wrong) -> Callable[[Wrong], Wrong]:
    return lambda _right: lambda *_args, **_words: value


def at_once(value: Wrong) -> Callable[[Wrong], Wrong]:
    """Of what is awaited."""

    def wrong(_right: Wrong) -> Wrong:
        async def do(*_args: Any, **_words: Any) -> Any:
            return value

        return do

    return wrong


def nothing(_right: Wrong) -> Wrong:
    return lambda *_args, **_words: None


def one_tenant(_right: Wrong) -> Wrong:
    def derive(root: bytes, scope: Any, model: Any, known: Any = None) -> Any:
        return derive_namespace(root, replace(scope, tenant="0" * 32), model, known)

    return derive


def one_user(_right: Wrong) -> Wrong:
    def derive(root: bytes, scope: Any, model: Any, known: Any = None) -> Any:
        return derive_namespace(root, replace(scope, user=scope.user and "all"), model, known)

    return derive


def no_epochs(_right: Wrong) -> Wrong:
    def derive(root: bytes, scope: Any, model: Any, _known: Any = None) -> Any:
        return derive_namespace(root, scope, model, Epochs())

    return derive


def forgets_rev(right: Wrong) -> Wrong:
    def obey(self: Any, rev: int, subject: str, epoch: int) -> None:
        right(self, rev, subject, epoch)
        self._rev = 0

    return obey


def lowers_epoch(right: Wrong) -> Wrong:
    def enabled(self: Any, subject: Any, *, rev: int) -> Any:
        made = right(self, subject, rev=rev)
        return replace(made, epochs={**made.epochs, subject: 0})

    return enabled


def usable_all(_right: Wrong) -> Wrong:
    def usable(self: Any, boot: Any, tried: Any = frozenset()) -> Any:
        if self._usable is None or boot >= self._recheck_at:
            self._rebuild(boot)
        left = [state for state in self._states.values() if state.worker not in tried]
        return left, self._excluded

    return usable


def drops_some(right: Wrong) -> Wrong:
    """Of the buffers that begin an event, every tenth."""
    count = [0]

    def write(self: Any, data: bytes) -> None:
        count[0] += 1
        if not (count[0] % 10 == 0 and b'"choices"' in data and not data.startswith(b"HTTP")):
            right(self, data)

    return write


def doubles_some(right: Wrong) -> Wrong:
    count = [0]

    def write(self: Any, data: bytes) -> None:
        count[0] += 1
        right(self, data)
        if count[0] % 10 == 0 and b'"choices"' in data and not data.startswith(b"HTTP"):
            right(self, data)

    return write


def ends_only_good(right: Wrong) -> Wrong:
    def ended(self: Any, pick: Any, end: AttemptEnd, cached_tokens: int | None) -> None:
        if end is not AttemptEnd.WORKER_FAILED:
            right(self, pick, end, cached_tokens)

    return ended


def keeps_aborted(right: Wrong) -> Wrong:
    """Who is aborted while it runs keeps its blocks."""

    def abort(self: Any, job: Any) -> None:
        if job.sequence is None or job.is_over:
            right(self, job)
            return
        del self.running[job]
        job.is_over = True
        job.wake()

    return abort


def never_ends_tenants(right: Wrong) -> Wrong:
    def end(self: Any, principal: Any) -> None:
        if self.taken == 1:  # of two that run at once one stays counted
            right(self, principal)

    return end


def counts_one_more(right: Wrong) -> Wrong:
    def usage(job: Any, completion_tokens: int) -> Any:
        return right(job, completion_tokens + 1)

    return usage


def fails_at_times(right: Wrong) -> Wrong:
    count = [0]

    def first_byte(self: Any, pick: Any) -> None:
        count[0] += 1
        if count[0] % 7 == 0:
            raise RuntimeError("planted")
        right(self, pick)

    return first_byte


def gives_up(right: Wrong) -> Wrong:
    async def beat(self: Any) -> None:
        await right(self)
        if self._is_lost:
            self._is_stock = True

    return beat


def lies_of_durability(_right: Wrong) -> Wrong:
    async def append(self: Any, _expected_rev: int, record: bytes) -> int:
        self.records = [*self.records, record]  # this process sees it, and no later one
        return len(self.records)

    return append


def keeps_no_line(_right: Wrong) -> Wrong:
    async def append(self: Any, _line: bytes, head: Any) -> bool:
        self.head = head
        return True

    return append


def applies_behind_a_gap(right: Wrong) -> Wrong:
    def on_gap(self: Any, seq: int, fingerprint: int, batch: Any, now: Any) -> None:
        if batch is None or self._is_catching_up():
            right(self, seq, fingerprint, batch, now)
            return
        self._sequence.advance(seq, fingerprint)
        self._residency.apply(batch, now)

    return on_gap


def loses_an_id(right: Wrong) -> Wrong:
    def read(forwarded: Any) -> Any:
        seen = right(forwarded)
        if seen.ids:
            seen.ids = seen.ids[:-1]
        seen.text = seen.text[:-1]
        return seen

    return read


def in_force_at_once(_right: Wrong) -> Wrong:
    return lambda self, _now: self._acked is not None and "gateway" in self._acked


def stays_indexed(right: Wrong) -> Wrong:
    """What is evicted can still be found under its old name."""

    def take(self: Any, sequence: Any) -> Any:
        before = {name: dict(copies) for name, copies in self._resident.items()}
        block = right(self, sequence)
        for name, copies in before.items():
            if block in copies:
                self._resident.setdefault(name, {})[block] = block.generation
        return block

    return take
