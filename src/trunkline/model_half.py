"""One model's half of a gateway: what decides for it, asks its workers, and how those join.

The other half (listener, admin port, authority, books) is one for all models. Read `wiring.py` for
who puts both together, `assembly.py` for what decides.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from trunkline.assembly import Core
from trunkline.authority import Authority
from trunkline.config import Config
from trunkline.control.alarm_watch import watch_alarms
from trunkline.control.clocks import watch_clocks
from trunkline.control.fleets import Fleets, Members
from trunkline.control.panic import watch_panic
from trunkline.control.parts import MemberParts
from trunkline.core.directory import Directory
from trunkline.core.records import WorkerId
from trunkline.errand_side import PullTest, errands_of, examiner_of, warmers_of
from trunkline.gateway.by_model import ByModel
from trunkline.gateway.contracts import Picker
from trunkline.gateway.errands import Errands
from trunkline.gateway.fair_line import FairPicker, LineLimits
from trunkline.gateway.intake import Intake
from trunkline.gateway.isolation import IsolationCost
from trunkline.gateway.metrics import Sample
from trunkline.gateway.picker import FleetPicker
from trunkline.gateway.preview import Preview
from trunkline.gateway.tenancy import Tenancy
from trunkline.observe import EventLog
from trunkline.ports.clock import Clock
from trunkline.tenant_side import TenantSide

_HOUSEKEEPING_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Half:
    """All that there is once for each model."""

    core: Core
    parts: MemberParts
    errands: Errands
    line: FairPicker | None
    """None where everybody is one tenant, unless the settings want one."""
    side: TenantSide | None
    """None where there is one tenant."""
    pull_test: PullTest
    clock: Clock
    log: EventLog

    def samples(self) -> Iterable[Sample]:
        """What the metrics say of this model's fleet."""
        yield from self.pull_test.samples()
        fleet, now = self.core.fleet, self.clock.now()
        usable, _ = fleet.usable(self.clock.boot())
        yield Sample("panic_routing", int(fleet.is_panicking))
        yield Sample("panics_total", fleet.panics_count)
        headroom = fleet.headroom.left(len(usable), now)
        if headroom is not None:
            yield Sample("n_minus_1_headroom", headroom, (self.core.model.name,))
        if self.line is not None:
            yield from self.line.samples()

    @property
    def picker(self) -> Picker:
        return self.line or self.core.picker

    def beside(self, config: Config, clock: Clock) -> list[Coroutine[Any, Any, None]]:
        """What runs beside requests."""
        work: list[Coroutine[Any, Any, None]] = [_keep_house(self.core.directory, clock)]
        work.append(watch_panic(self.core.fleet, clock, self.log))
        work += [self.side.filler.run()] if self.side else []
        work += [one.run() for one in warmers_of(self.core, clock, self.errands, self.log)]
        work += [] if config.health.disable_self_test else [self.pull_test.run()]
        return work


def half_of(
    config: Config,
    core: Core,
    parts: MemberParts,
    authority: Authority,
    clock: Clock,
    draw: Callable[[int], bytes],
    log: EventLog,
) -> Half:
    """`draw(n)` gives n unguessable bytes. The authority knows the core already."""
    errands = errands_of(core)
    parts.examine = examiner_of(core, clock, authority, errands, draw)
    tenants, line, side = authority.tenants, None, None
    if tenants is not None:
        cost = IsolationCost(clock, seed=int.from_bytes(draw(8), "little"))
        side = TenantSide(core, errands=errands, cost=cost, log=log)
    if tenants is not None or config.queue.queue_one_tenant:
        line = FairPicker(
            core.picker,
            fleet=core.fleet,
            clock=clock,
            limits=line_limits(config, has_tenants=tenants is not None),
            allowance=tenants.allowance if tenants else None,
            renew=authority.tenancy.renew,
            on_read=side.cost.note if side else None,
        )
    return Half(
        core=core,
        parts=parts,
        errands=errands,
        line=line,
        side=side,
        pull_test=PullTest(core, clock, authority, errands, draw, log),
        clock=clock,
        log=log,
    )


def line_limits(config: Config, *, has_tenants: bool) -> LineLimits:
    """Bounds of the line in front of one model's workers."""
    queue = config.queue
    # Who waits longer for a turn is refused before the data plane ends it.
    most_ms = 0.95 * config.upstream.first_byte_timeout_ms
    return LineLimits(
        max_waiting=queue.queue_size,
        max_waiting_per_tenant=queue.queue_size // 4 if has_tenants else queue.queue_size,
        max_wait_ms=min(queue.queue_timeout_secs * 1_000.0, most_ms),
        target_ms=queue.queue_target_ms,
        interval_ms=queue.queue_interval_ms,
    )


def served_by(
    halves: Sequence[Half], members: Members, tenancy: Tenancy
) -> tuple[Picker, Callable[[str], int]]:
    """Who chooses for a request, and below which number token ids for a model are."""
    if not isinstance(members, Fleets):
        [only] = halves
        return only.picker, lambda _name: only.core.prompts.vocab_size
    fleets, by_model = members, {half.core.model.name: half for half in halves}
    tenancy.meaning_of = fleets.meaning

    def vocab_size(name: str) -> int:
        half = by_model.get(fleets.meaning(name)[0])
        return half.core.prompts.vocab_size if half else 1 << 32  # it is refused in any case

    pickers = {model: half.picker for model, half in by_model.items()}
    return ByModel(pickers, lambda name: fleets.meaning(name)[0]), vocab_size


def preview_of(
    halves: Sequence[Half], members: Members, intake: Intake, authority: Authority
) -> Preview:
    """What `trunkline explain --prompt` asks. `served_by` was called before."""

    def picker_of(name: str) -> FleetPicker | None:
        if not isinstance(members, Fleets):
            return halves[0].core.picker
        model = members.meaning(name)[0]
        return next((half.core.picker for half in halves if half.core.model.name == model), None)

    return Preview(
        intake=intake,
        tenancy=authority.tenancy,
        org_and_tenant=authority.tenants.org_and_tenant if authority.tenants else None,
        knows_model=members.knows_model,
        picker_of=picker_of,
    )


def watches_of(
    halves: Sequence[Half], members: Members, clock: Clock, log: EventLog
) -> list[Coroutine[Any, Any, None]]:
    """What looks at clocks and workers, and writes down what people should know."""

    def unheeding(half: Half) -> Collection[WorkerId]:
        desk = half.core.picker.desk
        return desk.heed.alarmed if desk is not None else ()

    alarms = [
        watch_alarms(half.core.fleet, members.unheard, partial(unheeding, half), clock, log)
        for half in halves
    ]
    return [watch_clocks(clock, log), *alarms]


async def _keep_house(directory: Directory, clock: Clock) -> None:
    """Expired predictions go, a few times a second."""
    while True:
        await asyncio.sleep(_HOUSEKEEPING_S)
        directory.expire(clock.now())
