"""What a gateway asks of workers on its own account, put together: tests, warming up.

Read `wiring.py` for who asks for it, `gateway/errands.py` for one request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from trunkline.assembly import Core
from trunkline.authority import Authority
from trunkline.control.probe import post
from trunkline.gateway.canary import CanaryParts, PullCanary
from trunkline.gateway.errands import Errands
from trunkline.gateway.examiner import Examiner, ExaminerParts
from trunkline.gateway.metrics import Sample
from trunkline.gateway.warmup import Warmer, WarmerParts
from trunkline.observe import EventLog
from trunkline.ports.clock import Clock


def errands_of(core: Core) -> Errands:
    return Errands(namespaces=core.namespaces, served_model=lambda: core.model.name, post=post)


def examiner_of(
    core: Core, clock: Clock, authority: Authority, errands: Errands, draw: Callable[[int], bytes]
) -> Examiner:
    """`draw(n)` gives n unguessable bytes."""
    return Examiner(
        ExaminerParts(
            errands=errands,
            namespaces=core.namespaces,
            directory=core.directory,
            fleet=core.fleet,
            prompts=core.prompts,
            table=lambda: authority.tenancy.table,
            served_model=lambda: core.model.name,
            target_of=core.picker.target,
            clock=clock,
            draw=draw,
        )
    )


def warmers_of(core: Core, clock: Clock, errands: Errands, log: EventLog) -> list[Warmer]:
    """None where nothing is pulled."""
    if core.picker.desk is None:
        return []
    parts = WarmerParts(
        desk=core.picker.desk,
        namespaces=core.namespaces,
        directory=core.directory,
        fleet=core.fleet,
        target_of=core.picker.target,
        errands=errands,
        clock=clock,
        log=log,
    )
    return [Warmer(parts)]


class PullTest:
    """The canary of pulls, where pulls are; a `MetricsSource`."""

    def __init__(
        self,
        core: Core,
        clock: Clock,
        authority: Authority,
        errands: Errands,
        draw: Callable[[int], bytes],
        log: EventLog,
    ) -> None:
        """`draw(n)` gives n unguessable bytes."""
        self._desk = core.picker.desk
        self._canary: PullCanary | None = None
        if self._desk is not None:
            parts = CanaryParts(
                desk=self._desk,
                errands=errands,
                namespaces=core.namespaces,
                directory=core.directory,
                fleet=core.fleet,
                target_of=core.picker.target,
                table=lambda: authority.tenancy.table,
                served_model=lambda: core.model.name,
                vocab_size=core.prompts.vocab_size,
                clock=clock,
                draw=draw,
                log=log,
            )
            self._canary = PullCanary(parts)

    async def run(self) -> None:
        """Until cancelled; at once where nothing is pulled."""
        if self._canary is not None:
            await self._canary.run()

    def samples(self) -> Iterable[Sample]:
        if self._canary is None or self._desk is None:
            return
        yield Sample("pull_canaries_total", self._canary.passed, ("passed",))
        yield Sample("pull_canaries_total", self._canary.failed, ("failed",))
        yield Sample("pulls_degraded", len(self._desk.degraded))
