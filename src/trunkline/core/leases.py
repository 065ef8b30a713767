"""Whose heartbeats count: one incarnation of each worker, and only forwards.

A heartbeat is registration and renewal in one: it says everything there is to say (incarnation,
block size, what is held) and replaces all that was said before, so that the next one of the same
life takes up a lease that had run out. What can not come back is an earlier life: it is fenced.

How long the worker is then believed is `WorkerState.lease_ends_at`, the one truth of it, counted on
the boot clock from receipt. Must never: read a clock. Read `fleet.py` next.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from trunkline.core.records import WorkerId

FENCED_LIVES = 64
"""Earlier lives of a worker that are remembered; beyond it the oldest is forgotten. A heartbeat
that late has come through 64 restarts."""


@dataclass(slots=True, kw_only=True)
class _Incarnation:
    boot_nonce: str
    counter: int
    fenced: deque[str] = field(default_factory=lambda: deque[str](maxlen=FENCED_LIVES))


class LeaseTable:
    """The present incarnation of each worker that sends heartbeats, and the earlier ones."""

    def __init__(self) -> None:
        self._known: dict[WorkerId, _Incarnation] = {}

    def renew(self, worker: WorkerId, boot_nonce: str, counter: int) -> str | None:
        """Take a heartbeat; None when it is good, else why it is refused.

        A new boot nonce begins a new life and fences the old one; inside a life `counter` must
        grow.
        """
        known = self._known.get(worker)
        if known is None:
            self._known[worker] = _Incarnation(boot_nonce=boot_nonce, counter=counter)
            return None
        if boot_nonce in known.fenced:
            return f"{worker}: this incarnation was replaced by a newer one"
        if boot_nonce == known.boot_nonce:
            if counter <= known.counter:
                return f"{worker}: heartbeat {counter} does not follow {known.counter}"
        else:
            known.fenced.append(known.boot_nonce)
            known.boot_nonce = boot_nonce
        known.counter = counter
        return None

    def boot_nonce(self, worker: WorkerId) -> str | None:
        known = self._known.get(worker)
        return known.boot_nonce if known else None

    def forget(self, worker: WorkerId) -> None:
        """The worker was removed by an operator: a later heartbeat starts afresh."""
        self._known.pop(worker, None)
