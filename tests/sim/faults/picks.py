"""What one life of a gateway chooses, held against what the world knows (I4, I12).

    I4   nothing is sent to a worker that may not be chosen, or that is long gone; nor with reuse by
         a gateway whose lease with the registry has run out
    I12  retries within their budget, in every window

Each life of each gateway has its own. Read `checks.py` for the other checks.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Awaitable, Mapping
from typing import TYPE_CHECKING, Any

from faults.gate import Gate

from trunkline.core.decision import Exclusion
from trunkline.core.records import WorkerId
from trunkline.gateway.contracts import InferenceRequest, Pick
from trunkline.ports.worker import AttemptEnd

if TYPE_CHECKING:
    from faults.world import World

GONE_S = 5.0
"""Two failed probes, each with its interval and its time-out, and a moment."""
WINDOW_S = 9.0
"""The budget counts ten slots of one second; in any nine seconds it is kept whatever they are."""
BUDGET_SHARE = 0.2


class Picks:
    """Watches one life of a gateway, from when it is up on."""

    def __init__(self, world: World, gate: Gate) -> None:
        self._world = world
        self._gate = gate
        self._requests: deque[float] = deque()
        self._retries: deque[float] = deque()
        self._failed: dict[str, None] = {}
        """Requests whose last attempt failed."""
        self._known: dict[str, None] = {}
        self.last_s = 0.0
        line, picker = gate.line, gate.core.picker
        take, ended, choose = line.pick, line.ended, picker.pick

        def picked(request: InferenceRequest, tried: frozenset[Any]) -> Any:
            self._count(request)
            return take(request, tried)

        def over(pick: Pick, end: AttemptEnd, cached_tokens: int | None) -> None:
            if end is AttemptEnd.WORKER_FAILED:
                self._failed[pick.ticket.decision.request_id] = None
            ended(pick, end, cached_tokens)

        def chosen(request: InferenceRequest, tried: frozenset[Any]) -> Any:
            self._check_lease(request)
            usable, excluded = gate.core.fleet.usable(gate.clock.boot())
            found = choose(request, tried)
            if inspect.isawaitable(found):
                return self._later(found)
            self._check_choice(found, excluded if usable else {})
            return found

        line.pick, line.ended, picker.pick = picked, over, chosen

    async def _later(self, found: Awaitable[Pick]) -> Pick:
        made = await found
        self._check_choice(made, {})  # who may be chosen has changed since
        return made

    def _check_lease(self, request: InferenceRequest) -> None:
        """I4 of the gateway itself: by when it last told the registry that it is there."""
        world, gate = self._world, self._gate
        late_s = world.net.time() - gate.may_reuse_until_s()
        if request.grant.scope is None:
            world.seen.counts["sent without reuse"] += gate.common is not None
        elif late_s > 0.0:
            world.violate("I4", f"{gate.name} reuses {late_s:.2f} s after its lease")

    def _check_choice(self, pick: Pick, excluded: Mapping[WorkerId, Exclusion]) -> None:
        """I4. `excluded` as of just before; empty where all are, and any will do."""
        world, gate, name = self._world, self._gate, str(pick.worker)
        self.last_s = world.net.time()
        world.seen.picked(pick)
        if pick.worker in excluded:
            world.violate("I4", f"{name} was chosen though {excluded[pick.worker].value}")
        if (gate.name, name) in world.checks.drained:
            world.violate("I4", f"{name} was chosen after it was drained")
        bad = world.troubles.bad_for(gate.name)
        others = world.setting.worker_count - len(bad)
        are_enough = 2 * others >= world.setting.worker_count
        gone_s = self.last_s - bad.get(name, self.last_s)
        if gone_s > GONE_S and are_enough:
            world.violate("I4", f"{name} was chosen {gone_s:.1f} s after it was gone")

    def _count(self, request: InferenceRequest) -> None:
        """I12."""
        now_s, name = self._world.net.time(), request.request_id
        if name not in self._known:
            self._known[name] = None
            self._requests.append(now_s)
        elif name in self._failed:
            del self._failed[name]
            self._retries.append(now_s)
            self._check_budget(now_s)

    def _check_budget(self, now_s: float) -> None:
        retries = sum(at_s > now_s - WINDOW_S for at_s in self._retries)
        requests = sum(at_s > now_s - 10.0 - 1.0 for at_s in self._requests)
        floor = 10.0 * self._world.setting.retry_floor_per_s
        if retries > BUDGET_SHARE * requests + floor:
            self._world.violate("I12", f"{retries} retries of {requests} requests, floor {floor}")
