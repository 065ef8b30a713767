"""Several models behind one gateway: each has a membership, and a worker joins the model it serves.

A worker that was added for no model is asked what it serves until it says one of ours; where it
comes to serve another, it is asked anew. All else is the membership's. Must never: let one worker
into two fleets, or guess at a model. Read `membership.py` for one model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from trunkline.control.engine import EngineKind, parse_models
from trunkline.control.flush import Flushed
from trunkline.control.member import DISCOVERY_PAUSE_SECS
from trunkline.control.membership import MAX_WORKERS, Membership
from trunkline.control.supervised import Supervised
from trunkline.control.views import CheckView, Heartbeat, MemberView, Mode, WorkerSpec, shown_url
from trunkline.core.records import WorkerId
from trunkline.errors import ConfigError, WorkerLost, WorkerTimeout
from trunkline.ports.worker import Fetch

_SHOWN_NAMES = 3


@dataclass(slots=True, kw_only=True)
class _Place:
    """Where a worker is, or that it is being asked."""

    spec: WorkerSpec
    model: str = ""
    """Empty while it is not known."""
    why: str = "not reached yet"
    is_other_model: bool = False
    """It answered, with none of ours."""
    is_draining: bool = False
    search: asyncio.Task[None] | None = field(default=None, repr=False)


class Fleets(Supervised):
    """The workers of a gateway with several models; asked and told as a `Membership` is. Its
    memberships are opened and closed by whoever made them.
    """

    def __init__(
        self, memberships: Mapping[str, Membership], names: Mapping[str, str], *, fetch: Fetch,
        timeout_ms: float,
    ) -> None:  # fmt: skip
        """`memberships` by model; `names`: every name of a model, and the model it stands for."""
        super().__init__()
        self._memberships = memberships
        self._names = names
        self._fetch = fetch
        self._timeout_ms = timeout_ms
        self._places: dict[str, _Place] = {}

    def add(self, spec: WorkerSpec) -> str:
        """As a membership does. Raises ConfigError beyond its bound, and for a model that is none
        of ours.
        """
        known = self._places.get(spec.name)
        if known is not None and known.spec == spec:
            return spec.name
        if spec.model_id and spec.model_id not in self._names:
            raise ConfigError(f"{spec.name}: {spec.model_id} is no model here: {self._listed()}")
        if known is None and len(self._places) >= MAX_WORKERS:
            raise ConfigError(f"{spec.name}: {MAX_WORKERS} workers are here, no more are taken")
        self.remove(spec.name)
        self._places[spec.name] = place = _Place(spec=spec)
        if spec.model_id:
            self._settle(place, self._names[spec.model_id])
        else:
            place.search = self.begin(self._search(place), f"model of {spec.name}")
        return spec.name

    def remove(self, name: str) -> bool:
        place = self._places.pop(name, None)
        if place is None:
            return False
        if place.search is not None:
            place.search.cancel()
        if place.model:
            self._memberships[place.model].remove(name)
        return True

    def left(self, name: str) -> None:
        """Its membership let it go."""
        self._places.pop(name, None)

    def serves_another(self, name: str) -> None:
        """It was found to serve none of the names of the model it is with: it is asked anew, unless
        it was added for that model.
        """
        place = self._places.get(name)
        if place is None or place.spec.model_id or not place.model or place.search is not None:
            return
        # Not here: whoever tells it is a task of the membership's, which that would end.
        place.search = self.begin(self._move(place), f"model of {name}")

    # -- asked as a membership is ------------------------------------------------------------------

    def spec(self, name: str) -> WorkerSpec | None:
        place = self._places.get(name)
        return place.spec if place else None

    def drain(self, name: str, grace_secs: float | None = None) -> bool:
        place = self._places.get(name)
        if place is None:
            return False
        home = self._home(name)
        place.is_draining = True
        if home is not None:
            home.drain(name, grace_secs)
        elif grace_secs is not None:
            self.remove(name)  # nothing runs there
        return True

    def undrain(self, name: str) -> bool:
        place = self._places.get(name)
        if place is None:
            return False
        place.is_draining = False
        home = self._home(name)
        return home is None or home.undrain(name)

    async def check(self, name: str) -> CheckView | None:
        home = self._home(name)
        return await home.check(name) if home else None

    async def reset(self, name: str) -> Flushed | None:
        home = self._home(name)
        if home is None:
            return Flushed.FAILED if name in self._places else None
        return await home.reset(name)

    def heartbeat(self, heartbeat: Heartbeat) -> str | None:
        home = self._home(heartbeat.name)
        if home is None:
            return f"{heartbeat.name}: no such worker here, or it is not reachable yet"
        return home.heartbeat(heartbeat)

    def unheard(self) -> dict[WorkerId, str]:
        homes = self._memberships.values()
        return {worker: why for home in homes for worker, why in home.unheard().items()}

    def views(self) -> list[MemberView]:
        found = (self.view(name) for name in self._places)
        return [view for view in found if view is not None]

    def view(self, name: str) -> MemberView | None:
        place, home = self._places.get(name), self._home(name)
        if home is not None:
            return home.view(name)
        return _unplaced(place) if place else None

    def is_starting(self) -> bool:
        return bool(self._places) and not any(
            home.has_joined for home in self._memberships.values()
        )

    def knows_model(self, name: str) -> bool:
        """Whether a model of ours is called so, or a worker answers to it."""
        return bool(self.meaning(name)[0])

    def meaning(self, name: str) -> tuple[str, str]:
        """The model that a name asks for, and the adapter on it, empty for none; both empty for a
        name that nobody answers to.
        """
        model = self._names.get(name)
        if model is not None:
            return model, ""
        for own, home in self._memberships.items():
            if home.lists(name):
                return own, name
        return "", ""

    def lengths(self, configured: int) -> list[tuple[str, int]]:
        """Each model, and what its workers take of a prompt plus answer."""
        return [
            (name, most)
            for home in self._memberships.values()
            for name, most in home.lengths(configured)
        ]

    # -- inside ------------------------------------------------------------------------------------

    def _home(self, name: str) -> Membership | None:
        place = self._places.get(name)
        return self._memberships[place.model] if place and place.model else None

    def _settle(self, place: _Place, model: str) -> None:
        place.model, place.search = model, None
        self._memberships[model].add(place.spec)
        if place.is_draining:
            self._memberships[model].drain(place.spec.name)

    async def _move(self, place: _Place) -> None:
        self._memberships[place.model].remove(place.spec.name)
        place.model = ""
        await self._search(place)

    async def _search(self, place: _Place) -> None:
        """Until it says a model of ours."""
        while True:
            try:
                status, body = await self._fetch(
                    place.spec.endpoint, "GET", "/v1/models", timeout_ms=self._timeout_ms
                )
            except (WorkerLost, WorkerTimeout) as error:
                place.why = str(error)
            else:
                listed = [one.model_id for one in parse_models(body)] if status == 200 else []
                ours = (self._names[name] for name in listed if name in self._names)
                model = next(ours, None)
                if model is not None:
                    self._settle(place, model)
                    return
                place.is_other_model = bool(listed)
                serves = ", ".join(name[:80] for name in listed[:_SHOWN_NAMES])
                place.why = f"/v1/models answered {status}" if not listed else (
                    f"serves {serves}; this gateway serves {self._listed()}"
                )  # fmt: skip
            await asyncio.sleep(DISCOVERY_PAUSE_SECS)

    def _listed(self) -> str:
        return ", ".join(list(self._memberships)[:_SHOWN_NAMES])


def _unplaced(place: _Place) -> MemberView:
    return MemberView(
        name=place.spec.name,
        url=shown_url(place.spec.endpoint),
        mode=Mode.CONNECTING,
        reason=place.why,
        exclusion=None,
        is_draining=place.is_draining,
        breaker=0,
        block_tokens=None,
        capacity_blocks=None,
        model_id="",
        engine=EngineKind.UNKNOWN,
        engine_version="",
        max_model_len=None,
        degraded=(),
        ranks=(),
        labels=dict(place.spec.labels),
        check=CheckView(examination=None, unfinished=""),
        endpoint=place.spec.endpoint,
        is_other_model=place.is_other_model,
    )


Members = Membership | Fleets
"""The workers of one model, or of several."""
