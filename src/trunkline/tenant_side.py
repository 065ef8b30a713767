"""What stands beside the core where tenants are kept apart: the filler, and what is counted.

No series names a tenant: metrics are read by more people than may know who is a customer. Read
`authority.py` for who may what, `operations.py` for all that does not depend on tenants.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trunkline.assembly import Core
from trunkline.authority import Tenants
from trunkline.control.load_sync import LoadSync
from trunkline.control.siblings import HandoverStats
from trunkline.gateway.errands import Errands
from trunkline.gateway.filler import Filler, FillerParts
from trunkline.gateway.isolation import IsolationCost
from trunkline.gateway.metrics import Sample, summed
from trunkline.observe import EventLog


class TenantSide:
    """The namespaces of a model and the filler of its public prefixes; a `MetricsSource`."""

    def __init__(
        self,
        core: Core,
        *,
        errands: Errands,
        cost: IsolationCost,
        log: EventLog,
    ) -> None:
        self.cost = cost
        publics = core.namespaces.publics
        assert publics is not None, "the authority knows the fleet"
        self._namespaces = core.namespaces
        self._publics = publics
        self.filler = Filler(
            FillerParts(
                publics=publics,
                namespaces=core.namespaces,
                directory=core.directory,
                fleet=core.fleet,
                target_of=core.picker.target,
                errands=errands,
                log=log,
            )
        )

    def samples(self) -> Iterable[Sample]:
        """Of this model alone."""
        yield Sample("namespaces_active", len(self._namespaces))
        yield Sample("public_prefixes_active", len(self._publics))
        yield Sample("public_fills_total", self.filler.filled)
        yield from self.cost.samples()


class TenantMetrics:
    """What the sides of all models count, and the authority; a `MetricsSource`."""

    def __init__(self, sides: Sequence[TenantSide], tenants: Tenants) -> None:
        self._sides = sides
        self._tenants = tenants

    def samples(self) -> Iterable[Sample]:
        tenants = self._tenants
        yield from summed(sample for side in self._sides for sample in side.samples())
        yield Sample("rate_limited_total", tenants.allowance.refused_requests, ("requests",))
        yield Sample("rate_limited_total", tenants.allowance.refused_tokens, ("tokens",))
        yield Sample("registry_revision", tenants.registry.rev)
        yield Sample("registry_lost_revisions", tenants.registry.lost_revisions)
        if (gateways := tenants.gateways) is not None:
            yield Sample("gateway_lease_seconds", max(0.0, gateways.left_ms()) / 1_000.0)
            yield Sample("gateways_other", gateways.others())
            if gateways.load is not None:
                yield from _words(gateways.load)
            if gateways.siblings is not None:
                yield from _handovers(gateways.siblings.stats)
            if gateways.relays is not None:
                yield Sample("relayed_feeds_active", gateways.relays.listening_count)
                yield Sample("relayed_batches_total", gateways.relays.stats.heard, ("heard",))
                yield Sample("relayed_batches_total", gateways.relays.stats.told, ("told",))
        health = tenants.audit.health()
        yield Sample("audit_sinks_up", health.sinks_up)
        pending = health.pending + tenants.revoker.outbox.pending_records
        yield Sample("audit_records_pending", pending)
        yield Sample("audit_records_dropped_total", health.dropped)
        yield Sample("revocations_pending", tenants.revoker.pending_count)
        yield Sample("revocations_total", tenants.revoker.receipts.count)
        yield Sample("revocation_seconds_total", tenants.revoker.receipts.ms / 1_000.0)
        holders = tenants.holdings.all()
        yield Sample("worker_leases_active", sum(holder.is_granted() for holder in holders))


def _words(load: LoadSync) -> Iterable[Sample]:
    """What gateways tell one another of what they expect at the workers."""
    yield Sample("gateway_words_refused_total", load.refused)
    yield from (Sample("foretold_blocks_total", count, (end,)) for end, count in load.ends())


def _handovers(stats: HandoverStats) -> Iterable[Sample]:
    yield Sample("handovers_total", stats.taken, ("taken",))
    yield Sample("handovers_total", stats.failed, ("missed",))
    yield Sample("handovers_total", stats.told, ("told",))
    yield Sample("handed_over_blocks_total", stats.taken_blocks, ("taken",))
    yield Sample("handed_over_blocks_total", stats.told_blocks, ("told",))
