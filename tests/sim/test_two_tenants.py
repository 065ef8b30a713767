"""Two tenants on the agents' trace, a namespace for each session: what it costs, and no hit across.

Whose block each hit is, is written down beside the caches: the model itself knows only keys.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from trunkline.core.identity import ModelIdentity, Namespace, Scope, ScopeKind, derive_namespace
from trunkline.replay.traces import TraceRequest
from trunkline.replay.workloads import Workload, find_workload, load_workload
from trunkline.sim.cache import PrefixCache, Use
from trunkline.sim.model import FleetModel, ModelOptions
from trunkline.sim.outcome import Outcome

TRACES = Path(__file__).resolve().parents[2] / "traces"
MOST_COST = 0.005
"""Half a point of all input tokens."""


@dataclass(slots=True)
class Owners:
    """Who wrote each block, and who is asking now."""

    asking: tuple[str, str] = ("", "")
    """Tenant and session."""
    cross_tenant: int = 0
    cross_session: int = 0
    of: dict[bytes, tuple[str, str]] = field(default_factory=dict[bytes, tuple[str, str]])


class OwnedCache(PrefixCache):
    """Counts hits on what somebody else wrote."""

    def __init__(self, capacity_blocks: int, owners: Owners) -> None:
        super().__init__(capacity_blocks)
        self._owners = owners

    def use(self, keys: list[bytes], block_ids: array[int]) -> Use:
        used, owners = super().use(keys, block_ids), self._owners
        for key in keys[: used.hit_blocks]:
            owner = owners.of[key]
            owners.cross_tenant += owner[0] != owners.asking[0]
            owners.cross_session += owner != owners.asking
        for key in keys[used.hit_blocks :]:
            owners.of[key] = owners.asking
        return used


class TwoTenants(FleetModel):
    """`shares` says who meets whose blocks: `all`, `tenant` or `session`."""

    def __init__(self, workload: Workload, shares: str, seed: int, tenants: Sequence[str]) -> None:
        super().__init__(workload, ModelOptions(seed=seed), lambda: 0.0)
        self.owners = Owners()
        self._shares = shares
        self._tenants = tenants
        """Of each request, in their order."""
        for worker in self._workers.values():
            worker.cache.device = OwnedCache(workload.capacity_blocks, self.owners)

    def _namespace(self, number: int, request: TraceRequest) -> Namespace:
        tenant = self._tenants[number]
        session = (request.session or str(number)).partition("/")[0]
        self.owners.asking = (tenant, session)
        match self._shares:
            case "all":
                scope = Scope(kind=ScopeKind.ORG, org="o")
            case "tenant":
                scope = Scope(kind=ScopeKind.TENANT, org="o", tenant=tenant)
            case _:
                scope = Scope(
                    kind=ScopeKind.SESSION, org="o", tenant=tenant, user="u", session=session
                )
        name = f"{scope.tenant}/{scope.session}"
        known = self._namespaces.get(name)
        if known is None:
            identity = ModelIdentity(model_id=self._workload.name, block_tokens=1)
            known = self._namespaces[name] = derive_namespace(b"r" * 32, scope, identity)
            self._directory.admit_namespace(known)
        return known


def run(
    workload: Workload,
    requests: Sequence[TraceRequest],
    tenants: Sequence[str],
    shares: str,
    seed: int = 0,
) -> tuple[Outcome, Owners]:
    model = TwoTenants(workload, shares, seed, tenants)
    outcome = model.run(requests)
    assert outcome.false_hits == 0
    return outcome, model.owners


def hits(outcome: Outcome) -> float:
    return outcome.hit_tokens / outcome.input_tokens


def dealt(requests: Sequence[TraceRequest]) -> list[str]:
    """Every second session is the other tenant's."""
    of: dict[str, str] = {}
    for number, request in enumerate(requests):
        session = (request.session or str(number)).partition("/")[0]
        of.setdefault(session, f"tenant-{len(of) % 2}")
    return [
        of[(request.session or str(number)).partition("/")[0]]
        for number, request in enumerate(requests)
    ]


@pytest.mark.slow
def test_two_tenants_with_a_namespace_a_session_lose_at_most_half_a_point() -> None:
    """The whole of W2, its sessions dealt to two tenants; their agents' prompts begin alike. Over
    three seeds: the draw of a few cold placements alone moves a run by 0.2 points.
    """
    workload, requests = find_workload("W2"), load_workload("W2", traces_dir=TRACES)
    tenants = dealt(requests)
    costs: list[float] = []
    for seed in (0, 1, 2):
        shared, shared_owners = run(workload, requests, tenants, "all", seed)
        apart, owners = run(workload, requests, tenants, "session", seed)
        assert owners.cross_tenant == owners.cross_session == 0
        assert shared_owners.cross_tenant > 1_000, "there was something to be met across tenants"
        costs.append(hits(shared) - hits(apart))
    assert sum(costs) / len(costs) <= MOST_COST, costs


def test_two_tenants_that_say_the_very_same_meet_nothing_of_each_other() -> None:
    """Each request of the trace comes from both, at the same time, on a fleet twice as large. Each
    has the hits that it would have with its sessions in one namespace of its own.
    """
    small, requests = find_workload("W2-smoke"), load_workload("W2-smoke", traces_dir=TRACES)
    workload = replace(small, workers=2 * small.workers)
    doubled = [request for request in requests for _ in range(2)]
    tenants = ["tenant-0", "tenant-1"] * len(requests)
    together, together_owners = run(workload, doubled, tenants, "tenant")
    apart, owners = run(workload, doubled, tenants, "session")
    everybody, everybodys_owners = run(workload, doubled, tenants, "all")
    assert hits(together) - hits(apart) <= MOST_COST
    assert owners.cross_tenant == owners.cross_session == 0
    assert together_owners.cross_tenant == 0
    assert everybodys_owners.cross_tenant > 1_000
    assert hits(everybody) > hits(apart)
