"""How long a worker's word is believed without news.

A lease belongs to one incarnation: a late heartbeat of an earlier life never revives it. Validity
counts on the boot clock from the moment the news was *sent*, where the sender's request told it,
else from receipt. Read `fleet.py` next.
"""

from __future__ import annotations

from dataclasses import dataclass

from trunkline.core.records import BootInstant, WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right of one incarnation to be routed to, until `ends_at`."""

    boot_nonce: str
    counter: int
    ends_at: BootInstant


class LeaseTable:
    """Leases of the workers that send heartbeats."""

    def __init__(self, *, ttl_ms: float) -> None:
        self._ttl_ms = ttl_ms
        self._leases: dict[WorkerId, Lease] = {}
        self._fenced: dict[WorkerId, str] = {}

    def renew(
        self, worker: WorkerId, boot_nonce: str, counter: int, now: BootInstant
    ) -> str | None:
        """Take a heartbeat; None when it is good, else why it is refused.

        A new boot nonce begins a new life and fences the old one for good; inside a life `counter`
        must grow.
        """
        known = self._leases.get(worker)
        if self._fenced.get(worker) == boot_nonce:
            return f"{worker}: this incarnation was replaced by a newer one"
        if known is not None and known.boot_nonce == boot_nonce and counter <= known.counter:
            return f"{worker}: heartbeat {counter} does not follow {known.counter}"
        if known is not None and known.boot_nonce != boot_nonce:
            self._fenced[worker] = known.boot_nonce
        self._leases[worker] = Lease(
            boot_nonce=boot_nonce, counter=counter, ends_at=BootInstant(now + self._ttl_ms)
        )
        return None

    def is_live(self, worker: WorkerId, now: BootInstant) -> bool:
        """Whether the worker's lease holds at `now`; at its very end it does not."""
        lease = self._leases.get(worker)
        return lease is not None and now < lease.ends_at

    def boot_nonce(self, worker: WorkerId) -> str | None:
        lease = self._leases.get(worker)
        return lease.boot_nonce if lease else None

    def forget(self, worker: WorkerId) -> None:
        """The worker was removed by an operator: a later heartbeat starts afresh."""
        self._leases.pop(worker, None)
        self._fenced.pop(worker, None)
