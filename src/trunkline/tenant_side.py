"""What stands beside the core where tenants are kept apart: line and filler, and what they count.

No series names a tenant: metrics are read by more people than may know who is a customer. Read
`authority.py` for who may what, `operations.py` for all that does not depend on tenants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from trunkline.assembly import Core
from trunkline.authority import Tenants
from trunkline.gateway.contracts import InferenceRequest
from trunkline.gateway.errands import Errands
from trunkline.gateway.fair_line import FairPicker, LineLimits
from trunkline.gateway.filler import Filler, FillerParts
from trunkline.gateway.metrics import Sample, summed
from trunkline.observe import EventLog


class TenantSide:
    """The line in front of the fleet, the filler of public prefixes; a `MetricsSource`."""

    def __init__(
        self,
        core: Core,
        tenants: Tenants,
        *,
        renew: Callable[[InferenceRequest], None],
        errands: Errands,
        limits: LineLimits,
        log: EventLog,
    ) -> None:
        publics = core.namespaces.publics
        assert publics is not None, "the authority knows the fleet"
        self._namespaces = core.namespaces
        self._publics = publics
        self.line = FairPicker(
            core.picker,
            fleet=core.fleet,
            clock=tenants.clock,
            limits=limits,
            allowance=tenants.allowance,
            renew=renew,
        )
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
        line = self.line
        yield Sample("line_waiting", line.waiting_count)
        yield Sample("line_ended_total", line.accounts.released, ("sent",))
        yield Sample("line_ended_total", line.accounts.refused, ("refused",))
        yield Sample("line_ended_total", line.accounts.timed_out, ("timed-out",))
        yield Sample("line_ended_total", line.accounts.left, ("client-gone",))
        for priority, count in line.accounts.shed.items():
            yield Sample("line_shed_total", count, (priority.value,))
        yield Sample("line_overloaded", float(line.is_overloaded))
        yield Sample("line_waited_seconds_total", line.accounts.waited_ms / 1_000.0)
        yield Sample("namespaces_active", len(self._namespaces))
        yield Sample("public_prefixes_active", len(self._publics))
        yield Sample("public_fills_total", self.filler.filled)


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
        health = tenants.audit.health()
        yield Sample("audit_sinks_up", health.sinks_up)
        pending = health.pending + tenants.revoker.outbox.pending_records
        yield Sample("audit_records_pending", pending)
        yield Sample("audit_records_dropped_total", health.dropped)
        holders = tenants.holdings.all()
        yield Sample("worker_leases_active", sum(holder.is_granted() for holder in holders))
