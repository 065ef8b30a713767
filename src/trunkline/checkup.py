"""What a running gateway finds wrong with itself, its registry and its workers: `GET /doctor`.

Workers are visited meanwhile, which takes as long as an idle connection may live; their self-tests
are not repeated here (`POST /workers/{id}/check` does). Must never: change anything. Read
`control/diagnosis.py` for workers, `sound_settings.py` for settings.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

from trunkline import cli
from trunkline.authority import Authority, Tenants
from trunkline.config import Config
from trunkline.control.diagnosis import MAX_CLOCK_OFF_S, ailments_of_workers
from trunkline.control.fleets import Members
from trunkline.control.gateways import PeerView
from trunkline.control.visit import visit_all
from trunkline.core.ailment import GATEWAY, Ailment
from trunkline.core.alignment import State
from trunkline.model_half import Half
from trunkline.ports.clock import Clock
from trunkline.sound_settings import ailments_of, descriptors_limit


class Checkup:
    """One for a gateway."""

    def __init__(
        self,
        config_of: Callable[[], Config],
        members: Members,
        halves: Sequence[Half],
        authority: Authority,
        clock: Clock,
    ) -> None:
        """`config_of` gives the settings in force."""
        self._config_of = config_of
        self._members = members
        self._halves = halves
        self._authority = authority
        self._clock = clock
        self._turn = asyncio.Lock()
        """Workers are visited for one caller at a time."""

    async def look(self) -> list[Ailment]:
        config, views = self._config_of(), self._members.views()
        idle_ms = config.upstream.keepalive_idle_ms
        async with self._turn:
            visits = await visit_all(
                [(view.name, view.endpoint) for view in views if view.ranks],
                path=config.health.health_check_endpoint,
                idle_ms=idle_ms,
                clock=self._clock,
            )
        # As they are now, after the visits: a worker may have left meanwhile.
        views = self._members.views()
        found = ailments_of_workers(
            views,
            visits,
            idle_ms=idle_ms,
            keeps_apart=self._authority.tenants is not None,
        )
        found += ailments_of(config, descriptors_limit(), len(views))
        if self._authority.tenants is not None:
            found += _tenancy(self._authority.tenants)
        found += self._fleets()
        return found

    def _fleets(self) -> Iterator[Ailment]:
        for core in (half.core for half in self._halves):
            if core.fleet.is_panicking:
                yield Ailment(
                    what="panic",
                    subject=core.model.name or GATEWAY,
                    expected="less than half of the workers in doubt",
                    found="more than half are silent, late or failing: none is left out for that",
                    remedy="look for what they have in common: the network, an overload, a release",
                )


def _tenancy(tenants: Tenants) -> Iterator[Ailment]:
    gateways, audit = tenants.gateways, tenants.audit.health()
    if gateways is not None and not gateways.is_valid():
        yield Ailment(
            what="registry",
            subject="control.control",
            expected="a lease on the registry, so that caches may be reused",
            found=f"none: {gateways.trouble or 'it ran out'}",
            remedy="bring NATS back (trunkline doctor --config FILE looks at its servers)",
        )
    if gateways is not None:
        yield from ailments_of_peers(gateways.peers(), cli.version())
    if audit.sinks_up < audit.sinks:
        yield Ailment(
            what="audit",
            subject=GATEWAY,
            expected=f"{audit.sinks} places that take audit records",
            found=f"{audit.sinks_up}: {audit.trouble or 'it does not say why'}",
            remedy="make room there, or make the folder writable"
            + (": nothing is granted until then" if not audit.sinks_up else ""),
        )
    if audit.dropped or audit.checkpoint_failures:
        yield Ailment(
            what="audit",
            subject=GATEWAY,
            expected="every audit record and checkpoint to be kept",
            found=f"{audit.dropped} records dropped, {audit.checkpoint_failures} checkpoints not"
            " written",
            remedy="see audit.down in the log; trunkline audit verify says what is there",
            state=State.WRONG,
        )


def ailments_of_peers(peers: Sequence[PeerView], own_version: str) -> Iterator[Ailment]:
    """Of other gateways at the same registry."""
    for peer in peers:
        name = peer.life.partition("#")[0]
        if peer.version and peer.version != own_version:
            yield Ailment(
                what="version",
                subject=name,
                expected=f"trunkline {own_version}, as here",
                found=peer.version,
                remedy="install one release at all gateways of a registry; between two is for the"
                " time of an upgrade",
            )
        if peer.clock_off_s is not None and abs(peer.clock_off_s) > MAX_CLOCK_OFF_S:
            way = "fast" if peer.clock_off_s > 0 else "slow"
            yield Ailment(
                what="clock",
                subject=name,
                expected=f"a clock within {MAX_CLOCK_OFF_S:g} s of this gateway's",
                found=f"{abs(peer.clock_off_s):.0f} s {way}",
                remedy="keep the time there and here (chrony, systemd-timesyncd): keys and tokens"
                " end by it, and audit logs are read by it",
            )
