"""Holds what a source names against the workers that there are: adds, drains, removes.

Owns which workers are whose: a source touches those alone that it named, so that what an operator
added by hand stays. Must never: let a name in whose address may be none, or forget workers because
a source is out of reach. Read `ports/workers.py` for what a source tells.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from trunkline.control.fleets import Members
from trunkline.control.views import WorkerSpec
from trunkline.errors import ConfigError
from trunkline.observe import EventLog
from trunkline.ports.workers import NamedWorker, WorkerSource

SpecOf = Callable[[str, str, Mapping[str, str]], WorkerSpec]


@dataclass(slots=True, kw_only=True)
class _Place:
    spec: WorkerSpec
    is_draining: bool


class Roster:
    """Of one source."""

    def __init__(
        self,
        source: WorkerSource,
        members: Members,
        spec_of: SpecOf,
        *,
        address_problem: Callable[[str, bool], str | None],
        hide: Callable[[str], None],
        log: EventLog,
    ) -> None:
        """`spec_of(url, api_key, labels)` raises ConfigError. `address_problem(host, is_found)`:
        why there may be no worker at this address. `hide` keeps a key out of the logs.
        """
        self._source = source
        self._members = members
        self._spec_of = spec_of
        self._address_problem = address_problem
        self._hide = hide
        self._log = log
        self._places: dict[str, _Place] = {}
        self._said: frozenset[str] = frozenset()
        """What was wrong with single names the last time."""
        self._is_in_trouble = False

    def adopt(self, specs: Sequence[WorkerSpec]) -> None:
        """The source named these, and they were added, before this was made."""
        for spec in specs:
            self._places[spec.name] = _Place(spec=spec, is_draining=False)

    async def run(self) -> None:
        """Until cancelled."""
        await self._source.run(self.take, self.trouble)

    def take(self, named: Sequence[NamedWorker]) -> None:
        """These are all there are."""
        self._is_in_trouble = self._say_well()
        problems: list[str] = []
        wanted: dict[str, _Place] = {}
        for one in named:
            try:
                spec = self._read(one)
            except ConfigError as error:
                problems.append(str(error))
            else:
                wanted.setdefault(spec.name, _Place(spec=spec, is_draining=one.is_draining))
        before = len(self._places)
        for name in [name for name in self._places if name not in wanted]:
            del self._places[name]
            self._members.remove(name)
        for name, place in wanted.items():
            try:
                self._put(name, place)
            except ConfigError as error:
                problems.append(str(error))
        if len(self._places) != before:
            self._log.info("workers.named", source=self._source.name, count=len(self._places))
        self._complain(problems)

    def trouble(self, why: str) -> None:
        """What it names could not be learnt; said when that begins."""
        if not self._is_in_trouble:
            self._log.warning(
                "workers.source_failed",
                source=self._source.name,
                why=why,
                meaning="the workers that it named before stay",
            )
        self._is_in_trouble = True

    def _say_well(self) -> bool:
        if self._is_in_trouble:
            self._log.info("workers.source_well", source=self._source.name)
        return False

    def _read(self, one: NamedWorker) -> WorkerSpec:
        spec = self._spec_of(one.url, one.api_key, dict(one.labels))
        for endpoint in filter(None, (spec.endpoint, spec.agent)):
            problem = self._address_problem(endpoint.host, one.is_found)
            if problem is not None:
                raise ConfigError(f"worker {one.url}: {problem}")
        return replace(spec, model_id=one.model_id)

    def _put(self, name: str, place: _Place) -> None:
        """Raises ConfigError at the bound."""
        known, here = self._places.get(name), self._members.spec(name)
        if known is None and here is not None:
            return  # somebody else added it, and may remove it
        if here != place.spec:
            self._hide(place.spec.endpoint.api_key)
            self._members.add(place.spec)
            known = None
        self._places[name] = place
        if place.is_draining is not (known is not None and known.is_draining):
            if place.is_draining:
                self._members.drain(name)
            else:
                self._members.undrain(name)

    def _complain(self, problems: Sequence[str]) -> None:
        for problem in problems:
            if problem not in self._said:
                self._log.warning("worker.refused", source=self._source.name, why=problem)
        self._said = frozenset(problems)
